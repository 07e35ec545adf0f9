"""`hp-train submit` up to the scheduler: the tasks of an array."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hp_train.commands.submit import tasks_of
from hp_train.config.compose import Composition, compose_request
from hp_train.config.override_check import check_request
from hp_train.config.search_path import search_path
from hp_train.errors import ConfigError


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Composition:
    """An array of a recipe that only --config-dir finds, each task with a seed of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    (tmp_path / "theirs").mkdir()
    seed = "${oc.env:SLURM_ARRAY_TASK_ID,0}"
    (tmp_path / "theirs" / "mine.yaml").write_text(f"# @package _global_\ntrainer:\n  seed: {seed}\n")
    typed = ["recipe=mine", "launcher=slurm", "launcher.array=0-4:2", "launcher.nproc_per_node=1"]
    return compose_request(check_request(typed, search_path("theirs")))


def test_each_task_is_composed_with_its_number(job: Composition, monkeypatch: pytest.MonkeyPatch) -> None:
    assert job.messages == []
    assert [(task, config.trainer.seed) for task, config in tasks_of(job)] == [(0, 0), (2, 2), (4, 4)]
    assert "SLURM_ARRAY_TASK_ID" not in os.environ
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "7")
    assert len(list(tasks_of(job))) == 3 and os.environ["SLURM_ARRAY_TASK_ID"] == "7"


def test_a_task_that_cannot_be_is_named(job: Composition) -> None:
    steps = "${oc.env:SLURM_ARRAY_TASK_ID,1}"
    Path("theirs/mine.yaml").write_text(f"# @package _global_\ntrainer:\n  max_steps: {steps}\n")
    with pytest.raises(ConfigError, match=r"trainer.max_steps=0 is out of bounds; .* \(task 0 of launcher.array\)$"):
        list(tasks_of(job))
