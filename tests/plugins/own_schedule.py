"""A pipeline schedule outside the package: 1f1b whose ranks run some forwards ahead, to hide slow transfers."""

from __future__ import annotations

from dataclasses import dataclass

from hp_train import registry
from hp_train.config.fields import number
from hp_train.errors import ScheduleError


@dataclass
class AheadConfig:
    forwards: int = number(1, 0, 64)
    """Forwards that each rank runs ahead of 1f1b. Integer, micro-batches; default 1; 0 to 64."""


def build(own, pp_size, num_microbatches, stages_per_rank):
    from hp_train.schedule import MetaStep, MetaStepType, Schedule

    if stages_per_rank != 1:
        raise ScheduleError(f"stages_per_rank={stages_per_rank} is not 1")

    def order(rank):
        forwards = [MetaStep(micro, MetaStepType.FWD, rank) for micro in range(num_microbatches)]
        backwards = [MetaStep(micro, MetaStepType.BWD, rank) for micro in range(num_microbatches)]
        num_ahead = min(pp_size - 1 - rank + own.forwards, num_microbatches)
        steps = forwards[:num_ahead]
        for forward, backward in zip(forwards[num_ahead:], backwards, strict=False):
            steps += (forward, backward)
        return (*steps, *backwards[num_microbatches - num_ahead :])

    orders = tuple(order(rank) for rank in range(pp_size))
    return Schedule(orders, pp_size, tuple(range(pp_size)), num_microbatches)


registry.register_pp_schedule(
    "ahead_1f1b", config=AheadConfig, build=build, summary="1f1b with forwards run ahead to hide slow transfers"
)
