"""What the same-numbers tests run on every mesh, what they keep of a run, and how two runs are compared."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch.distributed.tensor import DTensor

from hp_train.config.schema import TrainerConfig
from hp_train.training.run_context import RunContext
from hp_train.training.setup import Worker, build_worker
from hp_train.training.trainer import Trainer

TINY = {
    "model.dim": 32, "model.num_layers": 4, "model.num_heads": 4, "model.num_kv_heads": 2, "model.ffn_dim": 64,
    "model.vocab_size": 260, "trainer.seq_len": 16, "trainer.global_batch_size": 8, "trainer.micro_batch_size": 2,
    "trainer.device": "cpu", "trainer.max_grad_norm": None, "trainer.seed": 3, "trainer.loss_chunk_tokens": 24,
    "checkpoint.every": 0, "lr_scheduler.name": "constant",
}  # fmt: skip
ADAMW = {"optimizer.name": "adamw", "optimizer.lr": 3e-3, "trainer.max_steps": 10}
SGD = {"optimizer.name": "sgd", "optimizer.lr": 0.1, "trainer.max_steps": 3}


def make_config(*layers: dict) -> TrainerConfig:
    """Return a config from dotted keys, later layers over earlier ones."""
    config = OmegaConf.structured(TrainerConfig)
    for layer in layers:
        for key, value in layer.items():
            OmegaConf.update(config, key, value)
    return OmegaConf.to_object(config)


@dataclass
class Numbers:
    """What one run is judged by; tensors are whole, on the CPU, by Hugging Face name."""

    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # of step 1
    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # after the last step


def run_one(rank: int, world_size: int, run_dir: Path, config: TrainerConfig, *, plant=None) -> Numbers | None:
    """Train `config` on this rank; the numbers of the whole job on rank 0, None elsewhere.

    `plant(worker)` may spoil the worker before training: a test of the tests.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    context = RunContext(run_dir, attempt=1, rank=rank, local_rank=rank, world_size=world_size)
    worker = build_worker(config, context)
    if plant is not None:
        plant(worker)
    gradients: dict[str, torch.Tensor] = {}

    def keep_first(*_: object) -> None:
        if not gradients:
            gradients.update(_whole({name: p.grad for name, p in worker.model.parameters.items()}))

    worker.optimizer.register_step_pre_hook(keep_first)
    Trainer(config, context, worker).run()
    weights = _whole(dict(worker.model.parameters))
    merged = _merge(world_size, worker, [gradients, weights])
    if rank != 0:
        return None
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return Numbers([row["loss"] for row in rows], [row["grad_norm"] for row in rows], *merged)


def differences(reference: Numbers, other: Numbers, *, sgd: bool) -> list[str]:
    """Return what differs beyond float32 summation order; empty when the two runs are the same numbers.

    Reordering sums moves float32 gradients of this size by some 3e-7 of their norm in the first step; AdamW amplifies
    it from step to step, so that later steps are compared by loss (AdamW) and by weights (SGD).
    """
    found = []
    _compare(found, "step-1 loss", reference.losses[0], other.losses[0], 1e-6)
    _compare(found, "step-1 gradient norm", reference.grad_norms[0], other.grad_norms[0], 1e-5)
    for step, (one, two) in enumerate(zip(reference.losses, other.losses, strict=True), 1):
        _compare(found, f"loss of step {step}", one, two, 1e-5)
    tensors = [("gradient", reference.gradients, other.gradients)]
    if sgd:
        tensors.append(("weight", reference.weights, other.weights))
    for kind, expected, actual in tensors:
        if expected.keys() != actual.keys():
            found.append(f"{kind}s: {sorted(expected.keys() ^ actual.keys())} are on one side only")
            continue
        for name, tensor in expected.items():
            error = ((tensor - actual[name]).norm() / tensor.norm().clamp_min(1e-30)).item()
            if not error <= 2e-6:
                found.append(f"{kind} {name} is off by {error:.2e} of its norm")
    return found


def _compare(found: list[str], what: str, expected: float, actual: float, tolerance: float) -> None:
    if not abs(actual - expected) <= tolerance * abs(expected):
        found.append(f"{what}: {actual!r} instead of {expected!r}")


def _whole(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in tensors.items()
        if tensor is not None
    }


def _merge(world_size: int, worker: Worker, parts: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Join the stages of all ranks; a tied copy must equal its original bit for bit and is then dropped."""
    everyone: list = [None] * world_size
    torch.distributed.all_gather_object(everyone, (parts, worker.model.aliases))
    joined: list[dict[str, torch.Tensor]] = [{} for _ in parts]
    for ranks_parts, aliases in everyone:
        for whole, part in zip(joined, ranks_parts, strict=True):
            for name, tensor in part.items():
                original = aliases.get(name, name)
                if original in whole:
                    assert torch.equal(whole[original], tensor), f"{name} differs between ranks"
                whole[original] = tensor
    return joined
