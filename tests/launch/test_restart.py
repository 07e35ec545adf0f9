"""What is started again and what is not, told from outcomes alone; and which ranks a run that stands still lacks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hp_train.launch.hang import Frame, Standing, hang_cause, hang_failure, missing_ranks, read_main_stack
from hp_train.launch.memory_kills import count_memory_kills
from hp_train.launch.outcome import Cause, Outcome
from hp_train.launch.restart import nodes_to_exclude, why_not_again
from hp_train.topology import MeshSizes

FAILED = Outcome(
    1, Cause.UNKNOWN, 1, 7, rank=3, message="ValueError: bad at 0x7f00", first_step=1, committed_step=5, node="node1"
)


@pytest.mark.parametrize("cause", Cause)
def test_only_causes_that_another_attempt_may_mend_are_started_again(cause: Cause) -> None:
    again = why_not_again([replace(FAILED, cause=cause)]) is None
    mendable = ("out_of_memory", "communication", "lost_node", "preempted", "time_limit", "no_progress", "unknown")
    assert again == (cause.value in mendable)
    assert why_not_again([replace(FAILED, cause=cause, gave_up=True)]) is not None


def test_the_same_failure_at_the_same_step_twice_is_not_tried_a_third_time() -> None:
    second = replace(FAILED, attempt=2, first_step=6, committed_step=6, message="ValueError: bad at 0x7fff")
    assert why_not_again([FAILED, second]) == "attempts 1 and 2 failed the same way at step 7"
    assert why_not_again([FAILED, replace(second, step=8)]) is None
    assert why_not_again([FAILED, replace(second, message="ValueError: worse")]) is None
    hung = "Hung for {} s; latest gloo:all_reduce, number {} of default_pg"
    again = [replace(FAILED, message=hung.format(8, 66)), replace(second, message=hung.format(9, 6))]
    assert "the same way" in why_not_again(again)
    broken = [replace(each, cause=Cause.COMMUNICATION) for each in (FAILED, second)]
    assert why_not_again(broken) is None  # a connection that breaks says nothing of why


def test_two_attempts_without_a_newer_checkpoint_are_enough() -> None:
    second = replace(FAILED, attempt=2, step=9, first_step=6)  # began after step 5, and brought nothing
    assert why_not_again([FAILED, second]) is None  # the first did bring step 5
    third = replace(second, attempt=3, step=8)
    assert why_not_again([FAILED, second, third]) == (
        "attempts 2 and 3 ended without a newer checkpoint than they began with"
    )
    assert why_not_again([FAILED, second, replace(third, committed_step=6)]) is None
    never_began = [replace(FAILED, attempt=n, step=0, first_step=0, committed_step=0, message=str(n)) for n in (1, 2)]
    assert "without a newer checkpoint" in why_not_again(never_began)


def test_a_node_that_fails_twice_is_named() -> None:
    elsewhere = replace(FAILED, attempt=2, node="node9")
    assert nodes_to_exclude([FAILED, elsewhere]) == ()
    assert nodes_to_exclude([FAILED, elsewhere, replace(FAILED, attempt=3)]) == ("node1",)
    assert nodes_to_exclude([replace(FAILED, cause=Cause.PREEMPTED)] * 3) == ()


IN_GATHER = (Frame("/x/torch/distributed/distributed_c10d.py", 1, "all_gather"), Frame("/x/hp_train/a.py", 2, "gather"))
IN_DATA = (Frame("/x/hp_train/data/loader.py", 85, "__next__"),)


def _standing(rank: int, step: int = 4, phase: str = "forward and backward", frames: tuple = IN_GATHER) -> Standing:
    return Standing(rank, step, phase, 9.0, frames)


WAITED_FOR, STUCK = Cause.COMMUNICATION, Cause.NO_PROGRESS


@pytest.mark.parametrize(
    "standings, missing, cause",
    [
        ([_standing(0), _standing(1, frames=IN_DATA), _standing(2)], [1], STUCK),
        ([_standing(0), _standing(1, frames=())], [1], WAITED_FOR),  # says nothing
        ([_standing(0), _standing(1, phase="save checkpoint", frames=())], [1], STUCK),  # in an uninterruptible write
        ([_standing(0), _standing(1, step=3)], [1], WAITED_FOR),  # waits in another step's collective
        ([_standing(0, phase="optimizer"), _standing(1)], [1], WAITED_FOR),
        ([_standing(0), _standing(1)], [], WAITED_FOR),
        ([_standing(0, frames=IN_DATA), _standing(1, frames=IN_DATA)], [], STUCK),  # a file system that is gone
        ([replace(_standing(rank, frames=IN_DATA), in_flight=True) for rank in (0, 1)], [], WAITED_FOR),  # as NCCL's do
        ([_standing(0, frames=())], [0], STUCK),
        ([_standing(0, frames=IN_DATA)], [0], STUCK),
    ],
)
def test_missing_ranks(standings: list[Standing], missing: list[int], cause: Cause) -> None:
    assert missing_ranks(standings) == missing
    assert hang_cause(standings) is cause
    failure = hang_failure(standings, 9.0, MeshSizes(dp_shard=len(standings)))
    assert failure.is_communication == (not missing)
    assert failure.rank == (missing or [0])[0]


def test_the_main_thread_is_the_last_that_faulthandler_lists(tmp_path: Path) -> None:
    (tmp_path / "stacks.txt").write_text(
        'Thread 0x00007f1 (most recent call first):\n  File "/a/b.py", line 3 in other\n\n'
        'Current thread 0x00007f2 (most recent call first):\n  File "/a/torch/distributed/c10d.py", line 7 in barrier\n'
        '  File "/a/hp_train/x.py", line 9 in step\n'
    )
    frames = read_main_stack(tmp_path / "stacks.txt")
    assert [str(frame) for frame in frames] == ["barrier (torch/distributed/c10d.py:7)", "step (hp_train/x.py:9)"]
    assert _standing(0, frames=frames).collective == "barrier"
    assert read_main_stack(tmp_path / "none") == ()


def test_kills_for_want_of_memory_are_counted_where_the_kernel_says_so(tmp_path: Path) -> None:
    assert count_memory_kills(tmp_path) == 0
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("1:name=systemd:/x\n0::/user/job\n")
    events = tmp_path / "sys/fs/cgroup/user/job/memory.events"
    events.parent.mkdir(parents=True)
    events.write_text("low 0\noom 4\noom_kill 3\n")
    assert count_memory_kills(tmp_path) == 3
