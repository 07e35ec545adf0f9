"""Activation checkpointing and compiled blocks: the same bits, the same names, less memory, known recomputation."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from hp_train.config.schema import ModelSection, TrainerConfig
from hp_train.config.validate import faults
from hp_train.models.initial_weights import initialize
from hp_train.models.llama import Llama
from hp_train.models.shapes import parameter_shapes
from hp_train.parallel.activation import COSTLY_OPERATORS, apply_activation_checkpointing, compile_blocks
from hp_train.pipeline_parallel.backward_split import backward_input, backward_weight
from tests.distributed.ranks import run_ranks

CONFIG = ModelSection(vocab_size=64, dim=64, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=160)
BATCH, SEQ = 2, 48
TOKENS = torch.randint(0, CONFIG.vocab_size, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
MODES = ("none", "full", "selective")


def build(mode: str, every: int = 1, config: ModelSection = CONFIG, **part: Any) -> Llama:
    model = Llama(config, loss_chunk_tokens=32, **part)
    initialize(model, seed=0)
    apply_activation_checkpointing(model, mode, every)
    return model


def gradients(model: Llama) -> dict[str, Tensor]:
    model(TOKENS, targets=TOKENS).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_gradients_are_the_same_bits(mode: str, masked: bool) -> None:
    mask = torch.ones(SEQ, SEQ, dtype=torch.bool).tril().expand(BATCH, 1, SEQ, SEQ) if masked else None
    positions = torch.arange(SEQ).expand(BATCH, -1) if masked else None
    results = []
    for model in (build("none"), build(mode)):
        model(TOKENS, positions, mask, TOKENS).backward()
        results.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert all(torch.equal(results[0][name], results[1][name]) for name in parameter_shapes(CONFIG))


@pytest.mark.parametrize("mode", MODES)
def test_names_and_state_stay_those_of_the_model(mode: str) -> None:
    model = build(mode)
    compile_blocks(model, backend="eager")
    assert [name for name, _ in model.named_parameters()] == list(parameter_shapes(CONFIG))
    assert list(model.state_dict()) == list(parameter_shapes(CONFIG))


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operators made and that are still alive; `model` owns those to leave out."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.current = 0
        self._known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, Tensor):
                self._count(item.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        if key in self._known or size == 0:
            return
        self._known.add(key)
        self.current += size
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.current -= size


def bytes_kept_for_backward(model: Llama) -> int:
    with LiveBytes(model) as live:
        loss = model(TOKENS, targets=TOKENS)
        kept = live.current
    assert loss.requires_grad
    return kept


def test_memory_falls_by_what_is_recomputed() -> None:
    kept = {mode: bytes_kept_for_backward(build(mode)) for mode in MODES}
    every_other = bytes_kept_for_backward(build("full", every=2))
    tokens = BATCH * SEQ
    block_input = 4 * tokens * CONFIG.dim
    # What a block's products return: q, o, down and attention (dim each), k and v (dim / 2 each), gate and up.
    products = 4 * tokens * (5 * CONFIG.dim + 2 * CONFIG.ffn_dim)
    in_blocks = kept["none"] - kept["full"]
    assert in_blocks > CONFIG.num_layers * products
    assert kept["full"] < (CONFIG.num_layers + 6) * block_input  # inputs, and what norm, head and loss keep
    # Selective keeps the products (fused attention returns its logsumexp too) and nothing else.
    selected = kept["selective"] - kept["full"]
    assert CONFIG.num_layers * products <= selected <= CONFIG.num_layers * (products + 4 * tokens * CONFIG.num_heads)
    assert abs(kept["none"] - every_other - in_blocks / 2) <= block_input


class CostlyCalls(TorchDispatchMode):
    """Counts the products and attentions that really run."""

    count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operator in COSTLY_OPERATORS
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("mode", "every", "recomputed"),
    [("none", 1, 0), ("full", 1, 4), ("full", 2, 2), ("full", 3, 2), ("full", 9, 1), ("selective", 1, 0)],
)
def test_products_are_recomputed_in_the_chosen_blocks_only(mode: str, every: int, recomputed: int) -> None:
    with CostlyCalls() as plain:
        gradients(build("none"))
    with CostlyCalls() as counted:
        gradients(build(mode, every))
    # A block has 7 products and attention; nothing in backward needs what the last product returns.
    assert counted.count - plain.count == recomputed * 7


def test_blocks_are_chosen_by_global_number() -> None:
    stage = Llama(CONFIG, layers=range(1, 4), embedding=False, head=False)
    before = {number: block.forward for number, block in stage.blocks.items()}
    apply_activation_checkpointing(stage, "full", 2)
    assert [number for number, block in stage.blocks.items() if block.forward != before[number]] == [2]


def test_full_recomputation_allows_separate_input_and_weight_gradients() -> None:
    hidden = torch.randn(BATCH, SEQ, CONFIG.dim, requires_grad=True)
    stage = build("full", layers=range(2, 4), embedding=False)
    parameters = list(stage.parameters())
    together = torch.autograd.grad(stage(hidden, targets=TOKENS), [hidden, *parameters])
    loss = stage(hidden, targets=TOKENS)
    apart = torch.autograd.grad(loss, [hidden], retain_graph=True) + torch.autograd.grad(loss, parameters)
    assert all(torch.equal(one, other) for one, other in zip(together, apart, strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", ["none", "selective"])  # full is compiled under FSDP, below
def test_compiled_blocks_share_one_graph_and_keep_the_numbers(mode: str) -> None:
    torch._dynamo.reset()
    expected = gradients(build(mode))
    counter = CompileCounterWithBackend("aot_eager")
    model = build(mode)
    compile_blocks(model, backend=counter)
    compiled = gradients(model)
    assert counter.frame_count == 1
    for name, grad in expected.items():
        assert (compiled[name] - grad).norm() <= 1e-6 * grad.norm()


def _under_fsdp(rank: int, world_size: int, variants: list[tuple[str, bool]], in_bf16: bool) -> list[str]:
    """Compare (mode, compiled) variants of a sharded model with plain FSDP; return the gradients that differ."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if in_bf16 else MixedPrecisionPolicy()
    plain: dict[str, Tensor] = {}
    wrong = []
    for mode, compiled in [("none", False), *variants]:
        with torch.device("meta"):
            model = Llama(replace(CONFIG, num_layers=2), loss_chunk_tokens=32)
        apply_activation_checkpointing(model, mode, 1)
        if compiled:
            compile_blocks(model, backend="aot_eager")
        for unit in (*model.blocks.values(), [model.model.norm, model.lm_head], model):
            fully_shard(unit, mp_policy=policy)
        model.to_empty(device="cpu")
        initialize(model, 0)
        found = {name: grad.full_tensor() for name, grad in gradients(model).items()}
        plain = plain or found
        for name, reference in plain.items():
            close = (found[name] - reference).norm() <= 1e-6 * reference.norm()
            if not (close if compiled else torch.equal(found[name], reference)):
                wrong.append(f"{mode} compiled={compiled} {name}")
    return wrong


@pytest.mark.parametrize("in_bf16", [False, True])
def test_sharded_blocks_recompute_to_the_same_bits(in_bf16: bool) -> None:
    assert run_ranks(2, _under_fsdp, [("full", False), ("selective", False)], in_bf16) == [[]] * 2


def test_sharded_blocks_compile_to_the_same_numbers() -> None:
    assert run_ranks(1, _under_fsdp, [("full", True)], False) == [[]]  # one rank: each would compile for itself


def test_selective_is_refused_where_the_two_halves_of_backward_run_apart() -> None:
    config = TrainerConfig()
    config.accelerator.pp_size, config.trainer.global_batch_size = 2, 16
    for mode, schedule, is_refused in (
        ("selective", "zb_h1", True), ("selective", "1f1b", False), ("full", "zb_h1", False), ("none", "zb_h1", False),
    ):  # fmt: skip
        config.activation_checkpoint.mode, config.pp.schedule = mode, schedule
        told = (
            "activation_checkpoint.mode=selective does not work with pp.schedule=zb_h1, which runs the two halves of "
        )
        assert any(fault.startswith(told) for fault in faults(config)) == is_refused, (mode, schedule)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_what_is_refused_would_fail_amid_the_first_step(mode: str) -> None:
    """Once torch recomputes selectively in both halves, the rule above can go."""
    stage = build(mode, layers=range(2, 4), embedding=False)
    hidden = torch.randn(BATCH, SEQ, CONFIG.dim, requires_grad=True)
    roots = [get_gradient_edge(stage(hidden, targets=TOKENS))]
    _, pending = backward_input(roots, [torch.ones(())], [hidden])
    if mode == "selective":
        with pytest.raises(RuntimeError, match="backward an extra time"):
            backward_weight(pending)
        return
    backward_weight(pending)
    whole = build("none", layers=range(2, 4), embedding=False)
    whole(hidden.detach(), targets=TOKENS).backward()
    for split, expected in zip(stage.parameters(), whole.parameters(), strict=True):
        assert torch.equal(split.grad, expected.grad)
