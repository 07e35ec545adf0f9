"""The proof: whether a lowered schedule can run to its end, on right inputs, under a transport.

No torch. `verify` takes the schedule apart into single steps (`events`), checks what must hold wherever the ranks
happen to be (every step once and in order, tensors sent, received and consumed, parameters and activations in memory
when used), and then, if all of that holds, walks all ranks through their transfers (`progress`). The runtime runs
proven schedules only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hp_train.errors import ScheduleError
from hp_train.schedule.events import Dissection, Event, Findings, Route, slot_text
from hp_train.schedule.memory_rules import check_parameters, check_swaps
from hp_train.schedule.progress import TRANSPORTS, deadlock_of
from hp_train.schedule.simulate import peak_live
from hp_train.schedule.steps import COMPUTE_TYPES, DATA_TYPES, P2P_TYPES, SEND_TYPES, MetaStep, MetaStepType, Schedule

_T = MetaStepType
_FORWARD = (_T.FWD,)
_BACKWARDS = (_T.BWD, _T.BWD_INPUT)
_MAKERS = {_T.FWD_SEND: _FORWARD, _T.BWD_SEND: _BACKWARDS, _T.DATA_SEND: (_T.DATA_LOAD,)}
"""The kinds whose result each kind of send takes along."""


@dataclass(frozen=True, slots=True)
class StageBuffers:
    """Receive buffers that one stage needs at once, for activations (`fwd`) and for gradients (`bwd`)."""

    fwd: int
    bwd: int


@dataclass(frozen=True, slots=True)
class Verification:
    """Outcome of `verify`.

    violations: one readable sentence each; empty when proven.
    peak_activations: per rank, the most activations alive at once, released at BWD or BWD_INPUT, swapped ones absent.
    recv_buffers: per rank, the most receive buffers in use at once: from the receive to the BWD or BWD_WEIGHT that
        uses it last, and, wherever the schedule's own receives do not run ahead, one into which the next tensor comes
        while the stage works on the one before.
    stage_buffers: the same per stage and direction.
    """

    violations: tuple[str, ...]
    peak_activations: tuple[int, ...]
    recv_buffers: tuple[int, ...]
    stage_buffers: tuple[StageBuffers, ...]

    @property
    def ok(self) -> bool:
        return not self.violations


def check_transport(transport: str) -> None:
    """Raise ScheduleError unless `transport` is one of TRANSPORTS."""
    if transport not in TRANSPORTS:
        raise ScheduleError(f"transport {transport!r} is unknown; use one of {', '.join(TRANSPORTS)}")


def verify(schedule: Schedule, transport: str, *, max_activations: int | None = None) -> Verification:
    """Prove that `schedule` runs under `transport`, or say why not.

    max_activations: bound on every rank's peak_activations; None for no bound.
    Raises ScheduleError for an unknown transport or a bound that is none; everything wrong with the schedule is a
    violation instead.
    """
    check_transport(transport)
    if max_activations is not None and (type(max_activations) is not int or max_activations < 0):
        raise ScheduleError(f"max_activations={max_activations!r} must be an integer of at least 0")
    shape = shape_fault(schedule)
    if shape is not None:
        return Verification((shape,), (), (), ())
    findings = Findings()
    parts = Dissection(schedule, findings)
    _check_computes(parts, findings)
    _check_transfers(parts, findings)
    _check_data(parts, findings)
    check_parameters(parts, findings)
    check_swaps(parts, findings)
    peaks = tuple(peak_live(order, until_weight=False) for order in schedule.orders)
    if max_activations is not None:
        for rank, peak in enumerate(peaks):
            if peak > max_activations:
                findings.add(f"rank {rank} holds up to {peak} activations, more than max_activations={max_activations}")
    if not findings:
        deadlock = deadlock_of(parts, transport)
        if deadlock is not None:
            findings.add(deadlock)
    recv_buffers, stage_buffers = _count_buffers(schedule, parts.rows)
    return Verification(findings.all(), peaks, recv_buffers, stage_buffers)


def shape_fault(schedule: Schedule) -> str | None:
    """What makes the schedule no schedule at all, if anything: sizes that do not fit together, steps that are none."""
    if schedule.num_stages < 1 or schedule.num_microbatches < 1:
        return f"num_stages={schedule.num_stages} and num_microbatches={schedule.num_microbatches} must be at least 1"
    if len(schedule.rank_of_stage) != schedule.num_stages:
        return f"rank_of_stage places {len(schedule.rank_of_stage)} stages of {schedule.num_stages}"
    for stage, rank in enumerate(schedule.rank_of_stage):
        if not 0 <= rank < schedule.pp_size:
            return f"stage {stage} is placed on rank {rank}; there are {schedule.pp_size} ranks"
    idle = sorted(set(range(schedule.pp_size)) - set(schedule.rank_of_stage))
    if idle:
        return f"rank {idle[0]} holds no stage; every rank needs one"
    for rank, order in enumerate(schedule.orders):
        for position, step in enumerate(order):
            if not isinstance(step, MetaStep):
                return f"rank {rank} step {position} {step!r} is no MetaStep"
    return None


def _check_computes(parts: Dissection, findings: Findings) -> None:
    """Each stage runs each micro-batch forward and back exactly once and in that order."""
    where = parts.where
    for stage, rank in enumerate(parts.schedule.rank_of_stage):
        for micro in range(parts.schedule.num_microbatches):
            forward = where.get((_T.FWD, stage, micro))
            whole = where.get((_T.BWD, stage, micro))
            first_half = where.get((_T.BWD_INPUT, stage, micro))
            second_half = where.get((_T.BWD_WEIGHT, stage, micro))
            if forward is None:
                findings.add(f"rank {rank} never runs {stage}F{micro}")
            if whole is not None and (first_half or second_half):
                findings.add(f"{whole}: {first_half or second_half} runs the same backward again")
            elif whole is None and first_half is None and second_half is None:
                findings.add(f"rank {rank} never runs {stage}B{micro}")
            elif whole is None and first_half is None:
                findings.add(f"rank {rank} never runs {stage}I{micro}")
            elif whole is None and second_half is None:
                findings.add(f"rank {rank} never runs {stage}W{micro}")
            _check_order(forward, whole or first_half, findings)
            _check_order(first_half, second_half, findings)


def _check_order(earlier: Event | None, later: Event | None, findings: Findings) -> None:
    """Both stand on one rank; what is missing altogether has been reported already."""
    if earlier is not None and later is not None and earlier.index >= later.index:
        findings.add(f"{later} comes before {earlier.step} at step {earlier.position}, which it needs")


def _check_transfers(parts: Dissection, findings: Findings) -> None:
    """Every tensor that crosses ranks is sent once made, received before it is used, and in its channel's order."""
    sent: dict[tuple[int, int], list[Event]] = {}
    received: dict[tuple[int, int], list[Event]] = {}
    for row in parts.rows:
        for event in row:
            step = event.step
            if step.meta_type in COMPUTE_TYPES:
                _check_inputs(parts, event, findings)
                continue
            if step.meta_type not in P2P_TYPES:
                continue
            route = parts.routes.get((step.meta_type, step.stage_index))
            if route is None:
                findings.add(f"{event}: no such tensor crosses ranks")
            elif step.meta_type in SEND_TYPES:
                sent.setdefault((route.source, route.target), []).append(event)
                _check_send(parts, event, route, findings)
            else:
                received.setdefault((route.source, route.target), []).append(event)
                if route.send(step.micro_index) not in parts.where:
                    findings.add(f"{event}: rank {route.source} never sends it")
    if not findings:  # else the two ends of a channel need not even be equally many
        for channel, sends in sent.items():
            _check_channel(parts, sends, received[channel], findings)


def _check_inputs(parts: Dissection, event: Event, findings: Findings) -> None:
    """What a compute step uses has come before it: over a receive, or from a neighbouring stage of the same rank."""
    kind, stage, micro = event.step.meta_type, event.step.stage_index, event.step.micro_index
    for route in parts.inputs.get((kind, stage), ()):
        receive = parts.where.get(route.receive(micro))
        if receive is not None:
            _check_order(receive, event, findings)
        elif route.receive_kind is not _T.DATA_RECV:
            findings.add(f"{event}: its input {slot_text(route.receive(micro))} is never received")
    if kind is _T.BWD_WEIGHT:
        return
    source, makers = (stage - 1, _FORWARD) if kind is _T.FWD else (stage + 1, _BACKWARDS)
    ranks = parts.schedule.rank_of_stage
    if 0 <= source < len(ranks) and ranks[source] == event.rank:
        for maker in makers:
            _check_order(parts.where.get((maker, source, micro)), event, findings)


def _check_send(parts: Dissection, send: Event, route: Route, findings: Findings) -> None:
    """A send has its receive, and what it sends is made before it."""
    stage, micro = send.step.stage_index, send.step.micro_index
    if route.receive(micro) not in parts.where:
        findings.add(f"{send}: rank {route.target} never receives it")
    for maker in _MAKERS[route.send_kind]:
        _check_order(parts.where.get((maker, stage, micro)), send, findings)


def _check_channel(parts: Dissection, sends: list[Event], receives: list[Event], findings: Findings) -> None:
    """Backends match the n-th send of a channel with its n-th receive, whatever tensors those are."""
    for send, receive in zip(sends, receives, strict=True):
        if parts.transfer(send.step) != parts.transfer(receive.step):
            findings.add(f"{receive} would take what {send} sends: the ranks order this channel differently")
            return


def _check_data(parts: Dissection, findings: Findings) -> None:
    """If any data step exists: each micro-batch is loaded before its forward, its targets carried to the last stage."""
    if parts.kinds.isdisjoint(DATA_TYPES):
        return
    where, ranks = parts.where, parts.schedule.rank_of_stage
    last = len(ranks) - 1
    for micro in range(parts.schedule.num_microbatches):
        load = where.get((_T.DATA_LOAD, 0, micro))
        if load is None:
            findings.add(f"rank {ranks[0]} never runs 0DATA_LOAD{micro}")
        _check_order(load, where.get((_T.FWD, 0, micro)), findings)
        if ranks[0] == ranks[last]:
            _check_order(load, where.get((_T.FWD, last, micro)), findings)
        elif (_T.DATA_RECV, last, micro) not in where:
            findings.add(f"rank {ranks[last]} never runs {last}DATA_RECV{micro}")
    for (kind, stage, _), event in where.items():
        if kind is _T.DATA_LOAD and stage != 0:
            findings.add(f"{event}: data is loaded for stage 0 only")


def _count_buffers(schedule: Schedule, rows: list[list[Event]]) -> tuple[tuple[int, ...], tuple[StageBuffers, ...]]:
    """Most receive buffers in use at once, per rank and per stage and direction."""
    most: dict[tuple[MetaStepType, int], int] = {}
    rank_most = []
    for row in rows:
        to_use = Counter(
            (event.step.meta_type, event.step.stage_index)
            for event in row
            if event.step.meta_type in (_T.FWD_RECV, _T.BWD_RECV)
        )
        pools = {key: _Pool(num_to_use) for key, num_to_use in to_use.items()}
        needed = peak = sum(pool.needed for pool in pools.values())
        for event in row:
            kind, stage, micro = event.step.meta_type, event.step.stage_index, event.step.micro_index
            for receive, change in _BUFFER_CHANGES.get(kind, ()):
                pool = pools.get((receive, stage))
                if pool is not None:
                    needed -= pool.needed
                    change(pool, micro)
                    pool.count()
                    needed += pool.needed
                    peak = max(peak, needed)
        rank_most.append(peak)
        most |= {key: pool.most for key, pool in pools.items()}
    per_stage = tuple(
        StageBuffers(most.get((_T.FWD_RECV, s), 0), most.get((_T.BWD_RECV, s), 0)) for s in range(schedule.num_stages)
    )
    return tuple(rank_most), per_stage


class _Pool:
    """The receive buffers of one stage and direction, while walking along its rank.

    needed: buffers for what has been received, or for what is in use and one more, if there is more to come.
    most: the highest `needed` so far.
    """

    __slots__ = ("_in_use", "_num_to_use", "_received", "most", "needed")

    def __init__(self, num_to_use: int) -> None:
        self._num_to_use = num_to_use
        self._received: set[int] = set()
        self._in_use: set[int] = set()
        self.needed = self.most = 1

    def count(self) -> None:
        """Bring `needed` and `most` up to date with what has changed."""
        self.needed = max(len(self._received), len(self._in_use) + (self._num_to_use > 0))
        self.most = max(self.most, self.needed)

    def receive(self, micro: int) -> None:
        self._received.add(micro)

    def use(self, micro: int) -> None:
        self._in_use.add(micro)
        self._num_to_use -= 1

    def release(self, micro: int) -> None:
        self._received.discard(micro)
        self._in_use.discard(micro)


_BUFFER_CHANGES = {
    _T.FWD_RECV: ((_T.FWD_RECV, _Pool.receive),),
    _T.BWD_RECV: ((_T.BWD_RECV, _Pool.receive),),
    _T.FWD: ((_T.FWD_RECV, _Pool.use),),
    _T.BWD_INPUT: ((_T.BWD_RECV, _Pool.use),),
    _T.BWD: ((_T.BWD_RECV, _Pool.use), (_T.BWD_RECV, _Pool.release), (_T.FWD_RECV, _Pool.release)),
    _T.BWD_WEIGHT: ((_T.BWD_RECV, _Pool.release), (_T.FWD_RECV, _Pool.release)),
}
"""What each kind of step does to which pools of its stage, in order."""
