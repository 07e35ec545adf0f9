"""Take metrics.jsonl back to the step a run resumes from, so that each step has one row. No torch.

Rows of steps that will be taken again, and a last line torn by a crash, move to the `metrics.attempt_N.jsonl` of the
attempt that wrote them. Files are written beside and renamed, the moved rows first: a crash in between loses nothing,
and cutting again changes nothing.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hp_train.checkpoint.layout import write_durably
from hp_train.new_folder import sync

METRICS = "metrics.jsonl"


def cut_metrics(run_dir: Path, step: int, attempt: int) -> int:
    """Keep the rows of metrics.jsonl up to `step` and return how many lines were taken out.

    `attempt` is the one that is about to go on from `step`; the rows were written by those before it.
    """
    path = run_dir / METRICS
    if not path.exists():
        return 0
    first_steps = _first_steps(run_dir, attempt)
    kept: list[bytes] = []
    cut: dict[int, list[bytes]] = defaultdict(list)
    for line in path.read_bytes().splitlines(keepends=True):
        row_step = _step_of(line)
        if row_step is not None and row_step <= step:
            kept.append(line)
        else:
            cut[_writer(row_step, first_steps, attempt)].append(line)
    for writer, lines in sorted(cut.items()):
        _append(run_dir / f"metrics.attempt_{writer}.jsonl", b"".join(lines))
    # Replaced even if nothing is cut: an older attempt that still has it open writes into a file without a name.
    write_durably(path, b"".join(kept))
    sync(run_dir)
    return sum(map(len, cut.values()))


def lacks_val_loss(run_dir: Path, step: int) -> bool:
    """Say whether the last row is that of `step` and has no validation loss."""
    row = _last_row(run_dir)
    return row is not None and row.get("step") == step and row.get("val_loss") is None


def fill_val_loss(run_dir: Path, step: int, val_loss: float) -> None:
    """Put the validation loss into the last row, that of `step`."""
    row = _last_row(run_dir)
    assert row is not None and row["step"] == step, f"the last row of {run_dir / METRICS} is not of step {step}"
    row["val_loss"] = val_loss
    lines = (run_dir / METRICS).read_bytes().splitlines(keepends=True)
    write_durably(run_dir / METRICS, b"".join([*lines[:-1], json.dumps(row).encode() + b"\n"]))
    sync(run_dir)


def _last_row(run_dir: Path) -> dict[str, Any] | None:
    path = run_dir / METRICS
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return json.loads(lines[-1]) if lines and _step_of(lines[-1]) is not None else None


def _first_steps(run_dir: Path, attempt: int) -> dict[int, int]:
    """Return the first step of every attempt before `attempt` that got as far as training."""
    first_steps = {}
    for earlier in range(1, attempt):
        try:
            record = json.loads((run_dir / "logs" / f"attempt_{earlier}" / "attempt.json").read_bytes())
            first_steps[earlier] = int(record["first_step"])
        except FileNotFoundError:
            continue  # it ended before its first step, and wrote no row
        except (ValueError, KeyError, TypeError):
            continue  # torn while it was written: the same
    return first_steps


def _writer(row_step: int | None, first_steps: Mapping[int, int], attempt: int) -> int:
    """Return which attempt wrote a row.

    Each attempt cuts the file before it starts, so the row of a step is of the last attempt that began at or before
    that step. A torn line was the last that anyone wrote.
    """
    writers = [earlier for earlier, first in first_steps.items() if row_step is None or first <= row_step]
    return max(writers, default=max(1, attempt - 1))


def _step_of(line: bytes) -> int | None:
    """Return the step of a whole row, None for a line that is torn or is no row."""
    if not line.endswith(b"\n"):
        return None  # torn, even if what is there happens to parse
    try:
        row = json.loads(line)
    except ValueError:
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return step if type(step) is int else None


def _append(path: Path, lines: bytes) -> None:
    lines = lines if lines.endswith(b"\n") else lines + b"\n"
    before = path.read_bytes() if path.exists() else b""
    if not before.endswith(lines):  # else a cut that crashed after this file was written is being repeated
        write_durably(path, before + lines)
