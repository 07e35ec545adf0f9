"""Disks fill up, folders vanish, newer attempts take over: training goes on or stops as asked, and loses nothing."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from hp_train.checkpoint import storage
from hp_train.checkpoint.layout import COMMITTED, MANIFEST, commit_mark, newest_committed, read_manifest
from hp_train.errors import CheckpointError, SupersededError
from hp_train.launch.owner import Owner, own
from hp_train.training.run_context import RunContext
from hp_train.training.setup import build_worker
from hp_train.training.trainer import Trainer
from tests.distributed.ranks import run_ranks
from tests.distributed.same_numbers import TINY, make_config

SETTINGS = {**TINY, "model.num_layers": 1, "checkpoint.every": 2, "checkpoint.keep_last": 9, "trainer.max_steps": 8}


def make_trainer(rank: int, world_size: int, run_dir: Path, *layers: dict, attempt: int = 1) -> Trainer:
    run_dir.mkdir(exist_ok=True)
    context = RunContext(run_dir, attempt=attempt, rank=rank, local_rank=rank, world_size=world_size)
    config = make_config(SETTINGS, {"fsdp.dp_shard_size": world_size}, *layers)
    return Trainer(config, context, build_worker(config, context))


def run(trainer: Trainer) -> str:
    """Run to the end and return what was warned of."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        trainer.run()
    return printed.getvalue()


def steps_saved(run_dir: Path) -> list[int]:
    return sorted(int(mark.parent.name.split("_")[1]) for mark in run_dir.glob(f"checkpoints/*/{COMMITTED}"))


def fill_the_disk(rank: int, world_size: int, root: Path) -> list[str]:
    """Rank 1 finds no room while steps 4 and 6 are saved."""
    real = storage.write_safetensors
    full = {"from": 3, "to": 6}

    def write(path: Path, entries: list):
        if rank == 1 and full["from"] < int(path.parent.name.split(".")[0].split("_")[1]) <= full["to"]:
            raise OSError(28, "No space left on device", str(path))
        return real(path, entries)

    storage.write_safetensors = write
    printed = [run(make_trainer(rank, world_size, root / "at_once"))]
    in_background = {"checkpoint.async_save": True}
    printed.append(run(make_trainer(rank, world_size, root / "in_background", in_background)))
    with pytest.raises(CheckpointError, match=r"step 4 was not written \(rank 1: .*No space left"):
        make_trainer(rank, world_size, root / "stop", {"checkpoint.on_failure": "stop"}).run()
    full["to"] = 8  # and the last save of all must not fail
    with pytest.raises(CheckpointError, match="step 8 was not written"):
        run(make_trainer(rank, world_size, root / "to_the_end"))
    storage.write_safetensors = real
    dist.barrier()
    return printed


def test_a_full_disk_is_warned_of_and_stops_the_run_only_if_asked(tmp_path: Path) -> None:
    (warned, warned_in_background), silent = run_ranks(2, fill_the_disk, tmp_path)
    assert warned.count("WARNING: the checkpoint of step") == 2 and "No space left" in warned
    assert "training goes on" in warned
    assert warned_in_background.count("WARNING: the checkpoint of step") == 2
    assert not any(silent)
    for name in ("at_once", "in_background"):
        assert steps_saved(tmp_path / name) == [2, 8]
        assert len((tmp_path / name / "metrics.jsonl").read_text().splitlines()) == 8
    for name in ("stop", "to_the_end"):
        assert newest_committed(tmp_path / name / "checkpoints").name == "step_00000002"


def lose_the_folder(rank: int, world_size: int, root: Path) -> str:
    trainer = make_trainer(rank, world_size, root / "run", {"trainer.max_steps": 5, "checkpoint.keep_last": 9})
    steps = []

    def take_away(*_: object) -> None:
        steps.append(trainer.context.progress.step)
        if steps[-1] == 3 and (root / "run").exists():
            shutil.move(root / "run", root / "aside")

    trainer.worker.optimizer.register_step_post_hook(take_away)
    with contextlib.redirect_stderr(io.StringIO()) as printed, pytest.raises(CheckpointError, match="step 5 was not"):
        trainer.run()
    assert not (root / "run").exists(), "a lost folder is not made anew"
    assert newest_committed(root / "aside/checkpoints").name == "step_00000002"
    return printed.getvalue()


def stand_aside(rank: int, world_size: int, root: Path) -> tuple[str, int]:
    """In the middle of step 3 the launcher is found dead and another takes over; this one's tasks live on."""
    run_dir = root / "orphan"
    trainer = make_trainer(rank, world_size, run_dir)

    def take_over(*_: object) -> None:
        if trainer.context.progress.step == 3:
            with own(run_dir) as ownership:
                taken.append(ownership.attempt)

    taken: list[int] = []
    (run_dir / "logs/attempt_1").mkdir(parents=True)
    gone = {**{name: getattr(Owner.myself(1), name) for name in Owner.__slots__}, "process_start": 0.0}
    (run_dir / "owner.json").write_text(json.dumps(gone))
    trainer.worker.optimizer.register_step_post_hook(take_over)
    with pytest.raises(SupersededError, match="attempt 2 has taken over"):
        trainer.run()
    rows = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2] and steps_saved(run_dir) == [2]
    return str(taken), len(rows)


def come_late(rank: int, world_size: int, root: Path) -> str:
    """A newer attempt has begun and written rows before this one has loaded what it goes on from."""
    run_dir = root / "late"
    trainer = make_trainer(rank, world_size, run_dir)
    (run_dir / "logs/attempt_2").mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "attempt": 2}\n')
    with pytest.raises(SupersededError, match="attempt 2 has taken over"):
        trainer.run()
    assert [path.name for path in run_dir.glob("metrics*")] == ["metrics.jsonl"]
    return (run_dir / "metrics.jsonl").read_text()


def lost_and_taken(rank: int, world_size: int, root: Path) -> tuple[str, tuple[str, int], str]:
    return (
        lose_the_folder(rank, world_size, root),
        stand_aside(rank, world_size, root),
        come_late(rank, world_size, root),
    )


def test_a_lost_folder_is_not_replaced_and_a_newer_attempt_silences_an_older_one(tmp_path: Path) -> None:
    [(warned, taken, late)] = run_ranks(1, lost_and_taken, tmp_path)
    assert "WARNING: the checkpoint of step 4 was not written" in warned
    assert taken == ("[2]", 2)
    assert late == '{"step": 1, "attempt": 2}\n', "its rows stay"


def end_the_job(rank: int, world_size: int, root: Path) -> str:
    """Train a run whose job ends while steps 4 to 8 would be saved, a save having been seen to take 100 s."""
    trainer = make_trainer(rank, world_size, root)
    ends_in_s = {2: 1000.0, 4: 90.0, 6: 90.0, 8: 90.0}
    real = trainer._row

    def row(step: int, *rest: object) -> dict:
        os.environ["HP_TRAIN_END"] = str(time.time() + ends_in_s.get(step, 1000.0))
        if step == 3:
            folder = next(root.glob("checkpoints/step_*"))
            text = replace(read_manifest(folder), write_s=100.0).encode()
            (folder / MANIFEST).write_bytes(text)
            (folder / COMMITTED).write_bytes(commit_mark(text))
        return real(step, *rest)

    trainer._row = row
    os.environ["HP_TRAIN_END"] = str(time.time() + (1000.0 if rank == 0 else 0.0))
    try:
        return run(trainer)
    finally:
        del os.environ["HP_TRAIN_END"]


def test_a_save_that_the_job_would_cut_short_is_not_begun(tmp_path: Path) -> None:
    warned, silent = run_ranks(2, end_the_job, tmp_path / "run")
    assert steps_saved(tmp_path / "run") == [2]
    assert warned.count("no save is begun after step") == 3 and "a save has taken 100 s" in warned
    assert silent == ""
