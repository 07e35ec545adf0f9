"""Shows a run from its files, attempt by attempt, wherever it runs. No torch.

The same displays and the same feed as in a launcher; between attempts the scheduler is asked what the job waits for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

from hp_train.checkpoint.fence import newest_attempt
from hp_train.config.schema import TrainerConfig
from hp_train.launch.feed import Display, Feed
from hp_train.launch.outcome import read_outcome
from hp_train.launch.run_state import describe_state, read_state
from hp_train.launch.start import choose_display
from hp_train.launch.summary import summarize
from hp_train.launch.worker import load_config

_POLL_S = 0.3
_ASK_EVERY_S = 5.0  # the scheduler is asked no more often than that


def watch(run_dir: Path, *, is_over: Callable[[], bool] | None = None) -> None:
    """Show the run in `run_dir` until it is over and say how it ended.

    `is_over` says so where the caller knows better than the files and the scheduler.
    """
    config = load_config(run_dir / "config.yaml")
    display = choose_display(config)
    over = is_over or _OverAsTold(run_dir)
    shown = 0
    while True:
        newest = newest_attempt(run_dir)
        if newest > shown:
            shown = newest
            _show_attempt(run_dir, shown, display, over)
            _tell_end(run_dir, shown, config)
        elif over():
            break
        else:
            time.sleep(_POLL_S)
    if not shown:
        print(*describe_state(read_state(run_dir)), sep="\n", flush=True)


def _show_attempt(run_dir: Path, attempt: int, display: Display, over: Callable[[], bool]) -> None:
    """Show an attempt until it has ended, a newer one has begun, or the run is over."""
    with display, Feed(run_dir, attempt, display, SimpleQueue()):
        while not _has_ended(run_dir, attempt) and newest_attempt(run_dir) == attempt and not over():
            time.sleep(_POLL_S)


def _has_ended(run_dir: Path, attempt: int) -> bool:
    """Say whether its launcher has told the end of an attempt; what rank 0 leaves for the launcher names no time."""
    outcome = read_outcome(run_dir, attempt)
    return outcome is not None and outcome.ended_at > 0


def _tell_end(run_dir: Path, attempt: int, config: TrainerConfig) -> None:
    outcome = read_outcome(run_dir, attempt)
    if outcome is None:
        print(f"attempt {attempt} ended without a word", flush=True)
        return
    lines = summarize(run_dir, config, outcome)
    print(f"attempt {attempt} {lines[0]} ({outcome.cause.replace('_', ' ')})", *lines[1:], sep="\n", flush=True)


class _OverAsTold:
    """Asks for the state of the run now and then, and prints a state that is new while nothing trains."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._asked_at = -_ASK_EVERY_S
        self._told = ""
        self._over = False

    def __call__(self) -> bool:
        if time.monotonic() - self._asked_at >= _ASK_EVERY_S:
            self._asked_at = time.monotonic()
            state = read_state(self._run_dir)
            self._over = state.is_over
            if state.job is not None and state.job.state == "PENDING":
                headline = describe_state(state)[0]
                if headline != self._told:
                    self._told = headline
                    print(headline, flush=True)
        return self._over
