"""Runs a run's one process here, in the launcher's own: `breakpoint()` and a debugger work. Imports torch.

No agent, no redirected output, no watchdog: an exception reaches the terminal with its traceback. The worker's own
steps are taken, so that the run and what it leaves are those of `launcher=local` with one process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType

from hp_train.launch.attempt_end import AttemptEnd, AttemptRecord
from hp_train.launch.capsule import recorded_recipe
from hp_train.launch.feed import Display, Feed
from hp_train.launch.launch_spec import LaunchSpec
from hp_train.launch.outcome import write_outcome
from hp_train.launch.owner import Ownership
from hp_train.launch.worker import DEVICE, failure_of, load_config, outcome_of, run_rank, settle
from hp_train.training.run_context import RunContext, StopRequest

_STOPS = (signal.SIGINT, signal.SIGTERM)


def launch_inline(spec: LaunchSpec, ownership: Ownership, display: Display) -> AttemptEnd:
    """Train in this process and return how it ended, which outcome.json then says too.

    The first Ctrl-C saves and stops, the second one stops. What else the training raises comes through.
    """
    record = AttemptRecord(spec.run_dir, ownership.attempt, spec.plan.sizes, started_at=time.time())
    recipe = recorded_recipe(spec.run_dir)
    context = RunContext(spec.run_dir, ownership.attempt, rank=0, local_rank=0, world_size=1, recipe=recipe)
    context.attempt_dir.mkdir(parents=True, exist_ok=True)
    os.environ[DEVICE] = spec.plan.device
    feed = Feed(spec.run_dir, ownership.attempt, display, spec.stop.messages)
    try:
        with display, feed, _stops_asked(context.stop):
            config = settle(load_config(spec.config_path), context)
            done = outcome_of(run_rank(config, context, None), context)
    except KeyboardInterrupt:
        end = record.killed(context.progress.step)
    except BaseException as error:
        write_outcome(spec.run_dir, record.judge_failures([failure_of(error, context)]).outcome)
        raise
    else:
        end = AttemptEnd(record.outcome(done.cause, done.exit_code, done.step))
    write_outcome(spec.run_dir, end.outcome)
    return end


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
