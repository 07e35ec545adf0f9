"""Stopped and resumed on the same mesh, a run is bitwise the run that never stopped."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

from hp_train.errors import ExitCode
from hp_train.training.run_context import RunContext
from hp_train.training.setup import Worker, build_worker
from hp_train.training.trainer import Trainer
from tests.distributed.ranks import run_ranks
from tests.distributed.same_numbers import TINY, make_config

MESHES = {
    "fsdp 2": (2, {"fsdp.dp_shard_size": 2}),
    "pp 2 x fsdp 2, tied": (
        4, {"accelerator.pp_size": 2, "fsdp.dp_shard_size": 2, "model.tie_embeddings": True},
    ),
}  # fmt: skip
SETTINGS = {
    **TINY, "optimizer.lr": 3e-3, "lr_scheduler.name": "cosine", "lr_scheduler.warmup_steps": 2,
    "lr_scheduler.total_steps": 10, "trainer.max_steps": 10, "trainer.eval_every": 5, "trainer.eval_batches": 1,
    "checkpoint.every": None, "trainer.max_grad_norm": 1.0,
}  # fmt: skip


def train_part(rank: int, world_size: int, run_dir: Path, *layers: dict, attempt: int = 1, stop_at: int = 0) -> dict:
    """Train on this rank from whatever the run directory holds; local tensors at the end, and how it ended."""
    run_dir.mkdir(parents=True, exist_ok=True)
    context = RunContext(run_dir, attempt=attempt, rank=rank, local_rank=rank, world_size=world_size)
    config = make_config(SETTINGS, *layers)
    worker = build_worker(config, context)

    def stop(*_: object) -> None:
        # One rank alone hears of it, in the middle of a step, as with a signal.
        if context.progress.step == stop_at and rank == world_size - 1:
            context.stop.signal_number = signal.SIGTERM

    if stop_at:
        worker.model.stages[min(worker.model.stages)].register_forward_hook(stop)
    outcome = Trainer(config, context, worker).run()
    return {"tensors": local_tensors(worker), "exit_code": outcome.exit_code, "step": outcome.step}


def local_tensors(worker: Worker) -> list[torch.Tensor]:
    tensors = list(worker.model.parameters.values())
    tensors += [value for state in worker.optimizer.state.values() for value in state.values()]
    return [getattr(tensor, "_local_tensor", tensor).detach().clone() for tensor in tensors]


def train_three_ways(rank: int, world_size: int, root: Path, mesh: dict) -> dict[str, dict]:
    straight = train_part(rank, world_size, root / "straight", mesh)
    train_part(rank, world_size, root / "longer", mesh, {"trainer.max_steps": 5})
    longer = train_part(rank, world_size, root / "longer", mesh, attempt=2)
    stopped = train_part(rank, world_size, root / "stopped", mesh, stop_at=5)
    resumed = train_part(rank, world_size, root / "stopped", mesh, attempt=2)
    return {"straight": straight, "longer": longer, "stopped": stopped, "resumed": resumed}


@pytest.mark.parametrize("name", MESHES)
def test_a_resumed_run_is_bitwise_the_straight_one(name: str, tmp_path: Path) -> None:
    world_size, mesh = MESHES[name]
    for results in run_ranks(world_size, train_three_ways, tmp_path, mesh):
        assert (results["stopped"]["exit_code"], results["stopped"]["step"]) == (ExitCode.REQUEUE, 5)
        for way in ("longer", "resumed"):
            assert results[way]["exit_code"] == ExitCode.DONE
            pairs = zip(results["straight"]["tensors"], results[way]["tensors"], strict=True)
            assert all(torch.equal(one, two) for one, two in pairs), way
    straight = rows(tmp_path / "straight")
    assert [row["step"] for row in straight] == list(range(1, 11))
    assert rows(tmp_path / "longer") == straight
    assert rows(tmp_path / "stopped") == straight


def rows(run_dir: Path) -> list[dict]:
    """What a run recorded of its numbers, times left out."""
    kept = ("step", "loss", "val_loss", "grad_norm", "lr", "tokens")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{key: json.loads(line)[key] for key in kept} for line in lines]


def lose_steps_after_the_checkpoint(rank: int, world_size: int, root: Path) -> None:
    every_four = {"checkpoint.every": 4, "checkpoint.async_save": True}
    train_part(rank, world_size, root / "run", every_four)
    if rank == 0:  # as a crash during step 10 leaves it: the checkpoint of step 8 is the last, a line is torn
        for name in ("step_00000010",):
            (root / "run" / "checkpoints" / name / "COMMITTED").unlink()
        with (root / "run" / "metrics.jsonl").open("a") as file:
            file.write('{"step": 11, "lo')
    train_part(rank, world_size, root / "run", every_four, attempt=2)
    train_part(rank, world_size, root / "straight")


def test_metrics_are_cut_to_the_checkpoint(tmp_path: Path) -> None:
    run_ranks(1, lose_steps_after_the_checkpoint, tmp_path)
    assert rows(tmp_path / "run") == rows(tmp_path / "straight")
    cut = (tmp_path / "run" / "metrics.attempt_1.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in cut[:2]] == [9, 10]
    assert cut[2] == '{"step": 11, "lo'


def diverge(rank: int, world_size: int, root: Path) -> tuple[str, list[torch.Tensor], list[torch.Tensor]]:
    root.mkdir(exist_ok=True)
    context = RunContext(root, attempt=1, rank=rank, local_rank=rank, world_size=world_size)
    config = make_config(SETTINGS, {"fsdp.dp_shard_size": 2})
    worker = build_worker(config, context)
    train_step, before = worker.engine.train_step, []

    def spoil(micro_batches: list, token_count: int) -> torch.Tensor:
        loss = train_step(micro_batches, token_count)
        if context.progress.step == 3:
            before.extend(local_tensors(worker))
            return loss * float("nan") if rank == 1 else loss
        return loss

    worker.engine.train_step = spoil
    try:
        Trainer(config, context, worker).run()
    except Exception as error:
        return f"{type(error).__name__}: {error}", before, local_tensors(worker)
    return "nothing was raised", [], []


def test_a_loss_that_is_not_finite_stops_every_rank_before_the_update(tmp_path: Path) -> None:
    for message, before, after in run_ranks(2, diverge, tmp_path / "run"):
        # Step 3 reads samples 16 to 23; rank 1 the second half of them.
        assert message.startswith("NonFiniteError: loss is not finite at step 3, samples 20 to 23"), message
        assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]
