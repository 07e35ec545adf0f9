"""What `status`, `watch` and `logs` say of a run, from a run directory written here."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hp_train.commands import cancel, logs, status, watch
from hp_train.config.schema import TrainerConfig
from hp_train.errors import ConfigError
from hp_train.launch import run_of_job, run_state
from hp_train.launch.goodput import goodput
from hp_train.launch.outcome import Cause, Outcome, read_outcome, write_outcome
from hp_train.launch.run_of_job import find_run_or_job
from hp_train.launch.slurm_tools import Job


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two attempts of 10 s each: steps 1 to 6, of which 5 and 6 were lost, then 5 to 8; 1.5 s a step; job 4711."""
    monkeypatch.setenv("HP_TRAIN_RUNS", str(tmp_path / "runs"))
    run_dir = tmp_path / "runs/tiny/20261130-120000-abcd"
    (run_dir / "slurm/4711.0").mkdir(parents=True)
    (run_dir / "slurm/job_id").write_text("4711\n")
    config = TrainerConfig()
    config.trainer.global_batch_size = 32
    (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
    for attempt, first in ((1, 1), (2, 5)):
        folder = run_dir / f"logs/attempt_{attempt}"
        folder.mkdir(parents=True)
        for node in (0, 1):  # of one rank each
            (folder / f"node_{node}.log").write_text(f"[rank {node}] hello from {node}\n")
        facts = {
            "device": "cpu",
            "device_name": None,
            "device_memory_bytes": None,
            "world_size": 2,
            "mesh": "dp_shard 2",
            "num_parameters": 1000,
            "first_step": first,
            "max_steps": 8,
            "tokens_per_step": 3000,
        }
        (folder / "attempt.json").write_text(json.dumps(facts))
    _write_rows(run_dir / "metrics.jsonl", range(1, 9))
    _write_rows(run_dir / "metrics.attempt_1.jsonl", range(5, 7))
    write_outcome(run_dir, Outcome(1, Cause.LOST_NODE, 1, 6, started_at=100.0, ended_at=110.0, last_step=6))
    write_outcome(run_dir, Outcome(2, Cause.DONE, 0, 8, rank=1, started_at=200.0, ended_at=210.0, last_step=8))
    return run_dir


def _write_rows(path: Path, steps: range) -> None:
    path.write_text("".join(json.dumps({"step": step, "loss": 3.0, "step_time_s": 1.5}) + "\n" for step in steps))


def _knows(monkeypatch: pytest.MonkeyPatch, job: Job | None) -> None:
    monkeypatch.setattr(run_state, "find_job", lambda job_id: job)


def test_goodput_counts_every_step_once(run_dir: Path) -> None:
    found = goodput(run_dir, now=1000.0)
    assert (found.attempts, found.step_s, found.wall_s) == (2, 12.0, 20.0)
    assert (found.steps_redone, found.steps_missing) == (2, 0)
    assert found.describe(32) == "attempt 2, goodput 60 %, 0 samples lost, 2 steps redone"
    _write_rows(run_dir / "metrics.jsonl", range(2, 9))
    assert "32 samples lost" in goodput(run_dir, now=1000.0).describe(32)


def test_status_of_a_finished_and_of_a_waiting_run(run_dir: Path, monkeypatch, capsys) -> None:
    _knows(monkeypatch, None)
    assert status.run(argparse.Namespace(run="abcd")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{run_dir}: done at step 8"
    assert lines[1] == "  step 8/8 (100 %), 2k tok/s (1k/process)"
    assert lines[2] == "  attempt 2, goodput 60 %, 0 samples lost, 2 steps redone"
    assert lines[3] == "  no checkpoint yet"
    _knows(monkeypatch, Job("4711", "PENDING", "Resources", start=1.0))
    assert status.run(argparse.Namespace(run=None)) == 0
    assert "job 4711 is pending (Resources, expected start " in capsys.readouterr().out


@pytest.mark.parametrize(
    "cause, restarts, job, told",
    [
        (Cause.PREEMPTED, ["0"], Job("4711", "CANCELLED"), Cause.CANCELLED),  # SLURM sends both the same signal
        (Cause.PREEMPTED, ["0", "10", "9"], Job("4711", "CANCELLED", restarts=10), Cause.CANCELLED),
        (Cause.PREEMPTED, ["0", "1"], Job("4711", "CANCELLED", restarts=None), Cause.CANCELLED),  # sacct
        (Cause.PREEMPTED, ["0"], Job("4711", "CANCELLED", restarts=1), Cause.PREEMPTED),  # cancelled while it waited
        (Cause.PREEMPTED, ["0"], Job("4712", "CANCELLED"), Cause.PREEMPTED),  # another job, that never ran
        (Cause.PREEMPTED, ["0"], Job("4711", "COMPLETED"), Cause.PREEMPTED),
        (Cause.DONE, ["0"], Job("4711", "CANCELLED"), Cause.DONE),
        (Cause.USER_ERROR, ["0"], Job("4711", "CANCELLED"), Cause.USER_ERROR),
    ],
)
def test_a_cancelled_job_is_called_so_for_good(run_dir: Path, monkeypatch, capsys, cause, restarts, job, told) -> None:
    for restart in restarts:
        (run_dir / f"slurm/4711.{restart}").mkdir(exist_ok=True)
        (run_dir / f"slurm/4711.{restart}/first_attempt").write_text("2")
    write_outcome(run_dir, Outcome(2, cause, 75, 8, last_step=8))
    _knows(monkeypatch, job)
    status.run(argparse.Namespace(run="abcd"))
    assert f"{told.replace('_', ' ')} at step 8" in capsys.readouterr().out
    assert read_outcome(run_dir).cause is told


@pytest.mark.parametrize("text", ["4711", "last", "abcd"])
def test_a_run_is_found_by_its_job(run_dir: Path, text: str) -> None:
    assert find_run_or_job(text) == run_dir


def test_a_job_that_nobody_knows_is_one_line(run_dir: Path, monkeypatch) -> None:
    monkeypatch.setattr(run_of_job, "_told_by_slurm", lambda job_id: None)
    with pytest.raises(ConfigError, match="has a job or an id 12345"):
        find_run_or_job("12345")


def _logs(**chosen: object) -> argparse.Namespace:
    defaults = {"run": "last", "rank": None, "failed": False, "attempt": None, "follow": False}
    return argparse.Namespace(**{**defaults, **chosen})


def test_logs_are_prefixed_by_rank_unless_one_is_asked_for(run_dir: Path, monkeypatch, capsys) -> None:
    (run_dir / "slurm_4711.out").write_text("launcher\n")
    logs.run(_logs())
    assert capsys.readouterr().out == "launcher\n[rank 0] hello from 0\n[rank 1] hello from 1\n"
    logs.run(_logs(failed=True))
    assert capsys.readouterr().out == "hello from 1\n"
    _knows(monkeypatch, None)
    logs.run(_logs(rank=0, follow=True))
    assert capsys.readouterr().out == "hello from 0\n"
    with pytest.raises(ConfigError, match="no logs of rank 7"):
        logs.run(_logs(rank=7))


def test_ranks_that_printed_nothing_are_no_mistake(run_dir: Path, capsys) -> None:
    (run_dir / "logs/attempt_2/node_1.log").unlink()
    assert logs.run(_logs(rank=1)) == 0
    assert capsys.readouterr() == ("", f"hp-train: rank 1 printed nothing in attempt 2 of {run_dir}\n")
    (run_dir / "logs/attempt_2/node_0.log").unlink()
    assert logs.run(_logs()) == 0
    assert capsys.readouterr() == ("", f"hp-train: its ranks printed nothing in attempt 2 of {run_dir}\n")
    for rank in (-1, 2):
        with pytest.raises(ConfigError, match=f"has no logs of rank {rank} in attempt 2$"):
            logs.run(_logs(rank=rank))


def test_logs_of_an_attempt_that_never_was_is_one_line(run_dir: Path, monkeypatch) -> None:
    _knows(monkeypatch, None)
    for attempt in (0, 3):
        with pytest.raises(ConfigError, match=f"has no logs of attempt {attempt}$"):
            logs.run(argparse.Namespace(run="abcd", rank=None, failed=False, attempt=attempt, follow=False))


def test_watch_shows_a_run_that_is_over_and_ends(run_dir: Path, monkeypatch, capsys) -> None:
    _knows(monkeypatch, None)
    assert watch.run(argparse.Namespace(run=str(run_dir))) == 0
    printed = capsys.readouterr().out
    assert "steps 5 to 8" in printed and "attempt 2 done at step 8" in printed


def test_nothing_to_cancel_is_one_line(run_dir: Path, monkeypatch) -> None:
    _knows(monkeypatch, Job("4711", "COMPLETED"))
    with pytest.raises(ConfigError, match="is not running"):
        cancel.run(argparse.Namespace(run="4711"))


@pytest.mark.parametrize(
    "name, texts",
    [
        ("owner.json", ["", "{x", "[1]", '{"host": 3}']),
        ("config.yaml", ["", "{x", "[1]", "trainer: {}"]),
        ("logs/attempt_2/attempt.json", ["", "{x", "[1]", '{"device": 3}']),
        ("logs/attempt_2/outcome.json", ["", "{x", "[1]", '{"cause": 7, "attempt": 2}', '{"cause": "done"}']),
    ],
)
def test_a_damaged_file_is_named_in_one_line(run_dir: Path, monkeypatch, name: str, texts: list[str]) -> None:
    _knows(monkeypatch, None)
    for text in texts:
        (run_dir / name).write_text(text)
        with pytest.raises(ConfigError) as refused:
            status.run(argparse.Namespace(run="abcd"))
        assert str(refused.value).startswith(f"{run_dir / name} is damaged: ") and "\n" not in str(refused.value)


def test_watch_names_a_damaged_config_in_one_line(run_dir: Path) -> None:
    for text in ("{x", "[1]", "trainer: {max_steps: many}"):
        (run_dir / "config.yaml").write_text(text)
        with pytest.raises(ConfigError) as refused:
            watch.run(argparse.Namespace(run="abcd"))
        assert "config.yaml is damaged: " in str(refused.value) and "\n" not in str(refused.value)


def test_a_damaged_row_counts_as_missing(run_dir: Path, monkeypatch, capsys) -> None:
    _knows(monkeypatch, None)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    (run_dir / "metrics.jsonl").write_text("\n".join([*lines[:3], "\0\0", "[1]", *lines[5:]]) + "\n")
    assert status.run(argparse.Namespace(run="abcd")) == 0
    assert "64 samples lost" in capsys.readouterr().out
