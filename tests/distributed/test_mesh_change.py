"""A run goes on, on another mesh, schedule or engine, as if it had never stopped."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hp_train.errors import ConfigError
from hp_train.training.run_context import RunContext
from hp_train.training.setup import Worker, build_worker
from hp_train.training.trainer import Trainer
from tests.distributed.ranks import run_ranks
from tests.distributed.same_numbers import TINY, make_config

SAVED_AT, LAST = 3, 5
SETTINGS = {
    **TINY, "optimizer.lr": 3e-3, "lr_scheduler.name": "cosine", "lr_scheduler.total_steps": LAST,
    "trainer.max_grad_norm": 1.0, "model.tie_embeddings": True, "checkpoint.every": SAVED_AT,
    "checkpoint.keep_last": 5, "trainer.max_steps": LAST, "model.dim": 16, "model.ffn_dim": 24,
}  # fmt: skip
FIRST = {"fsdp.dp_shard_size": 2}
MESHES = {
    4: {"hsdp": {"fsdp.dp_mode": "hsdp", "fsdp.dp_shard_size": 2, "fsdp.dp_replicate_size": 2}},
    2: {
        "torch's fsdp": {"fsdp.dp_shard_size": 2, "fsdp.implementation": "torch"},
        "ddp": {"fsdp.dp_mode": "ddp", "fsdp.dp_replicate_size": 2},
        "zbv": {"accelerator.pp_size": 2, "pp.schedule": "zbv"},
    },
    1: {"single": {}},
}  # fmt: skip


def train(rank: int, world_size: int, run_dir: Path, *layers: dict, attempt: int) -> tuple[dict[str, str], list[int]]:
    """Train from what the folder holds; the state that was begun with, and the samples that this rank then read."""
    context = RunContext(run_dir, attempt=attempt, rank=rank, local_rank=rank, world_size=world_size)
    config = make_config(SETTINGS, *layers)
    worker = build_worker(config, context)
    trainer = Trainer(config, context, worker)
    steps, states, meet_peers, optimizer_step = [], [], trainer._meet_peers, trainer._optimizer_step
    trainer._optimizer_step = lambda step, *more: (steps.append(step - 1), optimizer_step(step, *more))[1]
    trainer._meet_peers = lambda: (states.append(whole_state(worker)), meet_peers())
    trainer.run()
    # The loader reads one step ahead: only what was trained on counts.
    return states[0], [sample for step in steps for chunk in trainer._samples_of(step) for sample in chunk]


def whole_state(worker: Worker) -> dict[str, str]:
    """Return the checksum of every whole parameter and optimizer state, by name, of all ranks; collective."""
    sums = {}
    for name, parameter in sorted(worker.model.parameters.items()):
        values = {"weight": parameter, **worker.optimizer.state[parameter]}
        for key, value in values.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            data = whole.detach().contiguous().numpy().tobytes()
            sums[f"{worker.model.aliases.get(name, name)} {key}"] = hashlib.sha256(data).hexdigest()
    everyone: list = [sums]
    if dist.get_world_size() > 1:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, sums)
    merged: dict[str, str] = {}
    for part in everyone:
        for name, checksum in part.items():
            assert merged.setdefault(name, checksum) == checksum, f"{name} differs between ranks"
    return merged


def first_part(rank: int, world_size: int, root: Path, mesh: dict) -> dict[str, str]:
    """Train to the end; the state of the checkpoint in the middle, as the same mesh reads it."""
    if rank == 0:
        (root / "straight").mkdir()
    dist.barrier()
    train(rank, world_size, root / "straight", mesh, attempt=1)
    if rank == 0:
        shutil.copytree(root / "straight", root / "half")
        shutil.rmtree(root / f"half/checkpoints/step_{LAST:08d}")
    dist.barrier()
    state, _ = train(rank, world_size, root / "half", mesh, {"trainer.max_steps": SAVED_AT}, attempt=2)
    return state


def go_on(rank: int, world_size: int, root: Path) -> dict[str, tuple[dict, list[int]]]:
    found = {}
    for name, mesh in MESHES[world_size].items():
        run_dir = root / f"{name} {world_size}"
        if rank == 0:
            shutil.copytree(root / "half", run_dir)
        if world_size > 1:
            dist.barrier()
        found[name] = train(rank, world_size, run_dir, mesh, {"checkpoint.every": 0}, attempt=3)
    return found


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_every_mesh_goes_on_from_the_same_bits_with_the_next_samples(tmp_path: Path) -> None:
    saved = run_ranks(2, first_part, tmp_path, FIRST)[0]
    straight = losses(tmp_path / "straight")
    next_samples = set(range(SAVED_AT * 8, LAST * 8))
    for world_size, meshes in MESHES.items():
        of_ranks = run_ranks(world_size, go_on, tmp_path)
        for name in meshes:
            assert of_ranks[0][name][0] == saved, name
            read = [sample for of_rank in of_ranks for sample in of_rank[name][1]]
            copies = len(read) // len(next_samples)  # ranks of one pipeline read the same
            assert sorted(read) == sorted([*next_samples] * copies) and copies >= 1, name
            gone_on = losses(tmp_path / f"{name} {world_size}")
            assert gone_on[:SAVED_AT] == straight[:SAVED_AT]
            # Sums in another order move a float32 loss by some 1e-7 of its size.
            assert gone_on[SAVED_AT:] == pytest.approx(straight[SAVED_AT:], rel=1e-6), name


def change_what_has_a_meaning(rank: int, world_size: int, root: Path) -> list[list[int]]:
    """Half the batch, from the checkpoint on: the samples go on where they were. Then what has none."""
    _, read = train(rank, world_size, root, {"trainer.max_steps": 5, "trainer.global_batch_size": 4}, attempt=2)
    _, more = train(rank, world_size, root, {"trainer.max_steps": 6}, attempt=3)
    for change in ({"trainer.seed": 4}, {"trainer.seq_len": 32}, {"data.document_boundaries": "isolate"}):
        with pytest.raises(ConfigError, match=next(iter(change)).rpartition(".")[2]):
            train(rank, world_size, root, {"trainer.max_steps": 8}, change, attempt=4)
    return [read, more]


def begin(rank: int, world_size: int, root: Path) -> torch.Tensor:
    train(rank, world_size, root, {"trainer.max_steps": SAVED_AT}, attempt=1)
    return torch.rand(3)


def test_another_batch_size_goes_on_with_the_next_sample_and_another_order_is_refused(tmp_path: Path) -> None:
    [after_training] = run_ranks(1, begin, tmp_path)
    [(read, more)] = run_ranks(1, change_what_has_a_meaning, tmp_path)
    assert read == list(range(24, 32)) and more == list(range(32, 40))
    assert after_training.shape == (3,)
