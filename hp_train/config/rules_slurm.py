"""Rules on SLURM jobs: times, arrays, what goes into the script, nodes x processes against the mesh. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hp_train.config.durations import parse_duration
from hp_train.config.numbers import spell
from hp_train.config.rule import Rule, divisors_text
from hp_train.config.rules_mesh import SIZE_KEYS, known_mesh
from hp_train.config.schema import ContainerSection, TrainerConfig

_TEXTS = ("account", "partition", "qos", "constraint", "exclude", "array", "dependency", "gpu_request")
_LISTS = ("modules", "env", "extra_lines")
SLURM_KEYS = tuple(f"launcher.{name}" for name in (
    *_TEXTS, *_LISTS, "time", "cpus_per_node", "signal_lead", "max_requeues", "continue_by", "snapshot",
))  # fmt: skip
_CONTAINER_KEYS = tuple(f"launcher.container.{name}" for name in ("runtime", "image", "mounts", "python"))
_ARRAY = re.compile(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?")
_GPU_REQUEST = re.compile(r"(gpus_per_node|gres)(:[A-Za-z0-9_.-]+)?|none")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_MOST_TASKS = 10_000


def container_of(config: TrainerConfig) -> ContainerSection:
    """Return the container settings, the defaults (no container) where the group is null."""
    return config.launcher.container or ContainerSection()


def array_tasks(text: str) -> tuple[int, ...]:
    """Return the task numbers that launcher.array names, sorted: `0-4:2,7%2` -> 0, 2, 4, 7."""
    numbers: set[int] = set()
    for part in text.partition("%")[0].split(","):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        numbers.update(range(int(first), int(last or first) + 1, int(step or 1) or 1)[: _MOST_TASKS + 1])
        if len(numbers) > _MOST_TASKS:
            break
    return tuple(sorted(numbers))


def _times(config: TrainerConfig) -> Iterator[str]:
    launcher = config.launcher
    seconds: dict[str, int] = {}
    for name in ("time", "signal_lead"):
        text = getattr(launcher, name)
        if text is None:
            continue
        try:
            seconds[name] = parse_duration(text)
        except ValueError as error:
            yield f"launcher.{name}={text} {error}"
    if launcher.name == "slurm" and len(seconds) == 2 and seconds["signal_lead"] >= seconds["time"]:
        yield (
            f"launcher.signal_lead={launcher.signal_lead} is not shorter than launcher.time={launcher.time}; "
            "a job is told to save so long before its limit"
        )


def _array(config: TrainerConfig) -> Iterator[str]:
    text = config.launcher.array
    if text is None:
        return
    if not _ARRAY.fullmatch(text):
        yield f"launcher.array={text} is no list of task numbers; use e.g. 0-7, 0-7%2 (two at a time) or 1,3,5"
        return
    tasks = array_tasks(text)
    if not tasks:
        yield f"launcher.array={text} names no task"
    elif len(tasks) > _MOST_TASKS:
        yield f"launcher.array={text} names more than {_MOST_TASKS} tasks"


def _lines(config: TrainerConfig) -> Iterator[str]:
    """What goes into the script as one word or line must be one."""
    launcher = config.launcher
    values = [(f"launcher.{name}", getattr(launcher, name)) for name in _TEXTS]
    values.append(("trainer.run_name", config.trainer.run_name))  # the job's name
    values += [(f"launcher.{name}", item) for name in _LISTS for item in getattr(launcher, name)]
    for key, value in values:
        if value is not None and _CONTROL.search(value) and not key.endswith(".env"):
            yield f"{key}={value!r} holds a line break or another control character; give one line"
    for item in launcher.env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*=[^\x00]*", item, re.DOTALL):
            yield f"launcher.env={spell(launcher.env)}: {item!r} is not NAME=VALUE"
    if not _GPU_REQUEST.fullmatch(launcher.gpu_request):
        yield f"launcher.gpu_request={launcher.gpu_request} is not gpus_per_node, gres, gres:TYPE or none"


def _container(config: TrainerConfig) -> Iterator[str]:
    container = container_of(config)
    if container.runtime != "none" and container.image is None:
        yield f"launcher.container.runtime={container.runtime} needs launcher.container.image"
    for mount in container.mounts:
        source = mount.partition(":")[0]
        if not source.startswith("/") or "," in mount or _CONTROL.search(mount):
            yield f"launcher.container.mounts: {mount!r} is not SOURCE or SOURCE:TARGET, with absolute paths"


def _processes(config: TrainerConfig) -> Iterator[str]:
    """Without nproc_per_node the mesh must tell how many processes a node runs: no node is here to be asked."""
    launcher = config.launcher
    if launcher.name != "slurm" or launcher.nproc_per_node != "auto":
        return
    mesh = known_mesh(config)
    if mesh is None:
        yield (
            "launcher=slurm with fsdp.dp_shard_size=-1 needs launcher.nproc_per_node, the processes (GPUs) of a node; "
            "it is not known where the job is submitted"
        )
    elif mesh.world_size % launcher.nodes:
        yield (
            f"launcher.nodes={launcher.nodes} does not divide the mesh of {mesh.world_size} processes; "
            f"use {divisors_text(mesh.world_size)}"
        )


RULES = (
    Rule(("launcher.name", "launcher.time", "launcher.signal_lead"), _times),
    Rule(("launcher.array",), _array),
    Rule(tuple(f"launcher.{name}" for name in (*_TEXTS, *_LISTS)) + ("trainer.run_name",), _lines),
    Rule(_CONTAINER_KEYS, _container),
    Rule((*SIZE_KEYS, "launcher.name", "launcher.nproc_per_node", "launcher.nodes"), _processes),
)
