"""A schedule taken apart for the proof: every single step with its place, and the rules of who needs whom.

No torch. Composite steps dissolve into the single steps that run or meet inside them; each keeps the rank and position
of the step that it stands in, and an index that says what comes first within the rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from hp_train.schedule.steps import OVERLAP_TYPES, MetaStep, MetaStepType, Schedule

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


Slot = tuple[MetaStepType, int, int | None]
"""What can happen only once in a step of training: kind, stage, micro-batch (None for kinds that belong to a stage)."""


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


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """One way between two stages on different ranks that a tensor of each micro-batch takes; hashed by identity.

    first: the number of its tensor of micro-batch 0; that of micro-batch m is `first + m`.
    """

    first: int
    send_kind: MetaStepType
    sender: int
    receive_kind: MetaStepType
    receiver: int
    source: int
    target: int

    def send(self, micro: int) -> Slot:
        return (self.send_kind, self.sender, micro)

    def receive(self, micro: int) -> Slot:
        return (self.receive_kind, self.receiver, micro)


class Dissection:
    """A schedule's events and the lookups that every rule of the proof needs.

    rows: per rank its events in order.
    where: the event of each slot, the first if it stands twice.
    kinds: the kinds of single step that occur.
    routes: by kind of send or receive and its stage, the route that it is an end of; absent if no tensor crosses there.
    inputs: by kind of compute step and its stage, the routes whose tensors it uses.

    What stands twice, out of range or on a wrong rank goes to `findings` and takes no further part.
    """

    def __init__(self, schedule: Schedule, findings: Findings) -> None:
        self.schedule = schedule
        self.rows = [list(events_of(rank, order)) for rank, order in enumerate(schedule.orders)]
        self.where: dict[Slot, Event] = {}
        self.kinds: set[MetaStepType] = set()
        self.routes: dict[tuple[MetaStepType, int], Route] = {}
        self._routes: list[Route] = []
        self.inputs: dict[tuple[MetaStepType, int], list[Route]] = {}
        self._lay_routes()
        for row in self.rows:
            for event in row:
                self._enter(event, findings)

    def transfer(self, step: MetaStep) -> Transfer:
        """The transfer that a send or receive is an end of."""
        return self.routes[step.meta_type, step.stage_index].first + step.micro_index

    def ends(self, transfer: Transfer) -> tuple[Event, Event]:
        """A transfer's send and receive."""
        number, micro = divmod(transfer, self.schedule.num_microbatches)
        return self.where[self._routes[number].send(micro)], self.where[self._routes[number].receive(micro)]

    def _lay_routes(self) -> None:
        ranks, last = self.schedule.rank_of_stage, self.schedule.num_stages - 1
        ends = [(_T.FWD_SEND, stage, _T.FWD_RECV, stage + 1, (_T.FWD,)) for stage in range(last)]
        ends += [(_T.BWD_SEND, stage + 1, _T.BWD_RECV, stage, (_T.BWD, _T.BWD_INPUT)) for stage in range(last)]
        ends.append((_T.DATA_SEND, 0, _T.DATA_RECV, last, (_T.FWD,)))
        for send_kind, sender, receive_kind, receiver, consumers in ends:
            if ranks[sender] == ranks[receiver]:
                continue
            first = len(self._routes) * self.schedule.num_microbatches
            route = Route(first, send_kind, sender, receive_kind, receiver, ranks[sender], ranks[receiver])
            self._routes.append(route)
            self.routes[send_kind, sender] = self.routes[receive_kind, receiver] = route
            for consumer in consumers:
                self.inputs.setdefault((consumer, receiver), []).append(route)

    def _enter(self, event: Event, findings: Findings) -> None:
        kind, stage, micro = event.step.meta_type, event.step.stage_index, event.step.micro_index
        self.kinds.add(kind)
        if stage >= self.schedule.num_stages:
            findings.add(f"{event}: there are only {self.schedule.num_stages} stages")
        elif micro is not None and micro >= self.schedule.num_microbatches:
            findings.add(f"{event}: there are only {self.schedule.num_microbatches} micro-batches")
        elif self.schedule.rank_of_stage[stage] != event.rank:
            findings.add(f"{event}: stage {stage} lives on rank {self.schedule.rank_of_stage[stage]}")
        elif micro is not None or kind is _T.FSDP_REDUCE_GRAD:  # unshard and reshard may come many times
            first = self.where.setdefault((kind, stage, micro), event)
            if first is not event:
                findings.add(f"{event} repeats step {first.position}")


Transfer = int
"""One tensor that crosses ranks, by its number: large schedules have hundreds of thousands."""


def slot_text(slot: Slot) -> str:
    """A slot as its step reads in text."""
    kind, stage, micro = slot
    return f"{stage}{kind.value}{'' if micro is None else micro}"
