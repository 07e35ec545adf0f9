"""Pairing neighbouring forwards and backwards of a rank into OVERLAP steps: `pair_overlap_f_b`, `pair_overlap_b_f`.

No torch. A pair starts only when both parts have their inputs and hands on both results at its end, so pairing
carelessly makes ranks wait for each other in a circle (in gpipe: every rank's last forward with its first backward).
The orders are therefore run on paper and a pair is made only where both parts are ready; where all ranks have stopped
to wait for a second part, the earliest first part runs alone. The run itself shows that the result can't deadlock.
"""

from __future__ import annotations

import heapq

from hp_train.errors import ScheduleError
from hp_train.schedule.simulate import UNIT_COSTS, Value, inputs_of, result_of, simulate
from hp_train.schedule.steps import BACKWARD_TYPES, P2P_TYPES, MetaStep, MetaStepType, Schedule

_T = MetaStepType


def pair_overlap_f_b(schedule: Schedule) -> Schedule:
    """Make OVERLAP_F_B of a forward and the backward that follows it, where that costs no deadlock."""
    return _Pairing(schedule, _T.OVERLAP_F_B).run()


def pair_overlap_b_f(schedule: Schedule) -> Schedule:
    """Make OVERLAP_B_F of a backward and the forward that follows it, where that costs no deadlock."""
    return _Pairing(schedule, _T.OVERLAP_B_F).run()


class _Pairing:
    def __init__(self, schedule: Schedule, kind: MetaStepType) -> None:
        if schedule.has_any(P2P_TYPES):
            raise ScheduleError(f"{schedule.name}: pair forwards and backwards before sends and receives are added")
        self.schedule = schedule
        self.kind = kind
        self.starts = [[span.start_s for span in row] for row in simulate(schedule, UNIT_COSTS).spans]
        self.paired: list[list[MetaStep]] = [[] for _ in schedule.orders]
        self.position = [0] * schedule.pp_size
        self.made: set[Value] = set()
        self.waiters: dict[Value, list[int]] = {}
        self.runnable = list(range(schedule.pp_size))[::-1]
        self.held_back: list[tuple[float, int, int]] = []  # (start, rank, position) of first parts ready to run alone

    def run(self) -> Schedule:
        while self.runnable or self.held_back:
            if self.runnable:
                self._advance(self.runnable.pop())
                continue
            _, rank, position = heapq.heappop(self.held_back)
            if self.position[rank] == position:  # else it found its second part meanwhile
                self._emit(rank, self.schedule.orders[rank][position])
                self.runnable.append(rank)
        assert all(at == len(order) for at, order in zip(self.position, self.schedule.orders, strict=True)), (
            self.position
        )
        return self.schedule.with_orders(self.paired)

    def _advance(self, rank: int) -> None:
        order = self.schedule.orders[rank]
        while self.position[rank] < len(order):
            position = self.position[rank]
            step = order[position]
            if self._waits(rank, step):
                return
            second = order[position + 1] if position + 1 < len(order) else None
            if second is None or not self._is_pair(step, second):
                self._emit(rank, step)
            elif self._waits(rank, second):
                heapq.heappush(self.held_back, (self.starts[rank][position], rank, position))
                return
            else:
                self._emit(rank, step, second)

    def _is_pair(self, first: MetaStep, second: MetaStep) -> bool:
        forward, backward = (first, second) if self.kind is _T.OVERLAP_F_B else (second, first)
        if forward.meta_type is not _T.FWD or backward.meta_type not in BACKWARD_TYPES:
            return False
        if forward.boundary_p2p is not None:
            return False
        return (forward.stage_index, forward.micro_index) != (backward.stage_index, backward.micro_index)

    def _waits(self, rank: int, step: MetaStep) -> bool:
        """Whether `step` lacks an input; if so, `rank` is woken when it is made."""
        for part in step.computes:
            for value in inputs_of(part, self.schedule.num_stages):
                if value not in self.made:
                    self.waiters.setdefault(value, []).append(rank)
                    return True
        return False

    def _emit(self, rank: int, *steps: MetaStep) -> None:
        self.paired[rank].append(MetaStep(None, self.kind, None, steps) if len(steps) == 2 else steps[0])
        self.position[rank] += len(steps)
        for step in steps:
            for part in step.computes:
                value = result_of(part)
                if value is not None:
                    self.made.add(value)
                    self.runnable.extend(self.waiters.pop(value, ()))
