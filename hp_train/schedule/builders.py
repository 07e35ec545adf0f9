"""The built-in schedules: from a name and sizes to compute-only orders, as pure functions.

No torch. Each builder writes one rank's order from the published description (see `registry.SCHEDULES` for the
papers); communication, sharding and swapping are added later, by `lowering`. Letters below: p = pp_size,
m = num_microbatches, v = stages_per_rank; F, B, I, W = forward, backward, its input half, its weight half.
"""

from __future__ import annotations

from collections.abc import Callable

from hp_train.errors import ScheduleError
from hp_train.schedule.registry import check_sizes, derive_stages_per_rank, normalize_schedule_name, rank_of_stages
from hp_train.schedule.steps import MetaStep, MetaStepType, Schedule

_T = MetaStepType
Slot = tuple[int, int]
"""A stage and a micro-batch."""


def build_schedule(
    name: str, pp_size: int, num_microbatches: int, stages_per_rank: int | None = 1
) -> Schedule:
    """The schedule `name` for these sizes, compute steps only.

    stages_per_rank: None takes what the schedule runs with by default (2 for the interleaved and V schedules, else 1).
    Raises ScheduleError naming every size that does not fit, why, and what would.
    """
    name = normalize_schedule_name(name)
    if stages_per_rank is None:
        stages_per_rank = derive_stages_per_rank(name)
    faults = check_sizes(name, pp_size, num_microbatches, stages_per_rank)
    if faults:
        raise ScheduleError(*faults)
    build = _BUILDERS[name]
    orders = tuple(tuple(build(rank, pp_size, num_microbatches, stages_per_rank)) for rank in range(pp_size))
    placement = rank_of_stages(name, pp_size, stages_per_rank)
    return Schedule(orders, pp_size * stages_per_rank, placement, num_microbatches, name)


def _steps(kind: MetaStepType, slots: list[Slot]) -> list[MetaStep]:
    return [MetaStep(micro, kind, stage) for stage, micro in slots]


def _gpipe(rank: int, p: int, m: int, v: int) -> list[MetaStep]:
    slots = [(rank, micro) for micro in range(m)]
    return _steps(_T.FWD, slots) + _steps(_T.BWD, slots)


def _one_f_one_b(rank: int, p: int, m: int, v: int) -> list[MetaStep]:
    slots = [(rank, micro) for micro in range(m)]
    return _alternate(_steps(_T.FWD, slots), _steps(_T.BWD, slots), num_warmup=min(m, p - 1 - rank))


def _alternate(forwards: list[MetaStep], backwards: list[MetaStep], num_warmup: int) -> list[MetaStep]:
    """`num_warmup` forwards, then one forward and one backward in turn, then the backwards that remain."""
    order = forwards[:num_warmup]
    for index, forward in enumerate(forwards[num_warmup:]):
        order += (forward, backwards[index])
    return order + backwards[len(forwards) - num_warmup :]


_BUILDERS: dict[str, Callable[[int, int, int, int], list[MetaStep]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
}
