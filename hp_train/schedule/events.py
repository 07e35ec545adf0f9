"""A schedule taken apart for the proof: every single step with its place, and the rules of who needs whom.

No torch. Composite steps dissolve into the single steps that run or meet inside them; each keeps the rank and position of
the step that it stands in, and an index that says what comes first within the rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from hp_train.schedule.steps import BACKWARD_TYPES, OVERLAP_TYPES, P2P_TYPES, MetaStep, MetaStepType, Schedule

_T = MetaStepType
MAX_VIOLATIONS = 50
"""Sentences kept per proof; a schedule that is wrong throughout need not say so a million times."""


class Event(NamedTuple):
    """One single step at its place.

    index: grows along the rank; members of one batch or boundary share it, for they have no order among themselves.
    """

    rank: int
    position: int
    index: int
    step: MetaStep

    def __str__(self) -> str:
        return f"rank {self.rank} step {self.position} {self.step}"


class Slot(NamedTuple):
    """What can happen only once in a step of training. micro_index is None for kinds that belong to a stage."""

    kind: MetaStepType
    stage: int
    micro: int | None


def events_of(rank: int, order: tuple[MetaStep, ...]) -> Iterator[Event]:
    """The single steps of one rank in order: first part, boundary, second part of each."""
    for position, step in enumerate(order):
        index = 3 * position
        if step.meta_type in OVERLAP_TYPES:
            yield Event(rank, position, index, step.sub_steps[0])
            for member in step.boundary_p2p or ():
                yield Event(rank, position, index + 1, member)
            yield Event(rank, position, index + 2, step.sub_steps[1])
        elif step.meta_type is _T.BATCH_SEND_RECV:
            for member in step.sub_steps:
                yield Event(rank, position, index, member)
        else:
            yield Event(rank, position, index, step)
            for member in step.boundary_p2p or ():
                yield Event(rank, position, index + 1, member)


@dataclass(slots=True)
class Findings:
    """Violations so far; `add` keeps the first MAX_VIOLATIONS and counts the rest."""

    sentences: list[str] = field(default_factory=list)
    num_dropped: int = 0

    def add(self, sentence: str) -> None:
        if len(self.sentences) < MAX_VIOLATIONS:
            self.sentences.append(sentence)
        else:
            self.num_dropped += 1

    def __bool__(self) -> bool:
        return bool(self.sentences)

    def all(self) -> tuple[str, ...]:
        more = (f"and {self.num_dropped} more",) if self.num_dropped else ()
        return (*self.sentences, *more)


class Transfer(NamedTuple):
    """A tensor that crosses ranks: the slots of its two ends and the ranks that hold them."""

    send: Slot
    receive: Slot
    source: int
    target: int


class Channels:
    """Which transfers a schedule's placement implies, and which one a given send or receive belongs to."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.last = schedule.num_stages - 1

    def transfer_of(self, step: MetaStep) -> Transfer | None:
        """The transfer that a send or receive is an end of; None if no such tensor crosses ranks."""
        kind, stage, micro = step.meta_type, step.stage_index, step.micro_index
        if kind in (_T.FWD_SEND, _T.FWD_RECV):
            sender = stage if kind is _T.FWD_SEND else stage - 1
            return self._between(_T.FWD_SEND, sender, _T.FWD_RECV, sender + 1, micro)
        if kind in (_T.BWD_SEND, _T.BWD_RECV):
            sender = stage if kind is _T.BWD_SEND else stage + 1
            return self._between(_T.BWD_SEND, sender, _T.BWD_RECV, sender - 1, micro)
        if stage != (0 if kind is _T.DATA_SEND else self.last):
            return None
        return self._between(_T.DATA_SEND, 0, _T.DATA_RECV, self.last, micro)

    def _between(
        self, send: MetaStepType, sender: int, receive: MetaStepType, receiver: int, micro: int
    ) -> Transfer | None:
        if not (0 <= sender <= self.last and 0 <= receiver <= self.last):
            return None
        source, target = self.schedule.rank_of_stage[sender], self.schedule.rank_of_stage[receiver]
        if source == target:
            return None
        return Transfer(Slot(send, sender, micro), Slot(receive, receiver, micro), source, target)


def collect(schedule: Schedule, findings: Findings) -> tuple[list[list[Event]], dict[Slot, Event]]:
    """Events per rank, and where each slot stands; what stands twice, out of range or on a wrong rank is a finding."""
    rows: list[list[Event]] = []
    where: dict[Slot, Event] = {}
    for rank, order in enumerate(schedule.orders):
        row = list(events_of(rank, order))
        rows.append(row)
        for event in row:
            step = event.step
            if step.stage_index >= schedule.num_stages:
                findings.add(f"{event}: there are only {schedule.num_stages} stages")
                continue
            if step.micro_index is not None and step.micro_index >= schedule.num_microbatches:
                findings.add(f"{event}: there are only {schedule.num_microbatches} micro-batches")
                continue
            holder = schedule.rank_of_stage[step.stage_index]
            if holder != rank:
                findings.add(f"{event}: stage {step.stage_index} lives on rank {holder}")
                continue
            if step.micro_index is None and step.meta_type is not _T.FSDP_REDUCE_GRAD:
                continue  # unshard and reshard may come many times
            slot = Slot(step.meta_type, step.stage_index, step.micro_index)
            if slot in where:
                findings.add(f"{event} repeats step {where[slot].position}")
            else:
                where[slot] = event
    return rows, where


def is_transfer(event: Event) -> bool:
    return event.step.meta_type in P2P_TYPES


def consumed_by(channels: Channels, step: MetaStep) -> Iterator[Transfer]:
    """The transfers whose tensors a forward or backward step uses; targets reach the forward of the last stage."""
    kinds: tuple[MetaStepType, ...] = ()
    if step.meta_type is _T.FWD:
        kinds = (_T.FWD_RECV, _T.DATA_RECV) if step.stage_index == channels.last else (_T.FWD_RECV,)
    elif step.meta_type in BACKWARD_TYPES:
        kinds = (_T.BWD_RECV,)
    for kind in kinds:
        transfer = channels.transfer_of(MetaStep(step.micro_index, kind, step.stage_index))
        if transfer is not None:
            yield transfer
