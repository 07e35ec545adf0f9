"""Initial weights: a function of seed and name, the same on every layout, without a whole parameter in memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from hp_train.config.schema import ModelSection
from hp_train.models import initial_weights
from hp_train.models.initial_weights import initialize
from hp_train.models.llama import Llama
from tests.distributed.ranks import run_ranks

# Sizes that 2 and 4 ranks do not divide, and one that leaves ranks with nothing.
CONFIG = ModelSection(vocab_size=101, dim=36, num_layers=3, num_heads=2, num_kv_heads=1, ffn_dim=54)


def weights(config: ModelSection = CONFIG, seed: int = 0, **part: Any) -> dict[str, Tensor]:
    module = Llama(config, **part)
    initialize(module, seed)
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def test_same_seed_same_numbers_other_seed_or_name_others() -> None:
    first, again, other = weights(), weights(), weights(seed=1)
    matrices = [name for name in first if first[name].ndim > 1]
    for name in first:
        assert torch.equal(first[name], again[name])
    assert not any(torch.equal(first[name], other[name]) for name in matrices)
    starts = {tuple(first[name].flatten()[:4].tolist()) for name in matrices}
    assert len(starts) == len(matrices)


def test_blocks_of_one_matrix_are_drawn_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial_weights, "BLOCK_NUMEL", 128)
    embedding = weights()["model.embed_tokens.weight"]
    assert len(torch.unique(embedding, dim=0)) == len(embedding)


def test_global_state_of_the_generator_is_neither_used_nor_moved() -> None:
    torch.manual_seed(1)
    module = Llama(CONFIG)
    before = torch.get_rng_state()
    initialize(module, 0)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(module.lm_head.weight, weights()["lm_head.weight"])


def test_deviations_follow_the_scheme() -> None:
    config = ModelSection(dim=256, num_layers=8, num_heads=4, ffn_dim=512, vocab_size=512)
    for name, weight in weights(config).items():
        if weight.ndim == 1:
            assert torch.equal(weight, torch.ones_like(weight))
            continue
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        deviation = math.sqrt(1 / 640) / (math.sqrt(16) if residual else 1)  # sqrt(2 / (5 x 256)); 2 x 8 layers
        # The sample deviation of n normals scatters by 1/sqrt(2n), their mean by 1/sqrt(n): five of those.
        assert abs(weight.std().item() / deviation - 1) < 5 / math.sqrt(2 * weight.numel())
        assert abs(weight.mean().item() / deviation) < 5 / math.sqrt(weight.numel())


@pytest.mark.parametrize("tied", [False, True])
def test_stages_start_as_the_whole_does(tied: bool) -> None:
    config = ModelSection(vocab_size=101, dim=36, num_layers=3, num_heads=2, ffn_dim=54, tie_embeddings=tied)
    whole = weights(config)
    stages = weights(config, layers=range(0, 1), head=False) | weights(config, layers=range(1, 3), embedding=False)
    if tied:
        assert torch.equal(stages.pop("lm_head.weight"), whole["model.embed_tokens.weight"])
    assert stages.keys() == whole.keys()
    assert all(torch.equal(stages[name], whole[name]) for name in whole)


def test_a_vector_without_a_rule_is_refused() -> None:
    module = Llama(CONFIG)
    module.extra = nn.Parameter(torch.zeros(3))
    with pytest.raises(AssertionError, match="no rule for the vector extra"):
        initialize(module, 0)


class Drawn(TorchDispatchMode):
    """Remembers the largest floating tensor that any operator made or took, and how many numbers were drawn."""

    largest = 0
    total = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        for item in (result, *args):
            if isinstance(item, Tensor) and item.is_floating_point():
                self.largest = max(self.largest, item.numel())
        self.total += result.numel() if operator is torch.ops.aten.normal_.default else 0
        return result


def _layouts(rank: int, world_size: int) -> list[str]:
    """Initialise one model in many layouts; return the names that differ from the plain ones, which should be none."""
    initial_weights.BLOCK_NUMEL = 128  # the small parameters then have many blocks
    plain = weights()
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layouts = [
        (line, [Shard(0)]), (line, [Shard(1)]), (line, [Replicate()]),
        (grid, [Replicate(), Shard(0)]), (grid, [Shard(0), Shard(1)]), (grid, [Shard(1), Shard(0)]),
        (grid, [Shard(0), Shard(0)]), (grid, [_StridedShard(0, split_factor=2), Shard(0)]),
        (grid, [_StridedShard(1, split_factor=2), Shard(1)]),
    ]  # fmt: skip
    wrong = []
    for mesh, placements in layouts:
        module = Llama(CONFIG)
        for owner in module.modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                strided = isinstance(placements[0], _StridedShard)
                dim = max((p.dim for p in placements if not isinstance(p, Replicate)), default=0)
                if parameter.ndim <= dim or (strided and parameter.shape[dim] % 4):
                    continue  # torch makes strided shards of divisible sizes only
                sharded = distribute_tensor(torch.zeros_like(parameter), mesh, placements, src_data_rank=None)
                setattr(owner, name, nn.Parameter(sharded))
        initialize(module, 0)
        for name, parameter in module.named_parameters():
            expected, local = plain[name], parameter
            if isinstance(parameter, DTensor):
                expected = distribute_tensor(expected, mesh, placements, src_data_rank=None).to_local()
                local = parameter.to_local()
            if not torch.equal(local, expected):
                wrong.append(f"{placements} {name}")
    return wrong


def _sharded_by_fsdp(rank: int, world_size: int) -> tuple[bool, bool, int, int]:
    config = ModelSection(vocab_size=4001, dim=36, num_layers=1, num_heads=2, ffn_dim=54, tie_embeddings=True)
    initial_weights.BLOCK_NUMEL = 2048
    with torch.device("meta"):
        module = Llama(config)
    for block in module.blocks.values():
        fully_shard(block)
    fully_shard(module)
    module.to_empty(device="cpu")
    with Drawn() as drawn:
        initialize(module, 7)
    tied = module.lm_head.weight is module.model.embed_tokens.weight
    plain = weights(config, seed=7)
    same = all(torch.equal(p.full_tensor(), plain[name]) for name, p in module.named_parameters())
    tokens = torch.arange(8).unsqueeze(0)
    reference = Llama(config)
    reference.load_state_dict({**plain, "lm_head.weight": plain["model.embed_tokens.weight"]})
    same = same and torch.equal(module(tokens), reference(tokens))
    dist.barrier()
    return same, tied, drawn.largest, drawn.total


def test_shards_of_every_layout_hold_the_same_numbers() -> None:
    assert run_ranks(4, _layouts) == [[]] * 4


def test_a_sharded_module_is_initialised_without_holding_a_whole_parameter() -> None:
    for same, tied, largest, total in run_ranks(2, _sharded_by_fsdp):
        assert same
        assert tied
        assert largest <= 2001 * 36  # the shard of the embedding, not the 4001 rows of it
        assert 0.49 * 4001 * 36 <= total <= 0.6 * 4001 * 36  # its half, to whole blocks, and the small ones
