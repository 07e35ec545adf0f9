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
from hp_train.schedule.v_builders import dualpipe_v_order, zbv_order

_T = MetaStepType
Slot = tuple[int, int]
"""A stage and a micro-batch."""


def build_schedule(name: str, pp_size: int, num_microbatches: int, stages_per_rank: int | None = 1) -> Schedule:
    """The built-in schedule `name` for these sizes, compute steps only.

    stages_per_rank: None takes what the schedule runs with by default (2 for the interleaved and V schedules, else 1).
    Raises ScheduleError naming every size that does not fit, why, and what would.
    """
    name = normalize_schedule_name(name)
    if name not in _BUILDERS:
        raise ScheduleError(f"schedule {name} is a plugin's, which open_schedule builds")
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


def _interleaved_1f1b(rank: int, p: int, m: int, v: int) -> list[MetaStep]:
    forwards, backwards = _interleaved_slots(rank, p, m, v)
    # A micro-batch comes back to this rank's next stage after a whole round, and its first gradient reaches the rank
    # only after crossing all ranks behind it, there and back.
    num_warmup = (v - 1) * max(_round_sizes(p, m)) + 2 * (p - 1 - rank)
    return _alternate(_steps(_T.FWD, forwards), _steps(_T.BWD, backwards), min(num_warmup, m * v))


def _interleaved_zb(rank: int, p: int, m: int, v: int) -> list[MetaStep]:
    """ZB-H1 over v stages a rank; v = 1 is ZB-H1 itself."""
    forwards, backwards = _interleaved_slots(rank, p, m, v)
    # Gradients of inputs alone travel back as fast as activations came: half the warm-up of 1F1B keeps ranks busy.
    num_warmup = (v - 1) * max(_round_sizes(p, m)) + (p - 1 - rank)
    order = _alternate(_steps(_T.FWD, forwards), _steps(_T.BWD_INPUT, backwards), min(num_warmup, m * v))
    return _trail_weights(order, lag=rank)


def _round_sizes(p: int, m: int) -> list[int]:
    """Micro-batches of each round of an interleaved schedule: about p each, as even as they go, larger ones first."""
    num_rounds = max(1, m // p)
    size, num_larger = divmod(m, num_rounds)
    return [size + 1] * num_larger + [size] * (num_rounds - num_larger)


def _interleaved_slots(rank: int, p: int, m: int, v: int) -> tuple[list[Slot], list[Slot]]:
    """A rank's forwards and its backwards: round by round, each through all of the rank's stages."""
    forwards: list[Slot] = []
    backwards: list[Slot] = []
    stages = [chunk * p + rank for chunk in range(v)]
    first = 0
    for size in _round_sizes(p, m):
        micros = range(first, first + size)
        forwards += [(stage, micro) for stage in stages for micro in micros]
        backwards += [(stage, micro) for stage in reversed(stages) for micro in micros]
        first += size
    return forwards, backwards


def _alternate(forwards: list[MetaStep], backwards: list[MetaStep], num_warmup: int) -> list[MetaStep]:
    """`num_warmup` forwards, then one forward and one backward in turn, then the backwards that remain."""
    order = forwards[:num_warmup]
    for index, forward in enumerate(forwards[num_warmup:]):
        order += (forward, backwards[index])
    return order + backwards[len(forwards) - num_warmup :]


def _trail_weights(order: list[MetaStep], lag: int) -> list[MetaStep]:
    """Follow every BWD_INPUT by the BWD_WEIGHT that belongs `lag` of them earlier, and end with those that remain."""
    trailed: list[MetaStep] = []
    inputs = [step for step in order if step.type is _T.BWD_INPUT]
    weights = [MetaStep(step.micro_index, _T.BWD_WEIGHT, step.stage_index) for step in inputs]
    num_inputs = 0
    for step in order:
        trailed.append(step)
        if step.type is _T.BWD_INPUT:
            num_inputs += 1
            if num_inputs > lag:
                trailed.append(weights[num_inputs - 1 - lag])
    return trailed + weights[max(0, len(weights) - lag) :]


_BUILDERS: dict[str, Callable[[int, int, int, int], list[MetaStep]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved_1f1b": _interleaved_1f1b,
    "zb_h1": _interleaved_zb,
    "interleaved_zb": _interleaved_zb,
    "zbv": zbv_order,
    "dualpipe_v": dualpipe_v_order,
}
