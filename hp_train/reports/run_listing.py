"""Where a run stands, read from the small files of its directory: what `hp-train runs` lists. No torch.

Of metrics.jsonl only the end is read, and of the config one line, so that thousands of runs are listed at once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hp_train.errors import ConfigError
from hp_train.launch.find_run import CONFIG_FILE, started_at
from hp_train.launch.history import StepRow, newest_facts, read_last_rows, read_rows
from hp_train.launch.owner import living_owner
from hp_train.launch.run_state import newest_outcome

_MAX_STEPS = re.compile(r"^  max_steps: (\d+)$", flags=re.MULTILINE)


@dataclass(frozen=True, slots=True)
class RunListing:
    """One run as it is listed."""

    path: Path
    state: str  # running, starting, lost (its launcher is gone and left no word), or the cause of its end
    step: int  # last step recorded
    max_steps: int | None
    loss: float | None
    val_loss: float | None  # of the newest evaluation
    started_at: float  # of the last attempt, seconds since the epoch


def read_listing(run_dir: Path) -> RunListing:
    """Return where the run in `run_dir` stands. Files that are damaged count as missing: a list shows what it can."""
    rows = read_last_rows(run_dir / "metrics.jsonl")
    last = rows[-1] if rows else None
    evaluations = [row.val_loss for row in rows if row.val_loss is not None]
    return RunListing(
        path=run_dir,
        state=_state(run_dir, last),
        step=last.step if last else 0,
        max_steps=_max_steps(run_dir),
        loss=last.loss if last else None,
        val_loss=evaluations[-1] if evaluations else None,
        started_at=started_at(run_dir),
    )


def _state(run_dir: Path, last: StepRow | None) -> str:
    try:
        if living_owner(run_dir) is not None:
            return "running" if last else "starting"
        outcome = newest_outcome(run_dir)
    except (ConfigError, OSError):
        return "unreadable"
    if outcome is not None:
        return outcome.cause.value
    return "lost" if (run_dir / "logs").is_dir() else "not started"


def _max_steps(run_dir: Path) -> int | None:
    """Return how many steps the last attempt that stood was to take; the config knows of a run that never stood."""
    try:
        facts = newest_facts(run_dir)
        if facts is not None:
            return facts.max_steps
        found = _MAX_STEPS.search((run_dir / CONFIG_FILE).read_text(encoding="utf-8"))
    except (ConfigError, OSError, UnicodeDecodeError):
        return None
    return int(found[1]) if found else None


def all_rows(run_dir: Path) -> list[StepRow]:
    """Return the rows of a run's metrics.jsonl in order, one a step: of a step taken twice, the later."""
    rows = {row.step: row for row in read_rows(run_dir / "metrics.jsonl")}
    return [rows[step] for step in sorted(rows)]
