"""From compute-only orders to everything a rank must do: one function a concern, orders in, orders out.

No torch. The order of sends and receives is what deadlocks are made of, so it is not left to each rank: all transfers
and compute steps are put on one time axis (a simulation with unit costs), and every rank's order is its part of that
axis. On one axis each transfer is a single event of both its ranks, so even a backend that blocks the whole rank in
every send and receive can follow it, and the two ends of a channel agree on its order.
"""

from __future__ import annotations

from hp_train.errors import ScheduleError
from hp_train.schedule.simulate import UNIT_COSTS, Timeline, simulate
from hp_train.schedule.steps import BACKWARD_TYPES, P2P_TYPES, MetaStep, MetaStepType, Schedule

_T = MetaStepType
TRANSPORTS = ("plain", "batch", "multi_stream", "boundary")


def lower(schedule: Schedule, transport: str, *, fsdp=None, swap=None, overlap=None, data=None) -> Schedule:
    """Draft: only P2P so far."""
    if transport not in TRANSPORTS:
        raise ScheduleError(f"transport {transport!r} is unknown; use one of {', '.join(TRANSPORTS)}")
    return add_p2p(schedule)


def add_p2p(schedule: Schedule) -> Schedule:
    """Add the send and the receive of every activation and gradient that crosses ranks."""
    if schedule.has_any(P2P_TYPES):
        raise ScheduleError(f"{schedule.name}: has sends and receives already")
    timeline = simulate(schedule, UNIT_COSTS)
    placed: list[list[tuple[tuple, MetaStep]]] = [
        [((span.start_s, 1), span.step) for span in row] for row in timeline.spans
    ]
    for send, receive, time in _transfers(schedule, timeline):
        key = (time, 0, send.meta_type.value, send.stage_index, send.micro_index)
        placed[schedule.rank_of_stage[send.stage_index]].append((key, send))
        placed[schedule.rank_of_stage[receive.stage_index]].append((key, receive))
    return schedule.with_orders([step for _, step in sorted(row, key=lambda item: item[0])] for row in placed)


def _transfers(schedule: Schedule, timeline: Timeline) -> list[tuple[MetaStep, MetaStep, float]]:
    """(send, receive, time of making) of every value that crosses ranks."""
    found = []
    for row in timeline.spans:
        for span in row:
            for part in span.step.computes:
                stage, micro = part.stage_index, part.micro_index
                if part.meta_type is _T.FWD:
                    target, send, receive = stage + 1, _T.FWD_SEND, _T.FWD_RECV
                elif part.meta_type in BACKWARD_TYPES:
                    target, send, receive = stage - 1, _T.BWD_SEND, _T.BWD_RECV
                else:
                    continue
                if not 0 <= target < schedule.num_stages:
                    continue
                if schedule.rank_of_stage[target] != span.rank:
                    found.append((MetaStep(micro, send, stage), MetaStep(micro, receive, target), span.end_s))
    return found
