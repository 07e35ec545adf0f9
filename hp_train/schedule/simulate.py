"""When each step of a schedule runs, given what steps cost: an event simulation, linear in the number of steps.

No torch. A rank runs its steps in order, each as soon as its inputs are there: a forward needs the activation from
the stage before, a backward the gradient from the stage behind, and a tensor between ranks takes `Costs.p2p`. Steps
that compute nothing (sends, receives, unshards, swaps) take no time of the rank. `Timeline` holds the outcome, and
holds measured runs just as well.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hp_train.errors import ScheduleError, UnrunnableScheduleError
from hp_train.schedule.steps import BACKWARD_TYPES, MetaStep, MetaStepType, Schedule

_T = MetaStepType
Number = float  # int and Fraction are welcome too: arithmetic keeps their type, so closed forms can be met exactly


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds (or any unit) that one micro-batch costs, a number for all stages or one number per stage.

    fwd, bwd_input, bwd_weight: FWD, BWD_INPUT and BWD_WEIGHT of one stage; BWD costs the last two together.
    p2p: from the end of the producer on one rank to the tensor's presence on another.
    """

    fwd: Number | Sequence[Number]
    bwd_input: Number | Sequence[Number]
    bwd_weight: Number | Sequence[Number]
    p2p: Number = 0.0

    def per_stage(self, num_stages: int) -> dict[MetaStepType, tuple[Number, ...]]:
        """Cost by kind of compute step and stage. Raises ScheduleError for a wrong length or what is no cost."""
        fwd, bwd_input, bwd_weight = (self._spread(key, num_stages) for key in ("fwd", "bwd_input", "bwd_weight"))
        if not _is_cost(self.p2p):
            raise ScheduleError(f"costs.p2p={self.p2p!r} must be a finite number of at least 0")
        bwd = tuple(ours + weights for ours, weights in zip(bwd_input, bwd_weight, strict=True))
        return {_T.FWD: fwd, _T.BWD: bwd, _T.BWD_INPUT: bwd_input, _T.BWD_WEIGHT: bwd_weight}

    def _spread(self, key: str, num_stages: int) -> tuple[Number, ...]:
        value = getattr(self, key)
        is_one = isinstance(value, (numbers.Real, str)) or not isinstance(value, Iterable)
        costs = (value,) * num_stages if is_one else tuple(value)
        if len(costs) != num_stages:
            raise ScheduleError(
                f"costs.{key} has {len(costs)} entries for {num_stages} stages; give one each, or a number"
            )
        if not all(map(_is_cost, costs)):
            raise ScheduleError(f"costs.{key}={value!r} must be finite numbers of at least 0")
        return costs


def _is_cost(value: object) -> bool:
    return isinstance(value, numbers.Real) and 0 <= value < math.inf


UNIT_COSTS = Costs(1, 1, 1, 0)
"""Forward, input gradient and weight gradient equally long, communication free."""


@dataclass(frozen=True, slots=True)
class Span:
    """One step that ran on `rank` from `start_s` to `end_s`."""

    rank: int
    step: MetaStep
    start_s: Number
    end_s: Number


@dataclass(frozen=True, slots=True)
class Timeline:
    """When every step of a run began and ended, simulated or measured.

    spans: per rank, its steps in order.
    peak_activations: per rank, the most (stage, micro-batch) activations alive at once if BWD and BWD_INPUT free them.
    peak_activations_until_weight: the same if BWD and BWD_WEIGHT free them.
    name: for captions.
    unit: of its times, for captions and axes: "s" if measured, none where costs have none.
    """

    spans: tuple[tuple[Span, ...], ...]
    peak_activations: tuple[int, ...]
    peak_activations_until_weight: tuple[int, ...]
    name: str = "measured"
    unit: str = ""

    @classmethod
    def from_spans(cls, spans: Iterable[Span | tuple[int, MetaStep, float, float]], name: str = "measured") -> Timeline:
        """A timeline of measured events `(rank, step, start_s, end_s)`, in seconds of one clock, in any order."""
        events = [span if isinstance(span, Span) else Span(*span) for span in spans]
        rows: list[list[Span]] = [[] for _ in range(1 + max((span.rank for span in events), default=-1))]
        for span in events:
            rows[span.rank].append(span)
        for row in rows:
            row.sort(key=lambda span: (span.start_s, span.end_s))
        return replace(cls._of_rows(rows, name), unit="s")

    @classmethod
    def _of_rows(cls, rows: list[list[Span]], name: str) -> Timeline:
        orders = [[span.step for span in row] for row in rows]
        return cls(
            tuple(map(tuple, rows)),
            tuple(peak_live(order, until_weight=False) for order in orders),
            tuple(peak_live(order, until_weight=True) for order in orders),
            name,
        )

    @property
    def start_s(self) -> Number:
        return min((row[0].start_s for row in self.spans if row), default=0)

    @property
    def total_s(self) -> Number:
        """From the first start on any rank to the last end on any rank."""
        return max((span.end_s for row in self.spans for span in row), default=0) - self.start_s

    @property
    def busy_s(self) -> tuple[Number, ...]:
        """Per rank, time spent in forward and backward steps."""
        return tuple(sum(span.end_s - span.start_s for span in row if span.step.computes) for row in self.spans)

    @property
    def bubble_s(self) -> tuple[Number, ...]:
        """Per rank, time of the whole run in which it does not compute."""
        total_s = self.total_s
        return tuple(total_s - busy_s for busy_s in self.busy_s)

    @property
    def local_bubble_s(self) -> tuple[Number, ...]:
        """Per rank, time between its first and its last compute step in which it does not compute."""
        bubbles = []
        for row, busy_s in zip(self.spans, self.busy_s, strict=True):
            computes = [span for span in row if span.step.computes]
            bubbles.append(computes[-1].end_s - computes[0].start_s - busy_s if computes else 0)
        return tuple(bubbles)

    @property
    def total_bubble_s(self) -> Number:
        """Bubble of all ranks together."""
        return sum(self.bubble_s)

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time that is bubble, 0 to 1."""
        rank_time_s = self.total_s * len(self.spans)
        return float(self.total_bubble_s / rank_time_s) if rank_time_s else 0.0


def peak_live(order: Iterable[MetaStep], *, until_weight: bool) -> int:
    """The most activations of one rank's `order` alive at once, released at BWD and at BWD_INPUT or BWD_WEIGHT.

    A swapped activation counts as absent from SWAP_WAIT_OFFLOAD to SWAP_LAUNCH_LOAD.
    """
    releases = {_T.BWD, _T.BWD_WEIGHT if until_weight else _T.BWD_INPUT, _T.SWAP_WAIT_OFFLOAD}
    acquires = {_T.FWD, _T.SWAP_LAUNCH_LOAD}
    live = peak = 0
    for step in order:
        for part in step.computes or (step,):
            if part.meta_type in acquires:
                live += 1
                peak = max(peak, live)
            elif part.meta_type in releases:
                live -= 1
    return peak


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Run `schedule` on paper.

    An OVERLAP step starts when both parts can, lasts as long as both, and hands on both results at its end.
    Raises ScheduleError if the orders can't run to their end, naming the input that no step makes, or the steps that
        wait for each other.
    """
    return _Simulation(schedule, costs, split_overlaps=False).run()


def simulate_split(schedule: Schedule, costs: Costs) -> Timeline:
    """Like `simulate`, except that the first part of an OVERLAP step hands its result on when it ends itself."""
    return _Simulation(schedule, costs, split_overlaps=True).run()


Value = tuple[bool, int, int]
"""What a step makes: (is it a gradient, stage that made it, micro-batch)."""


def inputs_of(part: MetaStep, num_stages: int) -> tuple[Value, ...]:
    """Values that a forward or backward step needs, what its own stage made before included."""
    stage, micro = part.stage_index, part.micro_index
    if part.meta_type is _T.FWD:
        return ((False, stage - 1, micro),) if stage > 0 else ()
    if part.meta_type is _T.BWD_WEIGHT:
        return ((True, stage, micro),)
    if stage + 1 < num_stages:
        return ((False, stage, micro), (True, stage + 1, micro))
    return ((False, stage, micro),)


def result_of(part: MetaStep) -> Value | None:
    """The value that a forward or backward step makes for others; None for BWD_WEIGHT."""
    if part.meta_type is _T.BWD_WEIGHT:
        return None
    return (part.meta_type in BACKWARD_TYPES, part.stage_index, part.micro_index)


class _Simulation:
    """State of one run: per rank a clock and a position, per value its time, and who waits for it."""

    def __init__(self, schedule: Schedule, costs: Costs, *, split_overlaps: bool) -> None:
        self.schedule = schedule
        self.costs = costs.per_stage(schedule.num_stages)
        self.p2p = costs.p2p
        self.split_overlaps = split_overlaps
        self.made_at: dict[Value, Number] = {}
        self.waiters: dict[Value, list[int]] = {}
        self.clock: list[Number] = [0] * schedule.pp_size
        self.spans: list[list[Span]] = [[] for _ in range(schedule.pp_size)]

    def run(self) -> Timeline:
        runnable = list(range(self.schedule.pp_size))[::-1]
        while runnable:
            self._advance(runnable.pop(), runnable)
        stuck = [rank for rank, order in enumerate(self.schedule.orders) if len(self.spans[rank]) < len(order)]
        if stuck:
            raise UnrunnableScheduleError(self.schedule.name, self._why_stuck(stuck))
        return Timeline._of_rows(self.spans, self.schedule.name)

    def _advance(self, rank: int, runnable: list[int]) -> None:
        """Run steps of `rank` until one lacks an input; ranks that waited for what it made become runnable."""
        spans, order = self.spans[rank], self.schedule.orders[rank]
        while len(spans) < len(order):
            step = order[len(spans)]
            parts = step.computes
            start = self.clock[rank]
            for part in parts:
                for value in inputs_of(part, self.schedule.num_stages):
                    made_at = self.made_at.get(value)
                    if made_at is None:
                        self.waiters.setdefault(value, []).append(rank)
                        return
                    if self.p2p and self.schedule.rank_of_stage[value[1]] != rank:
                        made_at += self.p2p
                    start = max(start, made_at)
            ends, end = [], start
            for part in parts:
                end += self.costs[part.meta_type][part.stage_index]
                ends.append(end)
            spans.append(Span(rank, step, start, end))
            self.clock[rank] = end
            for part, part_end in zip(parts, ends, strict=True):
                self._publish(part, part_end if self.split_overlaps else end, runnable)

    def _why_stuck(self, stuck: list[int]) -> str:
        """The input that no step makes, if there is one; else the cycle of ranks that wait for each other."""
        made_by = {
            result_of(part): (rank, position)
            for rank, order in enumerate(self.schedule.orders)
            for position, step in enumerate(order)
            for part in step.computes
        }
        orders = self.schedule.orders

        def at(rank: int, position: int) -> str:
            return f"rank {rank} step {position} {orders[rank][position]}"

        waits_for: dict[int, tuple[int, int]] = {}
        for rank in stuck:
            position = len(self.spans[rank])
            needed = [
                value for part in orders[rank][position].computes for value in inputs_of(part, self.schedule.num_stages)
            ]
            missing = next(value for value in needed if value not in self.made_at)
            if missing not in made_by:
                is_gradient, stage, micro = missing
                kind = "backward" if is_gradient else "forward"
                return (
                    f"{at(rank, position)} needs the {kind} of stage {stage}, micro-batch {micro}, which no rank runs"
                )
            waits_for[rank] = made_by[missing]
        rank, path = stuck[0], []
        while rank not in path:
            path.append(rank)
            rank = waits_for[rank][0]
        text = "deadlock: " + at(rank, len(self.spans[rank]))
        for waiting in path[path.index(rank) :]:
            blocker, position = waits_for[waiting]
            ahead = at(blocker, len(self.spans[blocker]))
            text += f" waits for {at(blocker, position)}, which stands behind {ahead}, which"
        return text.removesuffix(", which")

    def _publish(self, part: MetaStep, end: Number, runnable: list[int]) -> None:
        value = result_of(part)
        if value is not None:
            self.made_at[value] = end
            runnable.extend(self.waiters.pop(value, ()))
