"""What a run's pipeline will do: layers of every stage, and the schedule, lowered and proven. No torch.

The launcher makes the plan to refuse what can't be proven; every worker makes the same plan from the same config and
runs it. Ground floor: reads the schema, the schedule package and the stage split.
"""

from __future__ import annotations

from dataclasses import dataclass

from hp_train.config.schema import TrainerConfig
from hp_train.errors import ScheduleError
from hp_train.schedule import Schedule, build_schedule, lower, verify
from hp_train.schedule.registry import derive_stages_per_rank
from hp_train.stage_split import split_layers


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """A proven, lowered schedule and what each of its stages holds."""

    schedule: Schedule
    transport: str
    layers_of_stage: tuple[range, ...]

    def stages_of(self, pp_rank: int) -> list[int]:
        """Return the stages that a pipeline rank holds, in order."""
        return [stage for stage, rank in enumerate(self.schedule.rank_of_stage) if rank == pp_rank]


def plan_pipeline(config: TrainerConfig, num_microbatches: int) -> PipelinePlan:
    """Build, lower and prove the schedule of `config`, whose pp_size is above 1.

    Raises ScheduleError with the counter-example when the proof fails.
    """
    pp = config.pp
    stages_per_rank = pp.stages_per_rank or derive_stages_per_rank(pp.schedule)
    compute = build_schedule(pp.schedule, config.accelerator.pp_size, num_microbatches, stages_per_rank)
    schedule = lower(compute, pp.p2p_transport)
    proof = verify(schedule, pp.p2p_transport)
    if not proof.ok:
        raise ScheduleError(*(f"pp.schedule={pp.schedule}: refused under {pp.p2p_transport}: {text}" for text in proof.violations))
    return PipelinePlan(schedule, pp.p2p_transport, split_layers(config.model, compute.num_stages, pp.layer_split))
