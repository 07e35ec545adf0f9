"""The first cause among accounts of several ranks, and what is told of it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from hp_train.launch.failures import (
    DeadWorker,
    Failure,
    collect_failures,
    describe_failures,
    first_cause,
    record_failure,
)
from hp_train.launch.run_dir import rank_dir
from hp_train.topology import MeshSizes
from hp_train.training.progress import Note, Phase

# The kinds that torch raises on a rank whose peer died or does not answer.
ECHOES = [
    ("RuntimeError", "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711"),
    ("RuntimeError", "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation"),
    ("DistBackendError", "NCCL error in: ProcessGroupNCCL.cpp:3698, remote process exited or a network error"),
    ("DistBackendError", "[Rank 1] watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)"),
    ("DistNetworkError", "The client socket has failed to connect to any network address of (node1, 29400)"),
    ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
    ("DistStoreError", "Timed out after 301 seconds waiting for clients. 1/2 clients joined."),
]


@pytest.mark.parametrize("kind, message", ECHOES)
def test_an_echo_never_outranks_a_cause_however_early_it_is(kind: str, message: str) -> None:
    echo = Failure(0, time_ns=1, type=kind, message=message)
    late = Failure(3, time_ns=10**9, type="ValueError", message="shape mismatch")
    killed = Failure(2, time_ns=2 * 10**9, type="", message="killed", signal_number=9)
    assert echo.is_communication
    assert first_cause([echo, late]) is late
    assert first_cause([echo, killed]) is killed


@pytest.mark.parametrize(
    "kind, message",
    [
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied"),
        ("ValueError", "learning rate timed out"),  # the words alone do not make it communication
        ("FileNotFoundError", "no such file: socket error.txt"),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
)
def test_errors_of_other_kinds_are_causes(kind: str, message: str) -> None:
    assert not Failure(0, 0, kind, message).is_communication


def test_among_causes_the_earliest_wins_by_nanoseconds() -> None:
    failures = [Failure(rank, 10**18 + time, "ValueError", "x") for rank, time in ((0, 700), (1, 300), (2, 500))]
    assert first_cause(failures).rank == 1


def test_echoes_alone_are_not_called_the_cause(tmp_path: Path) -> None:
    record_failure(rank_dir(tmp_path, 1, 1), Failure(1, 5, *ECHOES[0], step=7, phase="optimizer"))
    failures = collect_failures(tmp_path, 1, MeshSizes(dp_shard=2), [DeadWorker(1, 1, 9)], {})
    report = describe_failures(tmp_path, 1, 2, 1, failures)
    beginning = "no rank gave a cause; rank 1 was the first to lose its connection at step 7, optimizer: "
    assert report[-1].startswith(beginning)


def test_dead_workers_without_an_account_are_spoken_for(tmp_path: Path) -> None:
    dead = [DeadWorker(1, -signal.SIGSEGV, 5, "line 1\nline 2"), DeadWorker(0, 1, 6)]
    failures = collect_failures(tmp_path, 1, MeshSizes(pp=2), dead, {1: Note(4, Phase.SAVE, 0.0), 0: None})
    cause = first_cause(failures)
    assert (cause.rank, cause.step, cause.phase) == (1, 4, "save checkpoint")
    assert cause.coordinates.startswith("pp 1")
    assert "killed by signal 11 (SIGSEGV)" in cause.message
    assert cause.message.splitlines()[1:] == ["    line 1", "    line 2"]
    assert "exited with status 1" in failures[0].message


def test_report_of_many_ranks_stays_short_and_ends_with_the_cause(tmp_path: Path) -> None:
    failures = [Failure(rank, 100 + rank, *ECHOES[0], traceback="Traceback of an echo") for rank in range(1000)]
    failures[777] = Failure(777, 5000, "ValueError", "bad", traceback="Traceback of the cause", step=3, phase="data")
    report = describe_failures(tmp_path, 1, 1000, 125, failures)
    text = "\n".join(report)
    assert len(report) < 30
    assert report[-1] == "rank 777 failed at step 3, data: ValueError: bad"
    assert text.count("Traceback") == 1
    assert "rank 15: lost its connection" in text and "ranks 16-999" in text
