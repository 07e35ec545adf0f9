"""How well a run used its time over all of its attempts: goodput, steps redone, samples lost. No torch.

Goodput is the time of the steps that count (each once, as metrics.jsonl keeps them) over the time that attempts ran;
what a job waited in a queue is in neither. A step that was taken, lost with its attempt and taken again counts once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hp_train.checkpoint.fence import newest_attempt
from hp_train.launch.history import LineTail, StepRow, read_facts, read_rows
from hp_train.launch.outcome import Outcome, read_outcome
from hp_train.launch.run_dir import attempt_dir


@dataclass(frozen=True, slots=True)
class Goodput:
    """Over all attempts at a run."""

    attempts: int
    step_s: float  # in steps that count
    wall_s: float  # that attempts ran
    steps_redone: int  # taken again because the attempt that took them was lost before a checkpoint
    steps_missing: int  # of those before the last one: 0 unless a checkpoint lied

    @property
    def fraction(self) -> float | None:
        """Return goodput, None before any time has passed."""
        return min(1.0, self.step_s / self.wall_s) if self.wall_s > 0 else None

    def describe(self, global_batch_size: int) -> str:
        """Return e.g. `attempt 4, goodput 91 %, 0 samples lost, 3 steps redone`."""
        parts = [f"attempt {self.attempts}"]
        if self.fraction is not None:
            parts.append(f"goodput {self.fraction:.0%}".replace("%", " %"))
        parts.append(f"{self.steps_missing * global_batch_size} samples lost")
        if self.steps_redone:
            parts.append(f"{self.steps_redone} steps redone")
        return ", ".join(parts)


def goodput(run_dir: Path, now: float) -> Goodput:
    """Return the goodput of the run in `run_dir`; an attempt that runs at `now` (epoch seconds) counts so far."""
    rows = read_rows(run_dir / "metrics.jsonl")
    last = newest_attempt(run_dir)
    spans = [_span(run_dir, attempt, attempt == last, now) for attempt in range(1, last + 1)]
    firsts = [
        facts.first_step for attempt in range(1, last + 1) if (facts := read_facts(attempt_dir(run_dir, attempt)))
    ]
    return Goodput(
        attempts=last,
        step_s=sum(row.step_time_s or 0.0 for row in rows),
        wall_s=sum(spans),
        steps_redone=_redone(run_dir),
        steps_missing=_missing(rows, min(firsts, default=1)),
    )


def _missing(rows: list[StepRow], first_step: int) -> int:
    steps = {row.step for row in rows}
    return len(set(range(first_step, max(steps, default=0) + 1)) - steps)


def _redone(run_dir: Path) -> int:
    """Return the steps whose rows were set aside because a later attempt took them again."""
    return sum(len(LineTail(path).poll()) for path in run_dir.glob("metrics.attempt_*.jsonl"))


def _span(run_dir: Path, attempt: int, is_last: bool, now: float) -> float:
    """Return how long an attempt ran: as its outcome says, else from its first to its last file."""
    outcome: Outcome | None = read_outcome(run_dir, attempt)
    if outcome is not None and outcome.started_at and outcome.ended_at:
        return outcome.ended_at - outcome.started_at
    folder = attempt_dir(run_dir, attempt)
    times = [path.stat().st_mtime for path in folder.rglob("*") if path.is_file()]
    if not times:
        return 0.0
    return (now if is_last and outcome is None else max(times)) - min(times)
