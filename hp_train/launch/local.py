"""Runs the processes of a run on this machine: attempt after attempt, and the exit code they come to. Imports torch.

How an attempt goes is `attempt`'s affair, whether to start another `restart`'s. In a job of several nodes the first
node's launcher does this (`launch`), the others run their share of each attempt (`follow`).
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from hp_train.checkpoint.fence import Fence
from hp_train.errors import ConfigError
from hp_train.launch.attempt import run_attempt
from hp_train.launch.attempt_end import AttemptEnd, AttemptRecord
from hp_train.launch.devices import ProcessPlan
from hp_train.launch.feed import Display, NoDisplay
from hp_train.launch.launch_spec import LaunchSpec
from hp_train.launch.nvidia import describe_driver
from hp_train.launch.outcome import Cause, Outcome, write_outcome
from hp_train.launch.owner import Ownership
from hp_train.launch.restart import why_not_again


def launch(spec: LaunchSpec, ownership: Ownership, display: Display) -> AttemptEnd:
    """Run the workers to their end, starting them again after failures as launcher.max_restarts allows.

    Returns how the last attempt ended; outcome.json says it of each. Raises ConfigError if torch finds fewer GPUs than
    were planned with, SupersededError when another launcher has taken over the run directory.
    """
    check_gpus(spec.plan)
    outcomes: list[Outcome] = []
    max_restarts = spec.config.launcher.max_restarts
    for restart in range(max_restarts + 1):
        if restart:
            ownership.next_attempt()
        end = _run_round(spec, ownership, display, restart)
        outcomes.append(end.outcome)
        ownership.check()
        reason = why_not_again(outcomes)
        if reason is not None and end.outcome.may_restart:
            end = _without_progress(end, reason)
        _write_outcome(spec.run_dir, end.outcome)
        if reason is not None or spec.stop.requested or restart == max_restarts:
            break
        again = f"starting again from the last checkpoint (restart {restart + 1} of {max_restarts})"
        print(*end.report, again, sep="\n", file=sys.stderr, flush=True)
    if spec.group is not None:
        spec.group.tell_round(len(outcomes), 0)
        spec.group.leave()
    return end


def _run_round(spec: LaunchSpec, ownership: Ownership, display: Display, number: int) -> AttemptEnd:
    """Run one attempt on all nodes, unless a signal has come already: then none starts it."""
    stopped = spec.stop.requested
    if spec.group is not None:
        spec.group.tell_round(number, 0 if stopped else ownership.attempt)
    if stopped:
        record = AttemptRecord(spec.run_dir, ownership.attempt, spec.plan.sizes, started_at=time.time())
        return record.stopped_before_start(spec.stop)
    end = run_attempt(spec, ownership, display)
    assert end is not None, "the node that leads judges"
    return end


def _without_progress(end: AttemptEnd, reason: str) -> AttemptEnd:
    """Return an end that another attempt could have mended, were it not for `reason`."""
    message = f"{reason}: {end.outcome.message}"
    outcome = replace(end.outcome, cause=Cause.NO_PROGRESS, message=message, gave_up=True)
    return AttemptEnd(outcome, (*end.report, f"not started again: {reason}"))


def follow(spec: LaunchSpec) -> None:
    """Run this node's share of every attempt that the first node's launcher begins, until it says that all is over.

    Raises NodesError when that launcher is gone.
    """
    assert spec.group is not None, "only a node among several follows"
    check_gpus(spec.plan)
    number = 0
    while attempt := spec.group.hear_round(number):
        run_attempt(spec, Fence(spec.run_dir, attempt), NoDisplay())
        number += 1
    spec.group.leave()


def _write_outcome(run_dir: Path, outcome: Outcome) -> None:
    try:
        write_outcome(run_dir, outcome)
    except OSError as error:  # a full disk, a lost folder: the exit code still tells
        print(f"hp-train: warning: outcome.json cannot be written: {error}", file=sys.stderr, flush=True)


def check_gpus(plan: ProcessPlan) -> None:
    """Raise ConfigError unless torch finds the GPUs that were planned with."""
    if plan.device != "cuda":
        return
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < plan.num_processes:
        raise ConfigError(
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds {found} usable GPUs of the "
            f"{plan.num_processes} that this run takes; {describe_driver()}; see `python -m torch.utils.collect_env`, "
            "or train on the CPU with trainer.device=cpu"
        )
