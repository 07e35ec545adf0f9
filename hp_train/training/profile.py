"""Traces and memory snapshots of chosen steps: `metrics.profile_steps=[10,12]`.

Each of those steps is recorded whole (forward, backward, exchange, optimizer) by torch's profiler into
`<run>/profile/step_00000010/rank_R.trace.json.gz`, for ui.perfetto.dev, and `rank_R.ops.txt`, a table of what took time
and memory. On CUDA `rank_R.memory.pickle` holds every allocation of the step with its stack, for
pytorch.org/memory_viz. The first data-parallel rank of each pipeline stage records; the others do the same work.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import ContextManager

import torch
from torch.profiler import ProfilerActivity, profile

_TABLE_ROWS = 50
_QUIET = "99"  # the profiler's library tells of its starts and stops on stderr otherwise; faults are raised anyhow
_MOST_MEMORY_EVENTS = 200_000  # allocations and frees of one step; a large model has some ten thousand


class StepProfiler:
    """Records the steps that were asked for."""

    def __init__(self, steps: Sequence[int], folder: Path, rank: int, device: torch.device, *, records: bool) -> None:
        """`records`: whether this rank is one of those that do; `folder` is made when the first step is recorded."""
        self._steps = frozenset(steps) if records else frozenset()
        self._folder = folder
        self._rank = rank
        self._device = device

    def around(self, step: int) -> ContextManager[None]:
        """Return a context to take `step` in; it does nothing unless the step is to be recorded."""
        return self._record(step) if step in self._steps else nullcontext()

    @contextmanager
    def _record(self, step: int) -> Iterator[None]:
        stem = self._folder / f"step_{step:08d}" / f"rank_{self._rank}"
        stem.parent.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET)
        on_cuda = self._device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
        if on_cuda:
            torch.cuda.memory._record_memory_history(max_entries=_MOST_MEMORY_EVENTS)
        try:
            with profile(activities=activities, profile_memory=True, record_shapes=True) as recorded:
                yield
                if on_cuda:
                    torch.cuda.synchronize(self._device)  # kernels of the step end inside of it
            if on_cuda:
                torch.cuda.memory._dump_snapshot(f"{stem}.memory.pickle")
        finally:
            if on_cuda:
                torch.cuda.memory._record_memory_history(enabled=None)
        recorded.export_chrome_trace(f"{stem}.trace.json.gz")
        Path(f"{stem}.ops.txt").write_text(_tables(recorded, on_cuda=on_cuda), encoding="utf-8")


def _tables(recorded: profile, *, on_cuda: bool) -> str:
    device = "cuda" if on_cuda else "cpu"
    averages = recorded.key_averages()
    parts = []
    for what, order in (("time", f"self_{device}_time_total"), ("memory", f"self_{device}_memory_usage")):
        parts.append(
            f"operators by their own {what} ({device})\n{averages.table(sort_by=order, row_limit=_TABLE_ROWS)}"
        )
    return "\n".join(parts)
