"""Whether the ranks can all come to their end: rendezvous under each transport, and the cycle if they can't.

No torch. Every rank walks through its stops. At a stop it announces some transfers and then waits until others are
announced by both of their ranks; what it announces and waits for is all that transports differ in:

plain         each send or receive is a stop of its own that announces itself and waits for itself;
batch         all members of a batch are announced together, and the stop ends when all of them have met;
boundary      the same, with batches on the boundaries of steps;
multi_stream  sends and receives announce and go on; a compute step waits for the receives that it consumes.

Each stop is visited a constant number of times per transfer, so the walk is linear in the number of steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hp_train.schedule.events import Channels, Event, Slot, Transfer, consumed_by, is_transfer
from hp_train.schedule.steps import Schedule

TRANSPORTS = ("plain", "batch", "multi_stream", "boundary")


class _Stop(NamedTuple):
    announces: tuple[Transfer, ...]
    waits: tuple[Transfer, ...]
    event: Event


def deadlock_of(schedule: Schedule, transport: str, rows: list[list[Event]], where: dict[Slot, Event]) -> str | None:
    """A sentence with the cycle in which ranks wait for each other, or None if all come to their end.

    rows, where: events of a schedule whose sends and receives are complete, paired and consumed.
    """
    walk = _Walk([list(_stops(schedule, transport, row, where)) for row in rows])
    walk.run()
    if all(walk.has_ended(rank) for rank in range(schedule.pp_size)):
        return None
    return _describe_cycle(walk, where)


def _stops(schedule: Schedule, transport: str, row: list[Event], where: dict[Slot, Event]) -> Iterator[_Stop]:
    channels = Channels(schedule)
    if transport == "multi_stream":
        for event in row:
            if is_transfer(event):
                yield _Stop((channels.transfer_of(event.step),), (), event)
            else:
                needs = tuple(transfer for transfer in consumed_by(channels, event.step) if transfer.receive in where)
                if needs:
                    yield _Stop((), needs, event)
        return
    batch: list[Transfer] = []
    for number, event in enumerate(row):
        if not is_transfer(event):
            continue
        batch.append(channels.transfer_of(event.step))
        following = row[number + 1] if number + 1 < len(row) else None
        joins = following is not None and following.index == event.index and is_transfer(following)
        if transport == "plain" or not joins:
            yield _Stop(tuple(batch), tuple(batch), event)
            batch = []


class _Walk:
    """Per rank the stop that it stands at; per transfer how many of its two ends have been announced."""

    def __init__(self, stops: list[list[_Stop]]) -> None:
        self.stops = stops
        self.at = [0] * len(stops)
        self.has_announced = [False] * len(stops)
        self.ends: dict[Transfer, int] = {}
        self.sleepers: dict[Transfer, list[int]] = {}

    def has_ended(self, rank: int) -> bool:
        return self.at[rank] == len(self.stops[rank])

    def run(self) -> None:
        awake = list(range(len(self.stops)))[::-1]
        while awake:
            rank = awake.pop()
            while not self.has_ended(rank):
                stop = self.stops[rank][self.at[rank]]
                if not self.has_announced[rank]:
                    self.has_announced[rank] = True
                    for transfer in stop.announces:
                        self.ends[transfer] = self.ends.get(transfer, 0) + 1
                        if self.ends[transfer] == 2:
                            awake.extend(self.sleepers.pop(transfer, ()))
                missing = self.first_missing(rank)
                if missing is not None:
                    self.sleepers.setdefault(missing, []).append(rank)
                    break
                self.at[rank] += 1
                self.has_announced[rank] = False

    def first_missing(self, rank: int) -> Transfer | None:
        """The first transfer that `rank` waits for at its stop and whose other end is not announced."""
        for transfer in self.stops[rank][self.at[rank]].waits:
            if self.ends.get(transfer, 0) < 2:
                return transfer
        return None


def _describe_cycle(walk: _Walk, where: dict[Slot, Event]) -> str:
    """Follow who waits for whom until a rank comes round again."""
    rank = next(rank for rank in range(len(walk.stops)) if not walk.has_ended(rank))
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        rank = _missing_end(walk, rank, where).rank
    cycle = path[path.index(rank) :]
    text = f"deadlock: {_waiting_end(walk, cycle[0], where)}"
    for waiting, blocker in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        missing = _missing_end(walk, waiting, where)
        text += f" waits for {missing}, which stands behind {_waiting_end(walk, blocker, where)}, which"
    return text.removesuffix(", which")


def _waiting_end(walk: _Walk, rank: int, where: dict[Slot, Event]) -> Event:
    """The step that holds `rank` up: its own end of a transfer, or the compute step that consumes one."""
    stop = walk.stops[rank][walk.at[rank]]
    transfer = walk.first_missing(rank)
    if not stop.announces:
        return stop.event
    return where[transfer.send if transfer.source == rank else transfer.receive]


def _missing_end(walk: _Walk, rank: int, where: dict[Slot, Event]) -> Event:
    """What `rank` waits for: the end of a transfer that its peer has not come to."""
    transfer = walk.first_missing(rank)
    return where[transfer.receive if transfer.source == rank else transfer.send]
