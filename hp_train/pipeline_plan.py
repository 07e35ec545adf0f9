"""What a run's pipeline will do: layers of every stage, and the schedule, lowered and proven. No torch.

The launcher makes the plan to refuse what can't be proven; every worker makes the same plan from the same config and
runs it. Ground floor: reads the schema, the schedule package and the stage split.
"""

from __future__ import annotations

from dataclasses import dataclass

from hp_train import registry
from hp_train.config.schema import TrainerConfig
from hp_train.errors import ScheduleError
from hp_train.schedule import TRANSPORTS, Schedule, lower, select_transport, verify
from hp_train.schedule.sources import open_schedule
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


def compute_schedule(config: TrainerConfig, num_microbatches: int) -> Schedule:
    """Build or read the schedule of `config`, compute steps only, with its own settings if it is a plugin's.

    Raises ScheduleError.
    """
    pp = config.pp
    component = registry.find("pp_schedule", pp.schedule)
    settings = None if component is None else registry.settings_of(component, config)
    pp_size = config.accelerator.pp_size
    return open_schedule(pp.schedule, pp_size, num_microbatches, pp.stages_per_rank, settings=settings)


def plan_pipeline(config: TrainerConfig, num_microbatches: int) -> PipelinePlan:
    """Build or read, lower and prove the schedule of `config`, whose pp_size is above 1.

    Raises ScheduleError for a schedule that can't be read or built, and with the counter-example when the proof fails.
    """
    pp = config.pp
    compute = compute_schedule(config, num_microbatches)
    options = {
        "overlap": None if pp.overlap == "none" else pp.overlap,
        "swap": pp.swap_min_gap,
        "data": pp.data_steps,
    }
    try:
        if pp.p2p_transport == "auto":
            transport, schedule = select_transport(compute, TRANSPORTS, **options)
        else:
            transport, schedule = pp.p2p_transport, lower(compute, pp.p2p_transport, **options)
    except ScheduleError as error:  # says which step waits for ever, and of which schedule; not which key chose that
        told = (message.removeprefix(f"{compute.name}: ") for message in error.messages)
        raise ScheduleError(*(f"pp.schedule={pp.schedule}: {message}" for message in told)) from error
    proof = verify(schedule, transport)
    if not proof.ok:
        raise ScheduleError(
            *(f"pp.schedule={pp.schedule}: refused under {transport}: {text}" for text in proof.violations)
        )
    return PipelinePlan(schedule, transport, split_layers(config.model, compute.num_stages, pp.layer_split))
