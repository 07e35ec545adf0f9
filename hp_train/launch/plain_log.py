"""One plain line per `trainer.log_every` steps: what SLURM logs and pipes get. No torch, no rich.

Figures that are unknown are left out. Speeds are means over the steps since the line before, so that a line stands for
all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TextIO

from hp_train.launch import units
from hp_train.launch.history import AttemptFacts, History, StepRow


class PlainLog:
    """Writes lines to a stream; a stream that is gone (closed pipe, hung-up terminal) ends the log, not the run."""

    def __init__(self, stream: TextIO, log_every: int, *, loss_means_nothing: bool = False) -> None:
        self._stream = stream
        self._log_every = log_every
        self._loss_means_nothing = loss_means_nothing
        self._since: list[StepRow] = []

    def __enter__(self) -> PlainLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._since.clear()

    def open_attempt(self, history: History) -> None:
        """Say what the workers turned out to be."""
        facts = history.facts
        assert facts is not None
        device = facts.device_name or facts.device
        memory = f", {facts.device_memory_bytes / units.GIB:.0f} GiB each" if facts.device_memory_bytes else ""
        self.line(
            f"{units.count_text(facts.num_parameters)} parameters on {facts.mesh} ({device}{memory}); "
            f"steps {facts.first_step} to {facts.max_steps}"
        )
        if facts.lacks_mfu:
            self.line(f"MFU unknown: no peak is on record for {device} in {facts.precision}")

    def step(self, history: History) -> None:
        """Take in the newest step; prints at multiples of log_every, at evaluations and at the end."""
        row, facts = history.last, history.facts
        assert row is not None and facts is not None
        self._since.append(row)
        if row.step % self._log_every == 0 or row.val_loss is not None or row.step == facts.max_steps:
            self.line(format_step(self._since, facts, history.remaining_s(), self._loss_means_nothing))
            self._since.clear()

    def tick(self) -> None:
        """Nothing moves between lines."""

    def line(self, text: str) -> None:
        """Print a line at once."""
        with contextlib.suppress(OSError, ValueError):
            print(text, file=self._stream, flush=True)


def format_step(
    rows: list[StepRow], facts: AttemptFacts, remaining_s: float | None, loss_means_nothing: bool = False
) -> str:
    """Return the line of the last of `rows`, its speeds averaged over all of them."""
    row = rows[-1]
    parts = [f"step {row.step}/{facts.max_steps}"]
    if loss_means_nothing:
        parts.append("loss -")
    elif row.loss is not None:
        parts.append(f"loss {row.loss:.3f}")
    if row.val_loss is not None:
        parts.append("val -" if loss_means_nothing else f"val {row.val_loss:.3f}")
    if row.grad_norm is not None:
        parts.append(f"grad {units.grad_norm_text(row.grad_norm)}")
    if row.lr is not None:
        parts.append(f"lr {row.lr:.1e}")
    parts.extend(_speeds(rows, facts))
    if remaining_s is not None:
        parts.append(f"eta {units.duration_text(remaining_s)}")
    return " ".join(parts)


def _speeds(rows: list[StepRow], facts: AttemptFacts) -> list[str]:
    parts = []
    step_time_s = mean(row.step_time_s for row in rows)
    tokens_per_second = facts.tokens_per_step / step_time_s if step_time_s else rows[-1].tokens_per_second
    if tokens_per_second:
        parts.append(speed_text(tokens_per_second, facts))
    mfu = mean(row.mfu for row in rows)
    if mfu is not None:
        parts.append(f"mfu {mfu:.0%}")
    if rows[-1].peak_memory_bytes:
        parts.append(f"mem {units.memory_text(rows[-1].peak_memory_bytes, facts.device_memory_bytes)}")
    if step_time_s is not None:
        parts.append(units.step_time_text(step_time_s))
    return parts


def speed_text(tokens_per_second: float, facts: AttemptFacts) -> str:
    """Return e.g. `412k tok/s (51.5k/GPU)`; the share of one only where there are several."""
    text = f"{units.count_text(tokens_per_second)} tok/s"
    if facts.world_size > 1:
        each = "GPU" if facts.device == "cuda" else "process"
        text += f" ({units.count_text(tokens_per_second / facts.world_size)}/{each})"
    return text


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values, None if there is none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
