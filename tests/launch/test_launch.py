"""Whole launches with real processes: how each kind of end looks from outside. Every test leaves no process behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hp_train.launch.outcome import Cause, read_outcomes
from tests.launch.runs import Run, started, wait_until


def test_failing_rank_ends_a_deaf_peer_and_is_named_last(tmp_path: Path) -> None:
    """Rank 0 holds the interpreter lock in C and ignores every signal; rank 1 runs out of memory."""
    run = Run(tmp_path / "run", {"0": {"at": 3, "do": "hang"}, "1": {"at": 3, "do": "out_of_memory"}})
    with started(run):
        wait_until(lambda: bool(list(run.folder.glob("logs/attempt_1/FAILED"))), "the failure")
        failed_at = time.monotonic()
        wait_until(lambda: not run.processes(), "the end of the deaf peer")
        assert time.monotonic() - failed_at < 10
        assert run.end() == 1
    cause = run.err.split("\n\n")[-1].splitlines()
    assert cause[0] == (
        "rank 1 (pp 0, dp_replicate 0, dp_shard 1, cp 0, tp 0) failed at step 3, forward and backward: "
        "MemoryError: planted"
    )
    assert cause[1].startswith("memory of this rank: parameters ")
    assert cause[2].startswith("what would help most: activation_checkpoint.mode=full")
    assert run.err.count("Traceback (most recent call last)") == 1
    assert f"rank 0: ended by the launcher; {run.folder / 'logs/attempt_1/node_0.log'}" in run.err
    assert (run.outcome["cause"], run.outcome["rank"], run.outcome["step"]) == ("out_of_memory", 1, 3)


@pytest.mark.long
def test_whatever_stops_a_rank_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    """In attempt 1 rank 1 is killed, its peer sees a closed connection, which must not be called the cause; in attempt
    2 it holds the interpreter for ever while it reads data, in attempt 3 it leaves with status 0."""
    faults = [
        {"at": 3, "do": "die", "attempt": 1},
        {"at": 4, "do": "data", "attempt": 2},
        {"at": 2, "do": "exit", "attempt": 3},
    ]
    plan = {"0": {"at": 2, "do": "children"}, "1": faults, "commit": True}
    run = Run(tmp_path / "run", plan, max_restarts=3, max_steps=5, timeout=5)
    with started(run):
        assert run.end() == 0
        assert not run.processes()
    killed, hung, left, done = read_outcomes(run.folder)
    where = "rank 1 (pp 0, dp_replicate 0, dp_shard 1, cp 0, tp 0)"
    assert f"{where} failed at step 3, forward and backward: the process was killed by signal 9 (SIGKILL)" in run.err
    assert "out of memory" in run.err
    assert "rank 0: lost its connection" in run.err
    assert "starting again from the last checkpoint (restart 1 of 3)" in run.err
    assert (killed.cause, killed.rank, killed.step, killed.phase) == (Cause.UNKNOWN, 1, 3, "forward and backward")
    assert (hung.cause, hung.rank, hung.step, hung.phase) == (Cause.NO_PROGRESS, 1, 4, "data")
    assert "no rank has come further for" in hung.message and "rank 1 is missing, rank 0 waits" in hung.message
    assert "fake_worker.py" in (run.folder / "logs/attempt_2/rank_1/stacks.txt").read_text()
    waits = (
        r"rank 0 .*: step 4, forward and backward, waiting in all_reduce, called from .*; .*gloo:all_reduce, number "
    )
    assert re.search(waits, run.err)
    assert re.search(r"rank 1 .*: step 4, data, in _misbehave \(fake_worker.py:\d+\)", run.err)
    assert (left.rank, left.step) == (1, 2) and "exited before the end of the run with status 0" in left.message
    assert (done.cause, done.attempt, done.exit_code, done.committed_step) == (Cause.DONE, 4, 0, 45)


def test_divergence_is_one_line_exit_3_and_no_restart(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {"0": {"at": 2, "do": "diverge"}}, max_restarts=3, nproc=1)
    with started(run):
        assert run.end() == 3
    assert run.err.splitlines() == ["hp-train: loss is nan at step 2"]
    assert run.outcome["cause"] == "diverged"
    assert not (run.folder / "logs/attempt_2").exists()


def test_two_runs_at_once_stopped_by_ctrl_c_and_by_sigterm(tmp_path: Path) -> None:
    """SIGTERM goes to the launcher's whole group and comes twice, as schedulers send it; saving takes a second."""
    interrupted = Run(tmp_path / "a", {"0": {"at": 2, "do": "warn"}, "save_s": 1.0})
    terminated = Run(tmp_path / "b", {"save_s": 1.0})
    with started(interrupted, terminated):
        interrupted.wait_for_step(5)
        terminated.wait_for_step(5)
        _check_that_the_folder_is_held(interrupted)
        os.kill(interrupted.process.pid, signal.SIGINT)
        for _ in range(2):
            os.killpg(terminated.process.pid, signal.SIGTERM)
            time.sleep(0.3)
        assert (interrupted.end(), terminated.end()) == (130, 75)
        assert not interrupted.processes() and not terminated.processes()
    for run, code in ((interrupted, 130), (terminated, 75)):
        saved = [int((run.folder / f"saved_{rank}").read_text()) for rank in (0, 1)]
        assert saved[0] == saved[1] == run.outcome["step"]
        assert run.outcome["cause"] == "stopped" and run.outcome["exit_code"] == code
        message = r"^stopping after step (\d+) and saving; Ctrl-C again stops now without saving$"
        told = re.search(message, run.out, re.MULTILINE)
        assert told and 0 <= saved[0] - int(told[1]) <= 10  # steps of 50 ms go on while the launcher reads of them
        assert f"hp-train resume {run.folder}" in run.out
        assert not (run.folder / "owner.json").exists()
    assert "warning: planted [bold]line[/bold]" in interrupted.out.splitlines()
    assert interrupted.out.splitlines()[0].startswith("batch 8 sequences = 2 data-parallel x 1 micro-batch x ")


def _check_that_the_folder_is_held(run: Run) -> None:
    words = [sys.executable, str(Path(__file__).with_name("fake_launch.py")), str(run.folder), "{}"]
    second = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert second.returncode == 2
    assert f"is in use by process {run.process.pid} on " in second.stderr


def test_second_ctrl_c_stops_without_saving(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {"save_s": 600, "1": {"at": 1, "do": "children"}})
    with started(run):
        run.wait_for_step(3)
        run.process.send_signal(signal.SIGINT)
        wait_until(lambda: "stopping after step" in run.out, "the first message")
        run.process.send_signal(signal.SIGINT)
        second_at = time.monotonic()
        assert run.end() == 1
        assert time.monotonic() - second_at < 5
        assert not run.processes()
    assert not list(run.folder.glob("saved_*"))
    assert run.err.splitlines()[-1] == "hp-train: stopped by Ctrl-C without saving"


def test_killed_launcher_takes_workers_and_their_children_along(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {"0": {"at": 1, "do": "children"}, "1": {"at": 1, "do": "children"}})
    with started(run):
        run.wait_for_step(3)
        assert len(run.processes()) == 4
        run.process.kill()
        wait_until(lambda: not run.processes(), "the end of all workers", patience_s=2.0)


def test_signal_before_the_workers_start_ends_the_run_saved_at_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {})
    with started(run):
        wait_until(lambda: "run directory" in run.out, "the run directory")
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 75
    assert run.outcome["cause"] == "stopped"
