"""What is in memory when: unsharded parameters (`add_fsdp_*`) and swapped activations (`add_swap`).

No torch. These steps belong to one rank and touch no other pipeline rank, so each order is treated by itself, after
sends and receives are placed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

from hp_train.errors import ScheduleError
from hp_train.schedule.steps import BACKWARD_TYPES, FSDP_TYPES, SWAP_TYPES, MetaStep, MetaStepType, Schedule

_T = MetaStepType
MIN_SWAP_GAP = 2
"""Fewest compute steps between forward and backward of a swap: one hides the copy out, one the copy in."""


def add_fsdp_unshard_reshard(schedule: Schedule, max_active_stages: int) -> Schedule:
    """Unshard each stage's parameters ahead of use, keeping at most `max_active_stages` stages of a rank unsharded.

    Kept are the stages whose next use is nearest; the next stage is unsharded before the current one runs, so that its
    all-gather is hidden. Raises ScheduleError if a step needs more stages at once, or FSDP steps are there already.
    """
    if type(max_active_stages) is not int or max_active_stages < 1:
        raise ScheduleError(f"max_active_stages={max_active_stages!r} must be an integer of at least 1")
    if schedule.has_any(FSDP_TYPES):
        raise ScheduleError(f"{schedule.name}: has FSDP steps already")
    return schedule.with_orders(_sharded(schedule, rank, max_active_stages) for rank in range(schedule.pp_size))


def _sharded(schedule: Schedule, rank: int, max_active_stages: int) -> list[MetaStep]:
    order = schedule.orders[rank]
    uses: dict[int, list[int]] = defaultdict(list)
    for position, step in enumerate(order):
        for stage in dict.fromkeys(part.stage_index for part in step.computes):
            uses[stage].append(position)
    steps: list[MetaStep] = []
    active: list[int] = []
    previous: set[int] = set()
    for position, step in enumerate(order):
        needed = {part.stage_index for part in step.computes}
        if len(needed) > max_active_stages:
            raise ScheduleError(
                f"{schedule.name}: rank {rank} step {position} {step} uses {len(needed)} stages at once, more than "
                f"max_active_stages={max_active_stages}; use at least {len(needed)}"
            )
        if needed and needed != previous:
            previous = needed
            wanted = _nearest_uses(uses, position, max_active_stages)
            steps += [MetaStep(None, _T.FSDP_RESHARD, stage) for stage in active if stage not in wanted]
            steps += [MetaStep(None, _T.FSDP_UNSHARD, stage) for stage in wanted if stage not in active]
            active = wanted
        steps.append(step)
    return steps + [MetaStep(None, _T.FSDP_RESHARD, stage) for stage in active]


def _nearest_uses(uses: dict[int, list[int]], position: int, count: int) -> list[int]:
    """The `count` stages used soonest from `position` on, soonest first."""
    upcoming = []
    for stage, positions in uses.items():
        index = bisect_left(positions, position)
        if index < len(positions):
            upcoming.append((positions[index], stage))
    return [stage for _, stage in sorted(upcoming)[:count]]


def add_fsdp_reduce_grad(schedule: Schedule) -> Schedule:
    """Reduce each stage's gradients once, right after its last BWD or BWD_WEIGHT."""
    if schedule.has_any(frozenset({_T.FSDP_REDUCE_GRAD})):
        raise ScheduleError(f"{schedule.name}: has FSDP_REDUCE_GRAD steps already")
    return schedule.with_orders(map(_with_reductions, schedule.orders))


def _with_reductions(order: tuple[MetaStep, ...]) -> list[MetaStep]:
    last_use = {
        part.stage_index: position
        for position, step in enumerate(order)
        for part in step.computes
        if part.meta_type in (_T.BWD, _T.BWD_WEIGHT)
    }
    steps: list[MetaStep] = []
    for position, step in enumerate(order):
        steps.append(step)
        steps += [
            MetaStep(None, _T.FSDP_REDUCE_GRAD, part.stage_index)
            for part in step.computes
            if last_use.get(part.stage_index) == position and part.meta_type in (_T.BWD, _T.BWD_WEIGHT)
        ]
    return steps


def add_swap(schedule: Schedule, min_gap: int) -> Schedule:
    """Keep off the device each activation with at least `min_gap` compute steps between its forward and its backward.

    The copy out is launched after the forward and awaited one compute step later; the copy back is launched one compute
    step ahead of the BWD or BWD_INPUT and awaited just before it. Raises ScheduleError for min_gap below MIN_SWAP_GAP.
    """
    if type(min_gap) is not int or min_gap < MIN_SWAP_GAP:
        raise ScheduleError(
            f"min_gap={min_gap!r} must be an integer of at least {MIN_SWAP_GAP}: one step to copy out, one in"
        )
    if schedule.has_any(SWAP_TYPES):
        raise ScheduleError(f"{schedule.name}: has SWAP steps already")
    return schedule.with_orders(_swapping(order, min_gap) for order in schedule.orders)


def _swapping(order: tuple[MetaStep, ...], min_gap: int) -> list[MetaStep]:
    computes = [step for step in order if step.computes]
    forward_at: dict[tuple[int, int], int] = {}
    before: dict[int, list[MetaStep]] = defaultdict(list)
    after: dict[int, list[MetaStep]] = defaultdict(list)
    for index, step in enumerate(computes):
        for part in step.computes:
            slot = (part.stage_index, part.micro_index)
            if part.meta_type is _T.FWD:
                forward_at[slot] = index
            elif part.meta_type in BACKWARD_TYPES and index - forward_at.get(slot, index) - 1 >= min_gap:
                stage, micro = slot
                first = forward_at[slot]
                after[first].append(MetaStep(micro, _T.SWAP_LAUNCH_OFFLOAD, stage))
                after[first + 1].append(MetaStep(micro, _T.SWAP_WAIT_OFFLOAD, stage))
                before[index - 1].append(MetaStep(micro, _T.SWAP_LAUNCH_LOAD, stage))
                before[index].append(MetaStep(micro, _T.SWAP_WAIT_LOAD, stage))
    steps: list[MetaStep] = []
    index = 0
    for step in order:
        if not step.computes:
            steps.append(step)
            continue
        # Launches ahead of waits: the copy engine has its next task before the rank stops for the last one.
        steps += sorted(before[index], key=lambda swap: swap.meta_type is _T.SWAP_WAIT_LOAD)
        steps.append(step)
        steps += sorted(after[index], key=lambda swap: swap.meta_type is _T.SWAP_WAIT_OFFLOAD)
        index += 1
    return steps
