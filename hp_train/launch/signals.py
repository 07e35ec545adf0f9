"""What the launcher does when it is asked to stop: tell the workers, wait for them to save, give up only when told to.

The first signal is passed on and the run ends as its workers end it: SIGINT 130, SIGTERM, SIGHUP and SIGUSR1 75. More
of SIGTERM change nothing (schedulers send it twice, and to every process); SIGINT after the first signal kills.
No torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import FrameType
from typing import Protocol

from hp_train.errors import ExitCode
from hp_train.launch.lifeline import STOP_SIGNALS
from hp_train.launch.outcome import Cause
from hp_train.launch.owner import job_id


class Workers(Protocol):
    """The processes that a stop is passed on to."""

    def worker_pids(self) -> dict[int, int]:
        """Return local rank -> pid."""

    def kill_workers(self) -> None:
        """Kill them all now."""


class StopSignals:
    """Signal handlers for the time of a launch."""

    def __init__(self) -> None:
        self.requested = 0  # number of the first signal; 0: none
        self.killed = False  # the person did not want to wait for the save
        self.messages: SimpleQueue[str] = SimpleQueue()  # lines for the person; a display prints them
        self.current_step: Callable[[], int] = lambda: 0  # the step in work; 0 before the first
        self._workers: Workers | None = None

    @property
    def exit_code(self) -> ExitCode:
        """Return how a run ends that was stopped by the first signal with everything saved."""
        return ExitCode.INTERRUPTED if self.requested == signal.SIGINT else ExitCode.REQUEUE

    @property
    def cause(self) -> Cause:
        """Return what a run is said to have ended of that was stopped with everything saved."""
        if self.requested == signal.SIGTERM and job_id():
            return Cause.PREEMPTED  # so a scheduler asks for its machines; a person would cancel the job
        if self.requested == signal.SIGUSR1 and job_id():
            return Cause.TIME_LIMIT  # the warning that the job's script passes on, or our own look at the clock
        return Cause.STOPPED

    @contextlib.contextmanager
    def installed(self) -> Iterator[StopSignals]:
        """Handle the stop signals while the block runs."""
        before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number in STOP_SIGNALS:
            if number == signal.SIGHUP and before[number] is signal.SIG_IGN:
                continue  # under nohup
            signal.signal(number, self._handle)
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def watch_over(self, workers: Workers | None) -> None:
        """Take these workers as the ones to pass signals on to, at once if one has come already."""
        self._workers = workers
        if workers is not None and self.killed:
            workers.kill_workers()
        elif workers is not None and self.requested:
            self._pass_on(workers, self.requested)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Runs between any two bytecodes of the main thread: no lock is taken here, nothing is printed.
        if not self.requested:
            self.requested = number
            step = self.current_step()
            what = f"stopping after step {step} and saving" if step else "stopping before the first step"
            self.messages.put(f"{what}; Ctrl-C again stops now without saving")
            if self._workers is not None:
                self._pass_on(self._workers, number)
        elif number == signal.SIGINT and not self.killed:
            self.killed = True
            self.messages.put("stopping now without saving")
            if self._workers is not None:
                self._workers.kill_workers()

    @staticmethod
    def _pass_on(workers: Workers, number: int) -> None:
        for pid in workers.worker_pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
