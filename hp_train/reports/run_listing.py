"""Where a run stands, read from the small files of its directory: what `hp-train runs` lists. No torch.

Of metrics.jsonl only the end is read, and of the config one line, so that a folder of thousands of runs is listed at once.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from hp_train.launch.files import read_json
from hp_train.launch.find_run import CONFIG_FILE, started_at
from hp_train.launch.history import StepRow, parse_row
from hp_train.launch.outcome import read_outcome
from hp_train.launch.owner import living_owner
from hp_train.launch.run_dir import attempt_dir

_TAIL_BYTES = 64 * 1024  # of metrics.jsonl: some hundred rows, among them the last evaluation of most runs
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
    rows = last_rows(run_dir / "metrics.jsonl")
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


def last_rows(path: Path) -> list[StepRow]:
    """Return the last rows of a metrics.jsonl, oldest first, without reading the rest; none if there is no such file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    rows = []
    for line in lines[1:] if size > _TAIL_BYTES else lines:
        try:
            rows.append(parse_row(line))
        except (ValueError, TypeError):
            continue  # a line that is being written
    return rows


def _state(run_dir: Path, last: StepRow | None) -> str:
    try:
        if living_owner(run_dir) is not None:
            return "running" if last else "starting"
        outcome = read_outcome(run_dir)
    except (ValueError, TypeError, OSError):
        return "unreadable"
    newest = max(attempts_of(run_dir), default=0)
    if outcome is not None and outcome.attempt >= newest:
        return outcome.cause.value
    return "lost" if (run_dir / "logs").is_dir() else "not started"


def _max_steps(run_dir: Path) -> int | None:
    """Return how many steps the last attempt that stood was to take; the config knows of a run that never stood."""
    for attempt in reversed(attempts_of(run_dir)):
        try:
            facts = read_json(attempt_dir(run_dir, attempt) / "attempt.json")
            if facts is not None:
                return int(facts["max_steps"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged: one before may tell
    try:
        found = _MAX_STEPS.search((run_dir / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    return int(found[1]) if found else None


def attempts_of(run_dir: Path) -> list[int]:
    """Return the numbers of the attempts that left a folder, in order."""
    try:
        names = os.listdir(run_dir / "logs")
    except OSError:
        return []
    return sorted(int(name[8:]) for name in names if name.startswith("attempt_") and name[8:].isdigit())


def all_rows(run_dir: Path) -> list[StepRow]:
    """Return every row of a run's metrics.jsonl, one a step: of a step taken twice, the later."""
    rows: dict[int, StepRow] = {}
    try:
        text = (run_dir / "metrics.jsonl").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    for line in text.splitlines():
        try:
            row = parse_row(line)
        except (json.JSONDecodeError, TypeError):
            continue  # the torn last line of a run that was killed
        rows[row.step] = row
    return [rows[step] for step in sorted(rows)]
