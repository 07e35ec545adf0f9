"""`PassConfig`: the one statement of parallel intent that both engines read. Ground floor, no torch.

The eager engine's `parallelize` and the graph engine's passes take their sizes, modes and schedule from here; it is
made from a run's config by `build_pass_config_from_trainer_config` and stored in the run directory. A degree of None
is left open until the number of processes is known; `resolve_degrees` fills it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from hp_train.config.schema import AcceleratorSection, FsdpSection, PpSection, TrainerSection
from hp_train.schedule.registry import SCHEDULES, normalize_schedule_name, schedule_names

PP_SCHEDULES: tuple[str, ...] = tuple(SCHEDULES)
"""The built-in schedules; a plugin's name and `file:PATH` are accepted where a schedule is named, too."""

DP_MODES: tuple[str, ...] = ("fsdp", "ddp", "hsdp")
"""Shard, replicate, or both."""

SCHEDULE_FILE_PREFIX = "file:"
"""Marks a schedule that is read from a file of a person's own."""

_DP_MODE_ALIASES = {"fully_shard": "fsdp", "replicate": "ddp", "hybrid_shard": "hsdp"}


def normalize_dp_mode(mode: Any) -> str:
    """Return the member of `DP_MODES` that `mode` names: any case, blanks around it aside, torch's names included.

    Raises ValueError for an unknown name or anything but a string.
    """
    if not isinstance(mode, str):
        raise ValueError(f"dp_mode={mode!r} must be a string; use {', '.join(DP_MODES)}")
    name = mode.strip().lower()
    name = _DP_MODE_ALIASES.get(name, name)
    if name not in DP_MODES:
        raise ValueError(f"dp_mode={mode!r} is unknown; use {', '.join(DP_MODES)} (or {', '.join(_DP_MODE_ALIASES)})")
    return name


def normalize_pp_schedule(schedule: Any) -> str:
    """Return the registry's (or a plugin's) name for `schedule`, or `file:PATH` with the path as it was given.

    Raises ValueError for an unknown name, a file without a path, or anything but a string.
    """
    if not isinstance(schedule, str):
        raise ValueError(f"pp_schedule={schedule!r} must be a string; use {', '.join(schedule_names())} or file:PATH")
    name = schedule.strip()
    if name[: len(SCHEDULE_FILE_PREFIX)].lower() != SCHEDULE_FILE_PREFIX:
        return normalize_schedule_name(name)
    path = name[len(SCHEDULE_FILE_PREFIX) :].strip()
    if not path:
        raise ValueError(f"pp_schedule={schedule!r} names no file; use file:PATH")
    return SCHEDULE_FILE_PREFIX + path


@dataclass
class PassConfig:
    """What is parallel and how. Checked when made; fields may be changed, then call `validate` again.

    enable_overlap: overlap communication with computation.
    fsdp_enabled: data parallelism by the HSDP engine in any of its modes.
    fsdp_reshard_after_forward: free gathered parameters after forward.
    fsdp_degree: ranks that share one copy of the parameters; None is all ranks that remain.
    dp_mode: a member of `DP_MODES`.
    dp_replicate_degree: copies of the parameters in the modes ddp and hsdp; None where there is one or it is open.
    tp_size: tensor-parallel ranks; sequence_parallel and loss_parallel shard activations and logits over them.
    pp_enabled, pp_degree: whether there is a pipeline and of how many ranks; None is all ranks that remain.
    pp_microbatch_size: sequences per micro-batch.
    pp_schedule: a member of `PP_SCHEDULES`, the name of a plugin's schedule, or `file:PATH`.
    """

    enable_overlap: bool = True
    fsdp_enabled: bool = True
    fsdp_reshard_after_forward: bool = True
    fsdp_degree: int | None = None
    dp_mode: str = "fsdp"
    dp_replicate_degree: int | None = None
    tp_size: int = 1
    sequence_parallel: bool = False
    loss_parallel: bool = False
    pp_enabled: bool = False
    pp_degree: int | None = None
    pp_microbatch_size: int = 1
    pp_schedule: str = "gpipe"

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Bring names to their normal form, then check every field. Raises ValueError naming field and value."""
        self.dp_mode = normalize_dp_mode(self.dp_mode)
        self.pp_schedule = normalize_pp_schedule(self.pp_schedule)
        for name in _BOOLEANS:
            _check_boolean(name, getattr(self, name))
        for name in _SIZES:
            _check_size(name, getattr(self, name))
        for name in _OPEN_SIZES:
            if getattr(self, name) is not None:
                _check_size(name, getattr(self, name), "or None")


_BOOLEANS = (
    "enable_overlap", "fsdp_enabled", "fsdp_reshard_after_forward", "sequence_parallel", "loss_parallel", "pp_enabled",
)  # fmt: skip
_SIZES = ("tp_size", "pp_microbatch_size")
_OPEN_SIZES = ("fsdp_degree", "dp_replicate_degree", "pp_degree")


def _check_boolean(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{name}={value!r} must be True or False")
    return value


def _check_size(name: str, value: Any, otherwise: str = "") -> int:
    if type(value) is not int or value < 1:  # a bool is an int to isinstance, and never a size
        raise ValueError(f"{name}={value!r} must be an integer of at least 1 {otherwise}".rstrip())
    return value


def reshards_after_forward(setting: bool | str, *, has_pipeline: bool) -> bool:
    """Resolve `fsdp.reshard_after_forward`: auto keeps parameters gathered between the micro-batches of a pipeline.

    A pipeline runs each stage's forward once per micro-batch: resharding would gather the same parameters every time.
    Raises ValueError for anything but true, false and auto.
    """
    if setting == "auto":
        return not has_pipeline
    if type(setting) is not bool:
        raise ValueError(f"fsdp.reshard_after_forward={setting!r} must be auto, true or false")
    return setting


def build_pass_config_from_trainer_config(
    config: Any, fsdp_enabled: bool | None = None, enable_overlap: bool = False
) -> PassConfig:
    """Project the parallel intent of `config` onto a `PassConfig`.

    config: a `TrainerConfig`, or any object with `.accelerator` and `.fsdp_config`, and perhaps `.pp_config` and
        `.trainer`. What these lack takes the schema's default.
    fsdp_enabled: None reads it off the sizes: dp_shard_size or edp_shard_size above 1, dp_shard_size -1 (all ranks that
        remain, projected as degree None), or dp_replicate_size above 1 in the modes ddp and hsdp.
    Raises ValueError for every bad value, wrong types included.
    """
    for name in ("accelerator", "fsdp_config"):
        if getattr(config, name, None) is None:
            raise ValueError(f"{type(config).__name__} has no {name}, which says what is parallel")
    accelerator = _Section(config.accelerator, AcceleratorSection(), "accelerator")
    fsdp = _Section(config.fsdp_config, FsdpSection(), "fsdp")
    pp = _Section(getattr(config, "pp_config", None), PpSection(), "pp")
    dp_mode = normalize_dp_mode(fsdp.get("dp_mode"))
    replicates = dp_mode in ("ddp", "hsdp")
    dp_shard_size = None if _is_open(fsdp.get("dp_shard_size")) else fsdp.size("dp_shard_size")
    dp_replicate_size = fsdp.size("dp_replicate_size")
    edp_shard_size = fsdp.size("edp_shard_size")
    if fsdp_enabled is None:
        fsdp_enabled = (
            dp_shard_size is None or max(dp_shard_size, edp_shard_size) > 1 or (replicates and dp_replicate_size > 1)
        )
    _check_boolean("fsdp_enabled", fsdp_enabled)
    pp_size = accelerator.size("pp_size")
    return PassConfig(
        enable_overlap=enable_overlap,
        fsdp_enabled=fsdp_enabled,
        fsdp_reshard_after_forward=reshards_after_forward(fsdp.get("reshard_after_forward"), has_pipeline=pp_size > 1),
        fsdp_degree=dp_shard_size if fsdp_enabled else None,
        dp_mode=dp_mode,
        dp_replicate_degree=dp_replicate_size if replicates else None,
        tp_size=accelerator.size("tp_size"),
        sequence_parallel=accelerator.get("sequence_parallel"),
        loss_parallel=accelerator.get("loss_parallel"),
        pp_enabled=pp_size > 1,
        pp_degree=pp_size if pp_size > 1 else None,
        pp_microbatch_size=_microbatch_size(pp, getattr(config, "trainer", None)),
        pp_schedule=pp.get("schedule"),
    )


class _Section:
    """Reads one section of a config: an object that may lack some attributes, or be None."""

    def __init__(self, section: Any, defaults: Any, name: str) -> None:
        self._section, self._defaults, self._name = section, defaults, name

    def get(self, field: str) -> Any:
        return getattr(self._section, field, getattr(self._defaults, field))

    def size(self, field: str) -> int:
        return _check_size(f"{self._name}.{field}", self.get(field))


def _is_open(size: Any) -> bool:
    return type(size) is int and size == -1


def _microbatch_size(pp: _Section, trainer: Any) -> int:
    if pp.get("microbatch_size") is not None:
        return pp.size("microbatch_size")
    return _Section(trainer, TrainerSection(), "trainer").size("micro_batch_size")


def resolve_degrees(pass_config: PassConfig, world_size: int) -> PassConfig:
    """Return a copy of `pass_config` whose degrees are numbers, whose product with tp_size is `world_size`.

    A part that is off has degree 1, as has replication in mode fsdp and sharding in mode ddp. Of the degrees that are
    None then, the first of fsdp_degree, dp_replicate_degree and pp_degree takes all ranks that remain; other than it
    only dp_replicate_degree may be None, and is 1.
    Raises ValueError when a degree stays open or the product is another number.
    """
    pass_config.validate()
    _check_size("world_size", world_size)
    degrees = _fixed_degrees(pass_config)
    open_names = [name for name, degree in degrees.items() if degree is None]
    if open_names[1:2] == ["dp_replicate_degree"]:
        degrees["dp_replicate_degree"] = 1
        open_names.remove("dp_replicate_degree")
    if len(open_names) > 1:
        raise ValueError(f"{' and '.join(open_names)} are both open; give one of them a number")
    product = pass_config.tp_size
    for degree in degrees.values():
        product *= degree or 1
    described = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree is not None)
    described += f" x tp_size {pass_config.tp_size}"
    if open_names:
        if world_size % product:
            raise ValueError(f"{described} = {product} does not divide world_size={world_size}")
        degrees[open_names[0]] = world_size // product
    elif product != world_size:
        raise ValueError(f"{described} = {product}, not world_size={world_size}")
    return dataclasses.replace(pass_config, **degrees)


def _fixed_degrees(pass_config: PassConfig) -> dict[str, int | None]:
    """The degrees as given, 1 where the part is off; those that disagree with a part that is off are an error."""
    off = {
        "fsdp_degree": not pass_config.fsdp_enabled or pass_config.dp_mode == "ddp",
        "dp_replicate_degree": not pass_config.fsdp_enabled or pass_config.dp_mode == "fsdp",
        "pp_degree": not pass_config.pp_enabled,
    }
    degrees: dict[str, int | None] = {}
    for name, is_off in off.items():
        degree = getattr(pass_config, name)
        if is_off and degree not in (None, 1):
            raise ValueError(
                f"{name}={degree} with fsdp_enabled={pass_config.fsdp_enabled}, dp_mode={pass_config.dp_mode}, "
                f"pp_enabled={pass_config.pp_enabled}: this part is off; use None or 1"
            )
        degrees[name] = 1 if is_off else degree
    return degrees
