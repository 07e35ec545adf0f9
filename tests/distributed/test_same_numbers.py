"""The same numbers on every mesh: each way to cut the work against one process, in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hp_train.config.schema import TrainerConfig
from hp_train.data.prepare import prepare
from hp_train.data.source import open_data
from hp_train.models.initial_weights import initialize
from hp_train.models.llama import Llama
from hp_train.topology import Coordinates
from hp_train.training import grad_norm, trainer
from hp_train.training.setup import Worker
from tests.distributed.ranks import run_ranks
from tests.distributed.same_numbers import ADAMW, SGD, TINY, Numbers, differences, make_config, run_one

MESHES = {
    "ddp 2": (2, {"fsdp.dp_mode": "ddp", "fsdp.dp_replicate_size": 2}),
    "fsdp 2": (2, {"fsdp.dp_shard_size": 2}),
    "fsdp 4": (4, {"fsdp.dp_shard_size": 4}),
    "hsdp 2x2": (4, {"fsdp.dp_mode": "hsdp", "fsdp.dp_shard_size": 2, "fsdp.dp_replicate_size": 2}),
    "pp 2 gpipe": (2, {"accelerator.pp_size": 2, "pp.schedule": "gpipe"}),
    "pp 2 1f1b": (2, {"accelerator.pp_size": 2, "pp.schedule": "1f1b"}),
    "pp 2 x fsdp 2": (4, {"accelerator.pp_size": 2, "fsdp.dp_shard_size": 2}),
    "pp 4": (4, {"accelerator.pp_size": 4}),
    "accumulation 4": (1, {"trainer.micro_batch_size": 2}),
}
ONE_PROCESS = {"trainer.micro_batch_size": 8}
VARIANTS = {
    "packed, untied": (False, False),
    "padded, untied": (True, False),
    "packed, tied": (False, True),
    "padded, tied": (True, True),
}


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token folder of documents from 3 to 40 tokens, so that most sequences of 16 are padded."""
    folder = tmp_path_factory.mktemp("documents")
    lines = ['{"text": "%s"}' % ("abcdefghij klmnopqrst uvwxyz 0123456789"[: 3 + 7 * i % 37]) for i in range(400)]
    (folder / "lines.jsonl").write_text("\n".join(lines) + "\n")
    prepare([folder / "lines.jsonl"], folder / "tokens")
    return folder / "tokens"


def settings(variant: str, documents: Path) -> dict:
    padded, tied = VARIANTS[variant]
    data = {"data.name": "tokens", "data.path": str(documents), "data.document_boundaries": "pad"} if padded else {}
    return {**TINY, **data, "model.tie_embeddings": tied}


def train_all(rank: int, world_size: int, root: Path, mesh: dict, documents: Path, engines: list[str]) -> dict | None:
    """Run every variant under AdamW and SGD with each sharding engine; numbers by (engine, variant) on rank 0."""
    results = {}
    for engine in engines:
        for variant in VARIANTS:
            base = settings(variant, documents)
            results[engine, variant] = tuple(
                run_one(
                    rank,
                    world_size,
                    root / engine / variant / name,
                    make_config(base, optimizer, mesh, {"fsdp.implementation": engine}),
                )
                for name, optimizer in (("adamw", ADAMW), ("sgd", SGD))
            )
    return results if rank == 0 else None


@pytest.fixture(scope="module")
def reference(documents: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Numbers, Numbers]]:
    results = run_ranks(1, train_all, tmp_path_factory.mktemp("one"), ONE_PROCESS, documents, ["hsdp"])[0]
    return {variant: numbers for (_, variant), numbers in results.items()}


@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_gives_the_numbers_of_one_process(
    name: str, reference: dict[str, tuple[Numbers, Numbers]], documents: Path, tmp_path: Path
) -> None:
    world_size, mesh = MESHES[name]
    shards = any(key.startswith("fsdp.") for key in mesh)
    results = run_ranks(world_size, train_all, tmp_path, mesh, documents, ["hsdp", "torch"] if shards else ["hsdp"])[0]
    for (engine, variant), (adamw, sgd) in results.items():
        expected_adamw, expected_sgd = reference[variant]
        assert differences(expected_adamw, adamw, sgd=False) == [], (engine, variant)
        assert differences(expected_sgd, sgd, sgd=True) == [], (engine, variant)


def double_one_gradient(worker: Worker) -> None:
    parameter = next(iter(worker.model.parameters.values()))

    def double(*_: object) -> None:
        parameter.grad.mul_(2)

    worker.optimizer.register_step_pre_hook(double)


def scale_loss_by_num_microbatches(worker: Worker) -> None:
    train_step, num_microbatches = worker.engine.train_step, worker.batch_plan.num_microbatches
    worker.engine.train_step = lambda batches, token_count: train_step(batches, token_count / num_microbatches)


def read_the_first_rank_s_tokens_twice(worker: Worker) -> None:
    trainer.Trainer._samples_of = lambda self, step: self.worker.batch_plan.samples_of(step, 0)


def leave_the_last_stage_out_of_the_norm(worker: Worker) -> None:
    def owned_square_sum(parameters: dict, coordinates: Coordinates, not_owned: frozenset[str]) -> torch.Tensor:
        whole = grad_norm.owned_square_sum(parameters, coordinates, not_owned)
        return torch.zeros_like(whole) if coordinates.pp == 1 else whole

    trainer.owned_square_sum = owned_square_sum


PLANTED = {
    double_one_gradient: ("fsdp 2", "gradient model.embed_tokens.weight is off"),
    scale_loss_by_num_microbatches: ("fsdp 2", "step-1 gradient norm"),
    read_the_first_rank_s_tokens_twice: ("fsdp 2", "step-1 loss"),
    leave_the_last_stage_out_of_the_norm: ("pp 2 1f1b", "step-1 gradient norm"),
}


def train_spoilt(
    rank: int, world_size: int, root: Path, mesh: dict, documents: Path, plant: Callable
) -> Numbers | None:
    config = make_config(settings("packed, untied", documents), SGD, mesh)
    return run_one(rank, world_size, root, config, plant=plant)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_caught(
    plant: Callable, reference: dict[str, tuple[Numbers, Numbers]], documents: Path, tmp_path: Path
) -> None:
    name, symptom = PLANTED[plant]
    world_size, mesh = MESHES[name]
    spoilt = run_ranks(world_size, train_spoilt, tmp_path, mesh, documents, plant)[0]
    found = differences(reference["packed, untied"][1], spoilt, sgd=True)
    assert any(symptom in line for line in found), found


def test_one_process_equals_a_bare_loop_over_hugging_face_llama(
    reference: dict[str, tuple[Numbers, Numbers]], documents: Path
) -> None:
    """Losses, norms and step-1 gradients of another loop: transformers' model, torch's AdamW, mean of all tokens."""
    expected = bare_loop(make_config(settings("packed, untied", documents), ADAMW, ONE_PROCESS))
    assert differences(expected, reference["packed, untied"][0], sgd=False) == []


def bare_loop(config: TrainerConfig) -> Numbers:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape, trainer_section = config.model, config.trainer
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.dim,
            intermediate_size=shape.ffn_dim,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            rms_norm_eps=shape.norm_eps,
            rope_theta=shape.rope_theta,
            max_position_embeddings=shape.max_seq_len,
            attn_implementation="sdpa",
        )  # fmt: skip
    )
    ours = Llama(shape)
    initialize(ours, trainer_section.seed)
    model.load_state_dict(ours.state_dict())
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": config.optimizer.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=config.optimizer.lr, betas=tuple(config.optimizer.betas), eps=config.optimizer.eps,
    )  # fmt: skip
    source = open_data(config.data, trainer_section.seq_len, trainer_section.seed, "train", shape.vocab_size)
    numbers = Numbers([], [])
    size = trainer_section.global_batch_size
    for step in range(trainer_section.max_steps):
        batch = source.batch(range(step * size, (step + 1) * size))
        logits = model(torch.from_numpy(batch.tokens)).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.targets).flatten())
        optimizer.zero_grad()
        loss.backward()
        numbers.losses.append(loss.item())
        numbers.grad_norms.append(torch.nn.utils.get_total_norm(p.grad for p in model.parameters()).item())
        if step == 0:
            numbers.gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    return numbers
