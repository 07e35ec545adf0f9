"""The proof: whether a lowered schedule can run to its end, on right inputs, under a transport.

No torch. `verify` takes the schedule apart into single steps (`events`), checks what must hold wherever the ranks happen
to be (every step once and in order, tensors sent, received and consumed, parameters and activations in memory when used),
and then, if all of that holds, walks all ranks through their transfers (`progress`). The runtime runs proven
schedules only.
"""

from __future__ import annotations

from dataclasses import dataclass

from hp_train.errors import ScheduleError
from hp_train.schedule.events import Channels, Event, Findings, Slot, collect, consumed_by, is_transfer
from hp_train.schedule.memory_rules import check_parameters, check_swaps
from hp_train.schedule.progress import TRANSPORTS, deadlock_of
from hp_train.schedule.simulate import peak_live
from hp_train.schedule.steps import BACKWARD_TYPES, DATA_TYPES, SEND_TYPES, MetaStep, MetaStepType, Schedule

_T = MetaStepType


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
    recv_buffers: per rank, the most received tensors held at once: from the receive to the BWD or BWD_WEIGHT that uses
        them last.
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
    Raises ScheduleError for an unknown transport; everything wrong with the schedule is a violation instead.
    """
    check_transport(transport)
    shape = _shape_fault(schedule)
    if shape is not None:
        return Verification((f"{shape}",), (), (), ())
    findings = Findings()
    rows, where = collect(schedule, findings)
    _check_computes(schedule, where, findings)
    _check_transfers(schedule, rows, where, findings)
    _check_data(schedule, where, findings)
    check_parameters(schedule, rows, where, findings)
    check_swaps(schedule, where, findings)
    peaks = tuple(peak_live(order, until_weight=False) for order in schedule.orders)
    if max_activations is not None:
        for rank, peak in enumerate(peaks):
            if peak > max_activations:
                findings.add(f"rank {rank} holds up to {peak} activations, more than max_activations={max_activations}")
    if not findings:
        deadlock = deadlock_of(schedule, transport, rows, where)
        if deadlock is not None:
            findings.add(deadlock)
    recv_buffers, stage_buffers = _count_buffers(schedule, rows)
    return Verification(findings.all(), peaks, recv_buffers, stage_buffers)


def _shape_fault(schedule: Schedule) -> str | None:
    """What makes the schedule no schedule at all, if anything."""
    if schedule.num_stages < 1 or schedule.num_microbatches < 1:
        return f"num_stages={schedule.num_stages} and num_microbatches={schedule.num_microbatches} must be at least 1"
    if len(schedule.rank_of_stage) != schedule.num_stages:
        return f"rank_of_stage places {len(schedule.rank_of_stage)} stages of {schedule.num_stages}"
    for stage, rank in enumerate(schedule.rank_of_stage):
        if not 0 <= rank < schedule.pp_size:
            return f"stage {stage} is placed on rank {rank}; there are {schedule.pp_size} ranks"
    for rank, order in enumerate(schedule.orders):
        for position, step in enumerate(order):
            if not isinstance(step, MetaStep):
                return f"rank {rank} step {position} {step!r} is no MetaStep"
    return None


def _check_computes(schedule: Schedule, where: dict[Slot, Event], findings: Findings) -> None:
    """Each stage runs each micro-batch forward and back exactly once and in that order."""
    for stage in range(schedule.num_stages):
        for micro in range(schedule.num_microbatches):
            found = {kind: where.get(Slot(kind, stage, micro)) for kind in (_T.FWD, _T.BWD, _T.BWD_INPUT, _T.BWD_WEIGHT)}
            forward, whole, first_half, second_half = found.values()
            rank = schedule.rank_of_stage[stage]
            if forward is None:
                findings.add(f"rank {rank} never runs {stage}F{micro}")
            if whole is not None and (first_half or second_half):
                findings.add(f"{whole}: {first_half or second_half} runs the same backward again")
            elif whole is None and not (first_half and second_half):
                missing = f"{stage}B{micro}" if not (first_half or second_half) else (
                    f"{stage}I{micro}" if second_half else f"{stage}W{micro}"
                )  # fmt: skip
                findings.add(f"rank {rank} never runs {missing}")
            _check_order(forward, whole or first_half, findings)
            _check_order(first_half, second_half, findings)


def _check_order(earlier: Event | None, later: Event | None, findings: Findings) -> None:
    """Both stand on one rank; what is missing altogether has been reported already."""
    if earlier is not None and later is not None and earlier.index >= later.index:
        findings.add(f"{later} comes before {earlier.step} at step {earlier.position}, which it needs")


def _check_transfers(
    schedule: Schedule, rows: list[list[Event]], where: dict[Slot, Event], findings: Findings
) -> None:
    """Every tensor that crosses ranks is sent once it is made, received before it is used, and in its channel's order."""
    channels = Channels(schedule)
    sends: dict[tuple[int, int], list[Event]] = {}
    receives: dict[tuple[int, int], list[Event]] = {}
    for row in rows:
        for event in row:
            if not is_transfer(event):
                _check_inputs(channels, event, where, findings)
                continue
            transfer = channels.transfer_of(event.step)
            if transfer is None:
                findings.add(f"{event}: no such tensor crosses ranks")
                continue
            is_send = event.step.meta_type in SEND_TYPES
            side = sends if is_send else receives
            side.setdefault((transfer.source, transfer.target), []).append(event)
            if is_send:
                _check_sender(event, where, findings)
            if (transfer.receive if is_send else transfer.send) not in where:
                findings.add(f"{event}: rank {transfer.target if is_send else transfer.source} never "
                             f"{'receives' if is_send else 'sends'} it")  # fmt: skip
    if not findings:
        for channel, sent in sends.items():
            _check_channel(channels, sent, receives[channel], findings)


def _check_inputs(channels: Channels, event: Event, where: dict[Slot, Event], findings: Findings) -> None:
    """What a compute step uses has come before it: over a receive, or from a neighbouring stage of the same rank."""
    step = event.step
    for transfer in consumed_by(channels, step):
        receive = where.get(transfer.receive)
        if receive is not None:
            _check_order(receive, event, findings)
        elif transfer.receive.kind is not _T.DATA_RECV:
            findings.add(f"{event}: its input {_name(transfer.receive)} is never received")
    stage, micro = step.stage_index, step.micro_index
    if step.meta_type is _T.FWD:
        source, kinds = stage - 1, (_T.FWD,)
    elif step.meta_type in BACKWARD_TYPES:
        source, kinds = stage + 1, (_T.BWD, _T.BWD_INPUT)
    else:
        return
    if 0 <= source <= channels.last and channels.schedule.rank_of_stage[source] == event.rank:
        for kind in kinds:
            _check_order(where.get(Slot(kind, source, micro)), event, findings)


def _check_sender(send: Event, where: dict[Slot, Event], findings: Findings) -> None:
    stage, micro = send.step.stage_index, send.step.micro_index
    makers = {
        _T.FWD_SEND: (_T.FWD,),
        _T.BWD_SEND: (_T.BWD, _T.BWD_INPUT),
        _T.DATA_SEND: (_T.DATA_LOAD,),
    }[send.step.meta_type]
    for kind in makers:
        _check_order(where.get(Slot(kind, stage, micro)), send, findings)


def _check_channel(channels: Channels, sent: list[Event], received: list[Event], findings: Findings) -> None:
    """Backends match the n-th send of a channel with its n-th receive, whatever tensors those are."""
    for send, receive in zip(sent, received, strict=True):
        if channels.transfer_of(send.step) != channels.transfer_of(receive.step):
            findings.add(f"{receive} would take what {send} sends: the ranks order this channel differently")
            return


def _check_data(schedule: Schedule, where: dict[Slot, Event], findings: Findings) -> None:
    """If any data step exists: every micro-batch loaded before its first forward, its targets carried to the last stage."""
    if not schedule.has_any(DATA_TYPES):
        return
    last = schedule.num_stages - 1
    crosses = schedule.rank_of_stage[0] != schedule.rank_of_stage[last]
    for micro in range(schedule.num_microbatches):
        load = where.get(Slot(_T.DATA_LOAD, 0, micro))
        if load is None:
            findings.add(f"rank {schedule.rank_of_stage[0]} never runs 0DATA_LOAD{micro}")
        _check_order(load, where.get(Slot(_T.FWD, 0, micro)), findings)
        if crosses and Slot(_T.DATA_RECV, last, micro) not in where:
            findings.add(f"rank {schedule.rank_of_stage[last]} never runs {last}DATA_RECV{micro}")
        if not crosses:
            _check_order(load, where.get(Slot(_T.FWD, last, micro)), findings)
    for slot, event in where.items():
        if slot.kind is _T.DATA_LOAD and slot.stage != 0:
            findings.add(f"{event}: data is loaded for stage 0 only")


def _name(slot: Slot) -> str:
    return f"{slot.stage}{slot.kind.value}{slot.micro}"


def _count_buffers(schedule: Schedule, rows: list[list[Event]]) -> tuple[tuple[int, ...], tuple[StageBuffers, ...]]:
    """Most received tensors held at once, per rank and per stage and direction."""
    kinds = (_T.FWD_RECV, _T.BWD_RECV)
    most = {(kind, stage): 0 for kind in kinds for stage in range(schedule.num_stages)}
    rank_most = []
    for row in rows:
        held: dict[tuple[MetaStepType, int], set[int]] = {key: set() for key in most}
        num_held = peak = 0
        for event in row:
            step = event.step
            if step.meta_type in kinds and step.stage_index < schedule.num_stages:
                mine = held[step.meta_type, step.stage_index]
                num_held += step.micro_index not in mine
                mine.add(step.micro_index)
                key = (step.meta_type, step.stage_index)
                most[key] = max(most[key], len(mine))
                peak = max(peak, num_held)
            elif step.meta_type in (_T.BWD, _T.BWD_WEIGHT) and step.stage_index < schedule.num_stages:
                for kind in kinds:
                    if step.micro_index in held[kind, step.stage_index]:
                        held[kind, step.stage_index].remove(step.micro_index)
                        num_held -= 1
        rank_most.append(peak)
    per_stage = tuple(StageBuffers(most[_T.FWD_RECV, s], most[_T.BWD_RECV, s]) for s in range(schedule.num_stages))
    return tuple(rank_most), per_stage
