"""Placing sends and receives: `add_p2p`, `add_data_steps`, `coalesce_p2p`, `attach_fwd_boundary_p2p`.

No torch. The order of sends and receives is what deadlocks are made of, so it is not left to each rank: all transfers
and compute steps are put on one time axis (a simulation with unit costs), and every rank's order is its part of that
axis. On one axis a transfer is a single event of both its ranks, so even a backend that blocks the whole rank in every
send and receive can follow it, and both ends of a channel agree on its order.

Runs of neighbouring transfers may then go as one batch. That can't deadlock either: give each batch the place of its
last member on the axis; whatever a batch waits for stands behind batches with smaller places.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby

from hp_train.errors import ScheduleError, UnrunnableScheduleError
from hp_train.schedule.simulate import UNIT_COSTS, Number, Span, result_of, simulate, simulate_split
from hp_train.schedule.steps import (
    BACKWARD_TYPES,
    DATA_TYPES,
    OVERLAP_TYPES,
    P2P_TYPES,
    MetaStep,
    MetaStepType,
    Schedule,
)

_T = MetaStepType
_STAGE_P2P = P2P_TYPES - DATA_TYPES
_Key = tuple[object, ...]
"""A place on the axis: (time, class, ...) with class -1 for loading data, 0 for transfers, 1 for compute steps."""


@dataclass(frozen=True, slots=True)
class _Transfer:
    """One tensor on its way between ranks, leaving at `time`."""

    send: MetaStep
    receive: MetaStep
    time: Number

    @property
    def key(self) -> _Key:
        return (self.time, 0, self.send.meta_type.value, self.send.stage_index, self.send.micro_index)


def add_p2p(schedule: Schedule) -> Schedule:
    """Add the send and the receive of every activation and gradient that crosses ranks; none within a rank.

    Raises ScheduleError if the schedule has such steps already or its compute steps can't run in their orders.
    """
    if schedule.has_any(_STAGE_P2P):
        raise ScheduleError(f"{schedule.name}: has sends and receives already")
    _refuse_repeats(schedule)
    axis = _Axis(schedule, split_overlaps=False)
    return axis.insert(axis.stage_transfers)


def _refuse_repeats(schedule: Schedule) -> None:
    """Raise UnrunnableScheduleError if something is computed twice: it would be sent twice as well."""
    made: dict[object, str] = {}
    for rank, order in enumerate(schedule.orders):
        for position, step in enumerate(order):
            for part in step.computes:
                results = [result_of(part)]
                if part.meta_type in (_T.BWD, _T.BWD_WEIGHT):
                    results.append(("weights", part.stage_index, part.micro_index))
                for result in results:
                    here = f"rank {rank} step {position} {step}"
                    if result is not None and result in made:
                        raise UnrunnableScheduleError(
                            schedule.name, f"{here} computes what {made[result]} has computed"
                        )
                    made[result] = here


def add_data_steps(schedule: Schedule) -> Schedule:
    """Load each micro-batch on the first stage's rank, just before its forward; carry its targets to the last stage.

    DATA_SEND has stage 0, DATA_RECV the last stage; neither exists if one rank holds both. Goes before coalescing.
    Raises ScheduleError if data steps are there already or the order of sends and receives is not one of `add_p2p`.
    """
    if schedule.has_any(DATA_TYPES):
        raise ScheduleError(f"{schedule.name}: has data steps already")
    axis = _Axis(schedule, split_overlaps=False)
    if not axis.is_followed:
        raise ScheduleError(f"{schedule.name}: orders its sends and receives its own way; place its data steps by hand")
    first_rank = schedule.rank_of_stage[0]
    loads = [
        (first_rank, (time, -1, micro), MetaStep(micro, _T.DATA_LOAD, 0)) for micro, time in axis.first_forwards.items()
    ]
    return axis.insert(axis.data_transfers, loads)


class _Axis:
    """The time axis of a schedule: its steps with their places, and the transfers that its computes imply."""

    def __init__(self, schedule: Schedule, *, split_overlaps: bool) -> None:
        self.schedule = schedule
        self.stage_transfers: list[_Transfer] = []
        self.data_transfers: list[_Transfer] = []
        self.first_forwards: dict[int, Number] = {}
        timeline = (simulate_split if split_overlaps else simulate)(schedule, UNIT_COSTS)
        for row in timeline.spans:
            for span in row:
                self._collect(span, split_overlaps)
        key_of_p2p = {}
        for transfer in self.stage_transfers + self.data_transfers:
            key_of_p2p[transfer.send] = key_of_p2p[transfer.receive] = transfer.key
        self.rows = [self._placed(row, key_of_p2p) for row in timeline.spans]

    @property
    def is_followed(self) -> bool:
        """Whether the schedule's orders, sends and receives included, go along the axis."""
        return all(earlier[0] <= later[0] for row in self.rows for earlier, later in zip(row, row[1:], strict=False))

    def insert(self, transfers: list[_Transfer], local: Iterable[tuple[int, _Key, MetaStep]] = ()) -> Schedule:
        """The schedule with these transfers, and `(rank, key, step)` of `local`, at their places."""
        rows = [list(row) for row in self.rows]
        for transfer in transfers:
            rows[self.schedule.rank_of_stage[transfer.send.stage_index]].append((transfer.key, transfer.send))
            rows[self.schedule.rank_of_stage[transfer.receive.stage_index]].append((transfer.key, transfer.receive))
        for rank, key, step in local:
            rows[rank].append((key, step))
        return self.schedule.with_orders([step for _, step in sorted(row, key=lambda item: item[0])] for row in rows)

    def _collect(self, span: Span, split_overlaps: bool) -> None:
        """Note what leaves the rank with this step, and when the first stage starts a micro-batch."""
        parts = span.step.computes
        for part in parts:
            time = span.end_s
            if split_overlaps and len(parts) == 2 and part is parts[0]:
                time = span.start_s + _first_part_cost(span.step)
            stage, micro, ranks = part.stage_index, part.micro_index, self.schedule.rank_of_stage
            last = self.schedule.num_stages - 1
            if part.meta_type is _T.FWD:
                if stage == 0:
                    self.first_forwards[micro] = span.start_s
                    if ranks[0] != ranks[last]:
                        send, receive = MetaStep(micro, _T.DATA_SEND, 0), MetaStep(micro, _T.DATA_RECV, last)
                        self.data_transfers.append(_Transfer(send, receive, span.start_s))
                if stage < last and ranks[stage + 1] != ranks[stage]:
                    send, receive = MetaStep(micro, _T.FWD_SEND, stage), MetaStep(micro, _T.FWD_RECV, stage + 1)
                    self.stage_transfers.append(_Transfer(send, receive, time))
            elif part.meta_type in BACKWARD_TYPES and stage > 0 and ranks[stage - 1] != ranks[stage]:
                send, receive = MetaStep(micro, _T.BWD_SEND, stage), MetaStep(micro, _T.BWD_RECV, stage - 1)
                self.stage_transfers.append(_Transfer(send, receive, time))

    def _placed(self, row: tuple[Span, ...], key_of_p2p: dict[MetaStep, _Key]) -> list[tuple[_Key, MetaStep]]:
        placed: list[tuple[_Key, MetaStep]] = []
        key: _Key = (-1,)
        for span in row:
            step = span.step
            if step.computes:
                key = (span.start_s, 1)
            elif step.meta_type is _T.DATA_LOAD and step.micro_index in self.first_forwards:
                key = (self.first_forwards[step.micro_index], -1, step.micro_index)
            elif step in key_of_p2p:
                key = key_of_p2p[step]
            # Any other kind stays behind the step that it follows: same key, and sorting is stable.
            placed.append((key, step))
        return placed


def _first_part_cost(step: MetaStep) -> int:
    """How long the first part of an OVERLAP step takes at UNIT_COSTS, where BWD is two halves."""
    return 2 if step.sub_steps[0].meta_type is _T.BWD else 1


def coalesce_p2p(schedule: Schedule) -> Schedule:
    """Make one BATCH_SEND_RECV of each run of sends and receives.

    Lone ones become batches too: a backend may carry single and batched operations on different communicators, and
    the two ends of a transfer must agree.
    """
    return schedule.with_orders(_coalesced(order) for order in schedule.orders)


def _coalesced(order: Iterable[MetaStep]) -> list[MetaStep]:
    steps: list[MetaStep] = []
    for is_p2p, run in groupby(order, key=_is_p2p):
        if is_p2p:
            members = tuple(member for step in run for member in step.transfers)
            steps.append(MetaStep(None, _T.BATCH_SEND_RECV, None, members))
        else:
            steps.extend(run)
    return steps


def _is_p2p(step: MetaStep) -> bool:
    return step.meta_type in P2P_TYPES or step.meta_type is _T.BATCH_SEND_RECV


def attach_fwd_boundary_p2p(schedule: Schedule) -> Schedule:
    """Hang the batch that follows a forward on its boundary, and give OVERLAP steps a boundary between their parts.

    What the first part of an OVERLAP step makes leaves at its boundary, while the second part still runs, provided that
    the orders are those of `add_p2p`; a person's own order of sends and receives stays as it is.
    """
    flat = schedule.with_orders(_flattened(order) for order in schedule.orders)
    steps = [step for order in flat.orders for step in order]
    overlaps = any(step.meta_type in OVERLAP_TYPES for step in steps)
    own_boundaries = any(step.boundary_p2p for step in steps)
    if overlaps and not own_boundaries and _Axis(flat, split_overlaps=False).is_followed:
        schedule = _split_at_boundaries(flat)
    return _hang_on_forwards(coalesce_p2p(schedule))


def _flattened(order: Iterable[MetaStep]) -> list[MetaStep]:
    return [
        member
        for step in order
        for member in (step.sub_steps if step.meta_type is _T.BATCH_SEND_RECV else (step,))
    ]  # fmt: skip


def _split_at_boundaries(schedule: Schedule) -> Schedule:
    """Place all transfers anew, on the axis on which first parts of OVERLAP steps hand on when they end."""
    present = {step for order in schedule.orders for step in order if step.meta_type in P2P_TYPES}
    bare = schedule.with_orders([s for s in order if s.meta_type not in P2P_TYPES] for order in schedule.orders)
    axis = _Axis(bare, split_overlaps=True)
    transfers = [transfer for transfer in axis.stage_transfers + axis.data_transfers if transfer.send in present]
    key_of_p2p = {step: transfer.key for transfer in transfers for step in (transfer.send, transfer.receive)}
    orders = []
    for row in _Axis(axis.insert(transfers), split_overlaps=True).rows:
        order: list[MetaStep] = []
        boundary_end: _Key | None = None  # while set, the last step is an OVERLAP whose boundary is still open
        for key, step in row:
            if step.meta_type in OVERLAP_TYPES:
                boundary_end = (key[0] + _first_part_cost(step), 1)
            elif step in key_of_p2p and boundary_end is not None and key < boundary_end:
                carrier = order[-1]
                order[-1] = replace(carrier, boundary_p2p=(*(carrier.boundary_p2p or ()), step))
                continue
            else:
                boundary_end = None
            order.append(step)
        orders.append(order)
    return schedule.with_orders(orders)


def _hang_on_forwards(schedule: Schedule) -> Schedule:
    orders = []
    for order in schedule.orders:
        hung: list[MetaStep] = []
        for step in order:
            carrier = hung[-1] if hung else None
            if step.meta_type is _T.BATCH_SEND_RECV and carrier is not None and carrier.meta_type is _T.FWD:
                hung[-1] = replace(carrier, boundary_p2p=(*(carrier.boundary_p2p or ()), *step.sub_steps))
            else:
                hung.append(step)
        orders.append(hung)
    return schedule.with_orders(orders)
