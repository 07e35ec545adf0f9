"""Runs a run's one process here, in the launcher's own: `breakpoint()` and a debugger work. Imports torch.

No agent, no redirected output, no watchdog: an exception reaches the terminal with its traceback. The worker's own
steps are taken, so that the run and what it leaves are those of `launcher=local` with one process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from hp_train.errors import DivergedError, ExitCode, HpTrainError
from hp_train.launch.devices import ProcessPlan
from hp_train.launch.feed import Feed
from hp_train.launch.out_of_memory import is_out_of_memory
from hp_train.launch.outcome import Cause, Outcome, write_outcome
from hp_train.launch.owner import Ownership
from hp_train.launch.plain_log import PlainLog
from hp_train.launch.signals import StopSignals
from hp_train.launch.worker import DEVICE, load_config, outcome_of, run_rank, settle
from hp_train.training.run_context import RunContext, StopRequest

_STOPS = (signal.SIGINT, signal.SIGTERM)


def launch_inline(
    run_dir: Path, config_path: Path, plan: ProcessPlan, display: PlainLog, ownership: Ownership, recipe: str
) -> Outcome:
    """Train in this process and return how it ended, which outcome.json then says too.

    The first Ctrl-C saves and stops, the second one stops. What else the training raises comes through.
    """
    context = RunContext(run_dir, ownership.attempt, rank=0, local_rank=0, world_size=1, recipe=recipe)
    context.attempt_dir.mkdir(parents=True, exist_ok=True)
    os.environ[DEVICE] = plan.device
    started = time.time()
    feed = Feed(run_dir, ownership.attempt, display, StopSignals().messages)
    try:
        with display, feed, _stops_asked(context.stop):
            config = settle(load_config(config_path), context)
            outcome = outcome_of(run_rank(config, context, None), context)
    except BaseException as error:
        _write(run_dir, _failure(error, context), started)
        raise
    return _write(run_dir, outcome, started)


@contextlib.contextmanager
def _stops_asked(stop: StopRequest) -> Iterator[None]:
    def ask(number: int, frame: FrameType | None) -> None:
        if stop.signal_number:
            raise KeyboardInterrupt
        stop.signal_number = number

    before = {number: signal.signal(number, ask) for number in _STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _failure(error: BaseException, context: RunContext) -> Outcome:
    cause, code = Cause.UNKNOWN, ExitCode.FAILED
    if isinstance(error, DivergedError):
        cause, code = Cause.DIVERGED, ExitCode.DIVERGED
    elif isinstance(error, KeyboardInterrupt):
        cause, code = Cause.CANCELLED, ExitCode.INTERRUPTED
    elif is_out_of_memory(error):
        cause = Cause.OUT_OF_MEMORY
    elif isinstance(error, HpTrainError):
        code = error.exit_code
    progress = context.progress
    return Outcome(
        context.attempt, cause, int(code), progress.step, rank=0, coordinates=progress.coordinates,
        phase=str(progress.phase), message=str(error),
    )  # fmt: skip


def _write(run_dir: Path, outcome: Outcome, started: float) -> Outcome:
    outcome = dataclasses.replace(outcome, started_at=started, ended_at=time.time())
    write_outcome(run_dir, outcome)
    return outcome
