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

from hp_train.schedule.events import Dissection, Event, Transfer
from hp_train.schedule.steps import P2P_TYPES

TRANSPORTS = ("plain", "batch", "multi_stream", "boundary")


class _Stop(NamedTuple):
    announces: tuple[Transfer, ...]
    waits: tuple[Transfer, ...]
    event: Event


def deadlock_of(parts: Dissection, transport: str) -> str | None:
    """A sentence with the cycle in which ranks wait for each other, or None if all come to their end.

    parts: a schedule whose sends and receives are complete, paired, consumed and in the same order at both ends.
    """
    stops_of = _stops_beside_compute if transport == "multi_stream" else _stops_in_turn
    walk = _Walk([list(stops_of(parts, row, transport)) for row in parts.rows])
    walk.run()
    if all(walk.has_ended(rank) for rank in range(len(parts.rows))):
        return None
    return _describe_cycle(walk, parts)


def _stops_beside_compute(parts: Dissection, row: list[Event], transport: str) -> Iterator[_Stop]:
    for event in row:
        step = event.step
        if step.meta_type in P2P_TYPES:
            yield _Stop((parts.transfer(step),), (), event)
        else:
            routes = parts.inputs.get((step.meta_type, step.stage_index), ())
            micro = step.micro_index
            needs = tuple(route.first + micro for route in routes if route.receive(micro) in parts.where)
            if needs:
                yield _Stop((), needs, event)


def _stops_in_turn(parts: Dissection, row: list[Event], transport: str) -> Iterator[_Stop]:
    batch: list[Transfer] = []
    for number, event in enumerate(row):
        if event.step.meta_type not in P2P_TYPES:
            continue
        batch.append(parts.transfer(event.step))
        joins = number + 1 < len(row) and row[number + 1].index == event.index  # only members of a batch share an index
        if transport == "plain" or not joins:
            members = tuple(batch)
            yield _Stop(members, members, event)
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


def _describe_cycle(walk: _Walk, parts: Dissection) -> str:
    """Follow who waits for whom until a rank comes round again."""
    rank = next(rank for rank in range(len(walk.stops)) if not walk.has_ended(rank))
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        rank = _missing_end(walk, rank, parts).rank
    cycle = path[path.index(rank) :]
    text = f"deadlock: {_waiting_end(walk, cycle[0], parts)}"
    for waiting, blocker in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        missing = _missing_end(walk, waiting, parts)
        text += f" waits for {missing}, which stands behind {_waiting_end(walk, blocker, parts)}, which"
    return text.removesuffix(", which")


def _waiting_end(walk: _Walk, rank: int, parts: Dissection) -> Event:
    """The step that holds `rank` up: its own end of a transfer, or the compute step that consumes one."""
    stop = walk.stops[rank][walk.at[rank]]
    if not stop.announces:
        return stop.event
    return next(end for end in parts.ends(walk.first_missing(rank)) if end.rank == rank)


def _missing_end(walk: _Walk, rank: int, parts: Dissection) -> Event:
    """What `rank` waits for: the end of a transfer that its peer has not come to."""
    return next(end for end in parts.ends(walk.first_missing(rank)) if end.rank != rank)
