"""The measured timeline of a step: recorded by the runtime, joined over ranks, written beside the planned one.

Imports torch (for events on a GPU) and the schedule. A span begins when the step's inputs are there, so the time that a
rank waits for a peer is a gap between spans, as a bubble is in a simulated timeline. Ranks put their times on the wall
clock; on one host that is one clock, between hosts it is as good as their time service.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from hp_train.schedule import Costs, MetaStep, MetaStepType, Schedule, Span, Timeline, draw, simulate


@dataclass(frozen=True, slots=True)
class Gap:
    """Time in which a rank computed nothing between two of its compute steps."""

    rank: int
    after: MetaStep
    before: MetaStep
    start_s: float
    duration_s: float

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.duration_s * 1e3:.2f} ms between {self.after} and {self.before}"


class Recorder:
    """Notes when each step of one rank's program starts and ends."""

    def __init__(self, pp_rank: int, device: torch.device) -> None:
        self.spans: list[Span] = []
        self._pp_rank = pp_rank
        self._on_host = device.type == "cpu"
        self._marks: list[tuple[MetaStep, object, object, float]] = []  # step, start, end, seconds waited at its start
        if not self._on_host:
            torch.cuda.synchronize(device)
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()
        self._origin_s = time.time() if not self._on_host else time.time() - time.perf_counter()

    def measure(self, step: MetaStep, run: Callable[[], None], waited_s: Callable[[], float]) -> None:
        """Run the step; `waited_s()` is how long the rank has waited for peers so far."""
        waited_before_s, start = waited_s(), self._now()
        run()
        self._marks.append((step, start, self._now(), waited_s() - waited_before_s))

    def finish(self) -> list[Span]:
        """All spans, in seconds of the wall clock."""
        if not self._on_host:
            torch.cuda.synchronize()
        for step, start, end, waited_s in self._marks:
            start_s, end_s = self._seconds(start), self._seconds(end)
            # On a GPU the wait is the stream's: it shows between the events of neighbouring steps by itself.
            begin_s = min(start_s + waited_s, end_s) if self._on_host and step.computes else start_s
            self.spans.append(Span(self._pp_rank, step, begin_s, end_s))
        self._marks.clear()
        return self.spans

    def _now(self) -> object:
        if self._on_host:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: object) -> float:
        if self._on_host:
            return self._origin_s + mark
        return self._origin_s + self._origin.elapsed_time(mark) / 1e3


def join_timelines(spans: list[Span], store: dist.Store, pp_rank: int, pp_size: int, name: str) -> Timeline:
    """The timeline of all ranks, starting at 0; every rank of the pipeline calls it with its own spans."""
    rows = [(str(span.step), span.start_s, span.end_s) for span in spans]
    store.set(f"{name}_{pp_rank}", json.dumps(rows))
    keys = [f"{name}_{rank}" for rank in range(pp_size)]
    store.wait(keys)
    ranks = [json.loads(store.get(key)) for key in keys]
    origin_s = min(start_s for row in ranks for _, start_s, _ in row)
    return Timeline.from_spans(
        [
            (rank, MetaStep.from_str(text), start_s - origin_s, end_s - origin_s)
            for rank, row in enumerate(ranks)
            for text, start_s, end_s in row
        ],
        name="measured",
    )


def largest_gaps(timeline: Timeline, count: int = 3) -> list[Gap]:
    """The longest stretches without computing between two compute steps of a rank, longest first."""
    gaps = []
    for rank, row in enumerate(timeline.spans):
        computing = [span for span in row if span.step.computes]
        gaps += [
            Gap(rank, earlier.step, later.step, earlier.end_s, later.start_s - earlier.end_s)
            for earlier, later in zip(computing, computing[1:], strict=False)
        ]
    return sorted(gaps, key=lambda gap: -gap.duration_s)[:count]


def planned_timeline(schedule: Schedule, measured: Timeline) -> Timeline:
    """The schedule simulated with what its steps really took on average: the waiting that it should have had."""
    planned = simulate(schedule, measured_costs(measured, schedule.num_stages))
    return replace(planned, name=f"{planned.name}, planned", unit="s")


def measured_costs(timeline: Timeline, num_stages: int) -> Costs:
    """Mean seconds of each kind of compute step per stage. A BWD counts as half input, half weight."""
    sums: dict[tuple[MetaStepType, int], list[float]] = {}
    for row in timeline.spans:
        for span in row:
            parts = span.step.computes
            for part in parts:
                sums.setdefault((part.type, part.stage_index), []).append((span.end_s - span.start_s) / len(parts))

    def mean(kind: MetaStepType, stage: int) -> float:
        values = sums.get((kind, stage), [0.0])
        return sum(values) / len(values)

    stages = range(num_stages)
    halves = [mean(MetaStepType.BWD, stage) / 2 for stage in stages]
    return Costs(
        fwd=tuple(mean(MetaStepType.FWD, stage) for stage in stages),
        bwd_input=tuple(mean(MetaStepType.BWD_INPUT, stage) or halves[stage] for stage in stages),
        bwd_weight=tuple(mean(MetaStepType.BWD_WEIGHT, stage) or halves[stage] for stage in stages),
    )


def write_perfetto(timelines: Mapping[str, Timeline], path: Path) -> None:
    """Write timelines as a trace for ui.perfetto.dev: a process per timeline, a thread per rank, microseconds."""
    events: list[dict] = []
    for process, (name, timeline) in enumerate(timelines.items()):
        events.append({"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}})
        for rank, row in enumerate(timeline.spans):
            label = {"name": f"pipeline rank {rank}"}
            events.append({"name": "thread_name", "ph": "M", "pid": process, "tid": rank, "args": label})
            for span in row:
                events.append(
                    {
                        "name": str(span.step), "cat": span.step.type.name, "ph": "X", "pid": process, "tid": rank,
                        "ts": float(span.start_s) * 1e6, "dur": float(span.end_s - span.start_s) * 1e6,
                    }
                )  # fmt: skip
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def write_trace(schedule: Schedule, measured: Timeline, folder: Path, step: int) -> str:
    """Write a step's measured and planned timelines (SVG each, both in one Perfetto JSON); return what to print.

    folder: made if missing; gets pipeline_step_N.measured.svg, pipeline_step_N.planned.svg, pipeline_step_N.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    planned = planned_timeline(schedule, measured)
    stem = folder / f"pipeline_step_{step}"
    write_perfetto({"measured": measured, "planned": planned}, Path(f"{stem}.json"))
    draw(measured, f"{stem}.measured.svg")
    draw(planned, f"{stem}.planned.svg")
    gaps = "\n".join(f"  {gap}" for gap in largest_gaps(measured))
    return f"pipeline step {step}: timelines in {stem}.*; largest gaps:\n{gaps}"
