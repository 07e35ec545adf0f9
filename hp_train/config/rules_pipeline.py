"""Rules on the pipeline: its schedule, its stages, the layers of each. No torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from hp_train import registry
from hp_train.compile.pass_config import SCHEDULE_FILE_PREFIX, normalize_pp_schedule
from hp_train.config.near_match import did_you_mean, nearest
from hp_train.config.rule import Rule
from hp_train.config.rules_batch import BATCH_KEYS, known_num_microbatches
from hp_train.config.schema import TrainerConfig
from hp_train.errors import ScheduleError
from hp_train.schedule.registry import SCHEDULES, check_sizes, derive_stages_per_rank, schedule_names
from hp_train.stage_split import split_faults

_STAGE_KEYS = ("pp.schedule", "pp.stages_per_rank", "accelerator.pp_size")


def known_stages_per_rank(config: TrainerConfig) -> int | None:
    """Return the stages of each rank, derived if they are not given; None if the schedule is not known."""
    if any(True for _ in _schedule(config)):
        return None
    if config.pp.stages_per_rank is not None:
        return config.pp.stages_per_rank
    if config.pp.schedule.startswith(SCHEDULE_FILE_PREFIX):
        from hp_train.schedule import load_schedule

        return len(load_schedule(config.pp.schedule.removeprefix(SCHEDULE_FILE_PREFIX)).stages_of_rank(0))
    return derive_stages_per_rank(config.pp.schedule)


def _schedule(config: TrainerConfig) -> Iterator[str]:
    schedule = config.pp.schedule
    try:
        name = normalize_pp_schedule(schedule)
    except ValueError:
        near = did_you_mean([nearest(schedule, schedule_names())])
        choices = f"{', '.join(schedule_names())} or {SCHEDULE_FILE_PREFIX}PATH"
        yield f"pp.schedule={schedule} is no schedule{near}; use {choices}"
        return
    if name.startswith(SCHEDULE_FILE_PREFIX):
        from hp_train.schedule import load_schedule  # only a person's own schedule pays for the reader

        path = name.removeprefix(SCHEDULE_FILE_PREFIX)
        try:
            load_schedule(path)
        except ScheduleError as error:
            yield from (f"pp.schedule={schedule}: {message.removeprefix(f'{path}: ')}" for message in error.messages)


def _sizes(config: TrainerConfig) -> Iterator[str]:
    """The schedule's own demands; without a pipeline there are none."""
    num_microbatches, stages = known_num_microbatches(config), known_stages_per_rank(config)
    if config.accelerator.pp_size == 1 or num_microbatches is None or stages is None:
        return
    if config.pp.schedule in SCHEDULES:
        for fault in check_sizes(config.pp.schedule, config.accelerator.pp_size, num_microbatches, stages):
            yield _with_keys(fault, config, num_microbatches)
    elif config.pp.schedule.startswith(SCHEDULE_FILE_PREFIX):
        yield from _faults_when_built(config, num_microbatches)


def _sizes_of_a_plugin(config: TrainerConfig) -> Iterator[str]:
    """What the builder of a plugin has against these sizes and its settings."""
    num_microbatches = known_num_microbatches(config)
    if config.accelerator.pp_size > 1 and num_microbatches is not None and _is_a_plugins(config):
        yield from _faults_when_built(config, num_microbatches)


def _is_a_plugins(config: TrainerConfig) -> bool:
    return registry.find("pp_schedule", config.pp.schedule) is not None


def _faults_when_built(config: TrainerConfig, num_microbatches: int) -> Iterator[str]:
    from hp_train.pipeline_plan import compute_schedule  # only a person's own schedule pays for it

    try:
        compute_schedule(config, num_microbatches)
    except ScheduleError as error:
        yield from (f"pp.schedule: {message}" for message in error.messages)


def _with_keys(fault: str, config: TrainerConfig, num_microbatches: int) -> str:
    """Put the keys as typed in place of the schedule package's own words."""
    fault = fault.replace(" pp_size", " accelerator.pp_size").replace("stages_per_rank=", "pp.stages_per_rank=", 1)
    counted = f"num_microbatches={num_microbatches}"
    if fault.startswith(counted):
        batch = f"trainer.global_batch_size={config.trainer.global_batch_size}"
        fault = fault.replace(counted, f"{batch} makes {num_microbatches} micro-batches a rank, which", 1)
    return f"pp.schedule={config.pp.schedule}: {fault}"


def _layers(config: TrainerConfig) -> Iterator[str]:
    stages_per_rank = known_stages_per_rank(config)
    if config.accelerator.pp_size == 1 or stages_per_rank is None:
        return
    num_stages = config.accelerator.pp_size * stages_per_rank
    cut = f"accelerator.pp_size={config.accelerator.pp_size}"
    if stages_per_rank > 1:
        cut += f" x pp.stages_per_rank={stages_per_rank}"
    for fault in split_faults(config.model.num_layers, num_stages, config.pp.layer_split):
        yield f"{fault} ({cut}){_fewer_stages(config, stages_per_rank)}"


def _fewer_stages(config: TrainerConfig, stages_per_rank: int) -> str:
    """What would work where an even split has more stages than layers."""
    num_layers, num_stages = config.model.num_layers, config.accelerator.pp_size * stages_per_rank
    if config.pp.layer_split is not None or num_layers >= num_stages:
        return ""
    # A pipeline of one rank is none, and has no stages to fill.
    most = max(num_layers // stages_per_rank, 1)
    return f"; use accelerator.pp_size of at most {most} or model.num_layers of at least {num_stages}"


def _splits_backward(config: TrainerConfig) -> Iterator[str]:
    """Selective recomputation keeps what a first backward frees; the second, for the weights, finds it gone."""
    if config.accelerator.pp_size == 1 or config.activation_checkpoint.mode != "selective":
        return
    if config.pp.schedule in SCHEDULES and SCHEDULES[config.pp.schedule].splits_backward:
        yield _no_halves(config)


def _own_splits_backward(config: TrainerConfig) -> Iterator[str]:
    """The same of a person's own schedule, which says what it does when it is built."""
    if config.accelerator.pp_size == 1 or config.activation_checkpoint.mode != "selective":
        return
    num_microbatches = known_num_microbatches(config)
    if config.pp.schedule in SCHEDULES or num_microbatches is None or known_stages_per_rank(config) is None:
        return
    from hp_train.pipeline_plan import compute_schedule
    from hp_train.schedule import MetaStepType

    try:
        orders = compute_schedule(config, num_microbatches).orders
    except ScheduleError:
        return  # told by the rules on sizes
    if any(part.type is MetaStepType.BWD_WEIGHT for order in orders for step in order for part in step.computes):
        yield _no_halves(config)


def _no_halves(config: TrainerConfig) -> str:
    return (
        f"activation_checkpoint.mode=selective does not work with pp.schedule={config.pp.schedule}, which runs the "
        f"two halves of backward apart; use none or full"
    )


def _data_steps(config: TrainerConfig) -> Iterator[str]:
    if config.pp.data_steps and config.accelerator.pp_size > 1 and config.data.document_boundaries == "isolate":
        yield (
            "pp.data_steps=true does not work with data.document_boundaries=isolate, whose positions and masks every "
            "stage needs; use attend or pad"
        )


def _trace_steps(config: TrainerConfig) -> Iterator[str]:
    if config.pp.trace_steps and importlib.util.find_spec("matplotlib") is None:
        yield "pp.trace_steps needs matplotlib; install it with: pip install 'hp-train[plots]'"


RULES = (
    Rule(("pp.schedule",), _schedule),
    Rule((*_STAGE_KEYS, *BATCH_KEYS), _sizes),
    Rule(("pp", "accelerator.pp_size", *BATCH_KEYS), _sizes_of_a_plugin),
    Rule((*_STAGE_KEYS, "pp.layer_split", "model.num_layers"), _layers),
    Rule((*_STAGE_KEYS, "activation_checkpoint.mode"), _splits_backward),
    Rule(("pp", "accelerator.pp_size", *BATCH_KEYS, "activation_checkpoint.mode"), _own_splits_backward),
    Rule(("pp.data_steps", "accelerator.pp_size", "data.document_boundaries"), _data_steps),
    Rule(("pp.trace_steps",), _trace_steps),
)
