"""Where a run stands: as its files say, and as the scheduler says of its job. No torch."""

from __future__ import annotations

import contextlib
import datetime
import time
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from hp_train.checkpoint.fence import newest_attempt
from hp_train.checkpoint.layout import newest_committed
from hp_train.launch import units
from hp_train.launch.files import damaged
from hp_train.launch.goodput import goodput
from hp_train.launch.history import WINDOW, History, read_facts, read_rows
from hp_train.launch.outcome import Cause, Outcome, read_outcome, write_outcome
from hp_train.launch.owner import living_owner
from hp_train.launch.plain_log import mean, speed_text
from hp_train.launch.run_dir import attempt_dir
from hp_train.launch.run_of_job import ATTEMPT_FILE, job_of
from hp_train.launch.slurm_tools import Job, SlurmError, find_job


@dataclass(frozen=True, slots=True)
class RunState:
    """What is known of a run now."""

    run_dir: Path
    job: Job | None
    outcome: Outcome | None  # of the newest attempt
    runs: bool  # whether a launcher owns the directory
    note: str = ""  # why the scheduler could not be asked

    @property
    def is_over(self) -> bool:
        """Say whether nothing will happen by itself any more."""
        return not self.runs and (self.job is None or not self.job.is_active)


def read_state(run_dir: Path) -> RunState:
    """Look at the files of a run and ask the scheduler for its job."""
    job_id, job, note = job_of(run_dir), None, ""
    if job_id is not None:
        try:
            job = find_job(job_id)
        except SlurmError as error:
            note = str(error)
    runs = living_owner(run_dir) is not None
    outcome = newest_outcome(run_dir)
    if outcome is not None and job is not None and not runs and _was_cancelled(run_dir, job, outcome):
        outcome = replace(outcome, cause=Cause.CANCELLED)
        with contextlib.suppress(OSError):  # the scheduler forgets within minutes; somebody else's run stays as it is
            write_outcome(run_dir, outcome)
    return RunState(run_dir, job, outcome, runs, note)


def _was_cancelled(run_dir: Path, job: Job, outcome: Outcome) -> bool:
    """Say whether the job was cancelled while this attempt ran: what reaches a launcher is the signal of a preemption.

    A job that was cancelled while it waited, for the first or another time, leaves the end of the attempt before as is.
    """
    if not job.state.startswith("CANCELLED") or outcome.cause not in (Cause.PREEMPTED, Cause.STOPPED, Cause.UNKNOWN):
        return False
    begun = sorted((run_dir / "slurm").glob(f"{job.job_id}.*/{ATTEMPT_FILE}"), key=_restart_of)
    if not begun or (job.restarts is not None and _restart_of(begun[-1]) != job.restarts):
        return False
    return int(begun[-1].read_text(encoding="utf-8")) <= outcome.attempt


def _restart_of(mark: Path) -> int:
    return int(mark.parent.name.rpartition(".")[2])


def newest_outcome(run_dir: Path) -> Outcome | None:
    """Return how the newest attempt ended, None if there is none or it left no word."""
    newest = newest_attempt(run_dir)
    return read_outcome(run_dir, newest) if newest else None


def describe_state(state: RunState) -> list[str]:
    """Return the lines of `hp-train status` for a run."""
    now = time.time()
    lines = [f"{state.run_dir}: {_headline(state)}"]
    progress = _progress(state.run_dir)
    if progress:
        lines.append(f"  {progress}")
    if newest_attempt(state.run_dir):
        lines.append(f"  {goodput(state.run_dir, now).describe(_global_batch_size(state.run_dir))}")
        lines.append(f"  {_last_checkpoint(state.run_dir, now)}")
    if state.outcome is not None and state.outcome.message and not state.runs:
        lines.append(f"  {state.outcome.message.splitlines()[0]}")
    return [*lines, *([f"  {state.note}"] if state.note else [])]


def _headline(state: RunState) -> str:
    job, outcome = state.job, state.outcome
    if job is not None and job.is_active:
        text = f"job {job.job_id} is {job.state.lower()}"
        if job.state == "PENDING":
            start = f", expected start {_clock(job.start)}" if job.start is not None else ""
            return f"{text} ({job.reason or 'no reason told'}{start})"
        return f"{text} on {job.nodes}" + (f" until {_clock(job.end)}" if job.end else "")
    if state.runs:
        owner = living_owner(state.run_dir)
        return f"running, {owner.describe()}" if owner else "running"
    ended = f"; job {job.job_id} {job.state.lower()}" if job is not None else ""
    if outcome is None:
        return f"{'ended without a word' if newest_attempt(state.run_dir) else 'not started'}{ended}"
    return f"{outcome.cause.replace('_', ' ')} at step {outcome.step}{ended}"


def _clock(seconds: float | None) -> str:
    return "" if seconds is None else datetime.datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="seconds")


def _progress(run_dir: Path) -> str:
    """Return e.g. `step 40/200 (20 %), eta 3m, 12.1k tok/s`; empty before the first step."""
    facts = read_facts(attempt_dir(run_dir, newest_attempt(run_dir)))
    rows = read_rows(run_dir / "metrics.jsonl")
    if not rows:
        return ""
    if facts is None:
        return f"step {rows[-1].step}"
    history = History(facts)
    for row in rows[-WINDOW:]:
        history.add(row)
    step = rows[-1].step
    parts = [f"step {step}/{facts.max_steps} ({100 * step // facts.max_steps} %)"]
    remaining_s = history.remaining_s()
    if remaining_s:
        parts.append(f"eta {units.duration_text(remaining_s)}")
    step_time_s = mean(row.step_time_s for row in rows[-10:])
    if step_time_s:
        parts.append(speed_text(facts.tokens_per_step / step_time_s, facts))
    return ", ".join(parts)


def _last_checkpoint(run_dir: Path, now: float) -> str:
    folder = newest_committed(run_dir / "checkpoints")
    if folder is None:
        return "no checkpoint yet"
    return f"last checkpoint {folder.name}, {units.duration_text(now - folder.stat().st_mtime)} ago"


def _global_batch_size(run_dir: Path) -> int:
    path = run_dir / "config.yaml"
    try:
        return int(yaml.safe_load(path.read_text(encoding="utf-8"))["trainer"]["global_batch_size"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise damaged(path, str(error)) from None
