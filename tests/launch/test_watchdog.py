"""When a run counts as standing still: all ranks, for longer than the limit; until a step is through, another one."""

from __future__ import annotations

import time

import pytest

from hp_train.launch.watchdog import Watchdog
from hp_train.training.progress import Board, Phase, Progress


@pytest.fixture
def watchdog(monkeypatch: pytest.MonkeyPatch):
    """One of two slots, with limits of 80 s (of 100) and 500 s, and a clock that the test turns."""
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    clock = [1000.0]
    dog = Watchdog(2, first_step_timeout_s=500.0, failure_timeout_s=100.0)
    dog.clock = clock
    yield dog
    dog.close()


def test_limits_of_the_first_step_and_of_the_others(watchdog: Watchdog) -> None:
    ranks = [Progress(), Progress()]
    assert not watchdog.hangs()  # nobody has noted anything yet: the agent looks after processes that don't start
    for slot, rank in enumerate(ranks):
        rank.post_on(Board(watchdog.board.path, 2), slot)
        rank.step, rank.phase = 41, Phase.STEP  # resumed: this attempt's first
    watchdog.clock[0] += 499
    assert not watchdog.hangs()
    watchdog.clock[0] += 2
    assert watchdog.hangs()
    for rank in ranks:
        rank.step = 42
    watchdog.clock[0] += 79
    assert not watchdog.hangs()
    ranks[1].beat()  # one that gets on is enough: the others wait for it
    watchdog.clock[0] += 79
    assert not watchdog.hangs()
    watchdog.clock[0] += 2
    assert watchdog.hangs() and 80 < watchdog.stands_for_s < 82
    ranks[0].phase = ranks[1].phase = Phase.ENDED
    assert [note.phase for note in watchdog.board.read_all()] == [Phase.ENDED] * 2
    watchdog.clock[0] += 1000
    assert not watchdog.hangs()
