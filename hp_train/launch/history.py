"""What the launcher knows of a running attempt: facts from attempt.json, rows from metrics.jsonl. No torch.

The trainer's rank 0 writes both files; nothing else passes between the processes. Rows of an earlier attempt, which
stay in metrics.jsonl on resume, are left out by their step.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hp_train.checkpoint.fence import begun_attempts
from hp_train.launch.files import damaged, read_json
from hp_train.launch.run_dir import attempt_dir

WINDOW = 50  # steps over which times are averaged for the estimate of the end
_TAIL_BYTES = 64 * 1024  # of metrics.jsonl: some hundred rows, among them the last evaluation of most runs


@dataclass(frozen=True, slots=True)
class AttemptFacts:
    """attempt.json: what does not change while an attempt runs."""

    device: str
    device_name: str | None
    device_memory_bytes: int | None
    world_size: int
    mesh: str
    num_parameters: int
    first_step: int
    max_steps: int
    tokens_per_step: int
    resumed_from: str | None = None  # name of the checkpoint
    precision: str = ""
    peak_flops: float | None = None  # of one device in this precision; None where it is not known, nor then the MFU

    @property
    def lacks_mfu(self) -> bool:
        """Say whether one would look for an MFU and there is none; on the CPU nobody does."""
        return self.device == "cuda" and self.peak_flops is None


@dataclass(frozen=True, slots=True)
class StepRow:
    """One line of metrics.jsonl; None where the trainer has no figure."""

    step: int
    loss: float | None = None
    val_loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    tokens: int | None = None
    tokens_per_second: float | None = None
    tokens_per_second_per_gpu: float | None = None
    step_time_s: float | None = None
    data_wait_s: float | None = None
    mfu: float | None = None
    peak_memory_bytes: int | None = None
    compute_min_s: float | None = None  # of the fastest rank
    compute_max_s: float | None = None  # of the slowest


def _pick(kind: type, values: dict[str, Any]) -> Any:
    names = {item.name for item in fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in names})


def parse_row(line: str) -> StepRow:
    """Read one line of metrics.jsonl; keys that are not ours are left out."""
    return _pick(StepRow, json.loads(line))


def read_rows(path: Path) -> list[StepRow]:
    """Return the rows of a metrics.jsonl so far."""
    return rows_of(LineTail(path).poll())


def read_last_rows(path: Path) -> list[StepRow]:
    """Return the last rows of a metrics.jsonl, some hundred, without reading the rest; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return rows_of(lines[1:] if size > _TAIL_BYTES else lines)


def rows_of(lines: Iterable[str]) -> list[StepRow]:
    """Return the rows that `lines` hold; a line that a crash tore, or a disk damaged, is none."""
    rows = []
    for line in lines:
        try:
            rows.append(parse_row(line))
        except (ValueError, TypeError, AttributeError):
            continue
    return rows


def read_facts(folder: Path) -> AttemptFacts | None:
    """Return attempt.json in an attempt's folder, None before rank 0 has written it. Raises ConfigError."""
    path = folder / "attempt.json"
    found = read_json(path)
    try:
        return None if found is None else _pick(AttemptFacts, found)
    except TypeError as error:
        raise damaged(path, str(error)) from None


def newest_facts(run_dir: Path) -> AttemptFacts | None:
    """Return attempt.json of the last attempt whose workers stood, None if none did. Raises ConfigError."""
    found = (read_facts(attempt_dir(run_dir, attempt)) for attempt in reversed(begun_attempts(run_dir)))
    return next((facts for facts in found if facts is not None), None)


@dataclass(slots=True)
class History:
    """The rows of one attempt so far, those that a display needs."""

    facts: AttemptFacts | None = None
    last: StepRow | None = None
    val_loss: float | None = None
    recent: deque[StepRow] = field(default_factory=lambda: deque(maxlen=WINDOW))
    losses: list[float] = field(default_factory=list)  # halved in number when long: a sparkline needs no more

    def add(self, row: StepRow) -> None:
        """Take in the next step."""
        self.last = row
        self.recent.append(row)
        if row.val_loss is not None:
            self.val_loss = row.val_loss
        if row.loss is not None:
            self.losses.append(row.loss)
            if len(self.losses) > 4096:
                self.losses = self.losses[::2]

    def remaining_s(self) -> float | None:
        """Return the estimated seconds to the last step; None when nothing is known, or nothing remains."""
        times = [row.step_time_s for row in self.recent if row.step_time_s is not None]
        if not times or self.facts is None or self.last is None or self.last.step >= self.facts.max_steps:
            return None
        return (self.facts.max_steps - self.last.step) * sum(times) / len(times)


class LineTail:
    """Reads a growing text file line by line; starts over when the file is replaced or cut."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0

    def poll(self, *, torn: bool = False) -> list[str]:
        """Return the complete lines written since the last call; with `torn` the unfinished last one too."""
        try:
            with open(self._path, "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode, self._offset = status.st_ino, 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        end = len(data) if torn else data.rfind(b"\n") + 1
        self._offset += end
        return data[:end].decode("utf-8", errors="replace").splitlines()
