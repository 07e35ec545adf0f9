"""How many processes a run takes on this machine, on which device, and what stands against that. No torch.

A run that is submitted to a cluster is planned twice: at submission from the config alone, then on each node.

The mesh asks for a number of processes; with `fsdp.dp_shard_size=-1` it takes the visible GPUs. GPUs are never passed
over in silence: a run that could have used them and does not says why.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from dataclasses import dataclass

from hp_train.config.rules_mesh import mesh_with, processes_asked
from hp_train.config.schema import TrainerConfig
from hp_train.errors import ConfigError
from hp_train.launch.nvidia import Devices, torch_obstacle, visible_devices
from hp_train.models.shapes import num_parameters
from hp_train.topology import DIMENSIONS, MeshSizes

SMALL_MODEL_PARAMETERS = 50_000_000  # a model that a laptop trains in minutes: device=auto may fall back to the CPU


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """The processes of a run on each of its machines. With faults, the other fields mean nothing."""

    device: str  # cpu or cuda; auto where it is left to the nodes of a cluster
    sizes: MeshSizes
    lines: tuple[str, ...] = ()  # what the person should know
    faults: tuple[str, ...] = ()
    num_nodes: int = 1

    @property
    def num_processes(self) -> int:
        """Return processes to start on one machine."""
        return self.sizes.world_size // self.num_nodes


def usable_cores() -> int:
    """Return the CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def mesh_sizes(config: TrainerConfig, world_size: int) -> MeshSizes:
    """Return the mesh of `world_size` processes, `fsdp.dp_shard_size=-1` taking the ranks that remain.

    Raises ConfigError if the sizes and the number of processes do not agree.
    """
    sizes = mesh_with(config, config.fsdp.dp_shard_size)
    if config.fsdp.dp_shard_size == -1 and world_size % sizes.world_size == 0:
        sizes = mesh_with(config, world_size // sizes.world_size)
    if sizes.world_size != world_size:
        factors = " x ".join(f"{name} {size}" for name, size in zip(DIMENSIONS, sizes.as_tuple(), strict=True))
        verb = "does not divide" if config.fsdp.dp_shard_size == -1 else "is not"
        raise ConfigError(f"the mesh {factors} = {sizes.world_size} {verb} the {world_size} processes asked for")
    return sizes


def plan_processes(config: TrainerConfig, devices: Devices | None = None) -> ProcessPlan:
    """Return what this machine will run for `config`, which has passed the rules that need no machine.

    Of a run that is to be submitted, what the cluster will run: no device of this machine counts then.
    """
    if config.launcher.name == "slurm":
        asked = processes_asked(config)
        sizes = mesh_with(config, config.fsdp.dp_shard_size) if asked is None else mesh_sizes(config, asked)
        return ProcessPlan(config.trainer.device, sizes, num_nodes=config.launcher.nodes)
    devices = visible_devices() if devices is None else devices
    asked = _processes_asked(config)
    if config.trainer.device == "cpu":
        return _on_cpu(config, asked, ())
    if devices.visible == 0:
        return _without_gpus(config, devices, asked)
    if asked is None:
        fixed = mesh_with(config, -1).world_size
        if devices.visible % fixed and devices.visible > fixed:
            usable = devices.visible // fixed * fixed
            return _refused(
                f"fsdp.dp_shard_size=-1 takes all {devices.visible} visible GPUs, but the other mesh sizes make "
                f"groups of {fixed}; use launcher.nproc_per_node={usable} or sizes whose product divides "
                f"{devices.visible}"
            )
        asked = max(devices.visible, fixed)
    if asked > devices.visible:
        return _too_few(config, devices, asked)
    obstacle = torch_obstacle(devices.visible)
    if obstacle is not None:
        return _refused(obstacle)
    return ProcessPlan("cuda", mesh_sizes(config, asked), (_using(asked, devices),))


def plan_node(config: TrainerConfig, devices: Devices | None = None) -> ProcessPlan:
    """Return what this node of a cluster will run, as one of the `launcher.nodes` of the job.

    The scheduler may show fewer GPUs than the node has; those that it shows count.
    """
    devices = visible_devices() if devices is None else devices
    plan = plan_processes(config)
    each, nodes = plan.num_processes, plan.num_nodes
    where = f"{nodes} nodes x {each} processes"
    on_cpu = dataclasses.replace(plan, device="cpu", lines=(f"using the CPU, {where}",))
    if config.trainer.device == "cpu":
        return on_cpu
    shown = f"{socket.gethostname()} shows {devices.visible} of its {devices.total} GPUs to this job"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown += f" (CUDA_VISIBLE_DEVICES={hidden})" if hidden is not None else ""
    if devices.visible >= each:
        obstacle = torch_obstacle(devices.visible)
        if obstacle is not None:
            return _refused(obstacle)
        return dataclasses.replace(plan, device="cuda", lines=(f"using {where}, a GPU each",))
    is_small = num_parameters(config.model) < SMALL_MODEL_PARAMETERS
    if devices.visible == 0 and config.trainer.device == "auto" and is_small:
        return on_cpu
    return _refused(
        f"{shown}, and the run takes {each} on each node; see launcher.gpu_request={config.launcher.gpu_request} and "
        f"launcher.nproc_per_node={config.launcher.nproc_per_node}, or train on CPUs with trainer.device=cpu"
    )


def _processes_asked(config: TrainerConfig) -> int | None:
    """Return the processes that config names; None if it leaves them to the machine (dp_shard_size=-1, nproc auto)."""
    if config.launcher.name == "inline" and config.fsdp.dp_shard_size == -1:
        return mesh_with(config, 1).world_size  # a mesh of more than one is told by a rule
    if config.launcher.nproc_per_node != "auto":
        return int(config.launcher.nproc_per_node)
    return None if config.fsdp.dp_shard_size == -1 else mesh_with(config, config.fsdp.dp_shard_size).world_size


def _on_cpu(config: TrainerConfig, asked: int | None, lines: tuple[str, ...]) -> ProcessPlan:
    if asked is None:  # no GPU to count: one shard
        asked = mesh_with(config, -1).world_size
    plural = "es" if asked > 1 else ""
    return ProcessPlan("cpu", mesh_sizes(config, asked), (*lines, f"using the CPU, {asked} process{plural}"))


def _without_gpus(config: TrainerConfig, devices: Devices, asked: int | None) -> ProcessPlan:
    hidden = f" ({devices.total} hidden by CUDA_VISIBLE_DEVICES)" if devices.total else ""
    if config.trainer.device == "cuda":
        return _refused(
            f"trainer.device=cuda but this machine shows no NVIDIA GPU{hidden}; use trainer.device=auto or cpu"
        )
    if num_parameters(config.model) >= SMALL_MODEL_PARAMETERS:
        return _refused(
            f"no NVIDIA GPU here{hidden}, and a model of {_count(config)} parameters is not trained on a CPU unless "
            "asked; run it where GPUs are, choose a smaller model=..., or insist with trainer.device=cpu"
        )
    return _on_cpu(config, asked, (f"no NVIDIA GPU{hidden}",) if hidden else ())


def _too_few(config: TrainerConfig, devices: Devices, asked: int) -> ProcessPlan:
    there = f"{devices.visible} of {devices.total} are visible"
    shortage = f"the mesh asks for {asked} processes, one GPU each, and {there}"
    if config.trainer.device == "auto" and num_parameters(config.model) < SMALL_MODEL_PARAMETERS:
        return _on_cpu(config, asked, (f"{shortage}; the model is small ({_count(config)} parameters)",))
    return _refused(
        f"{shortage}; use accelerator.pp_size, fsdp.dp_shard_size and fsdp.dp_replicate_size whose product is at most "
        f"{devices.visible}, a machine with more GPUs, or trainer.device=cpu"
    )


def _refused(fault: str) -> ProcessPlan:
    return ProcessPlan("cpu", MeshSizes(), faults=(fault,))


def _count(config: TrainerConfig) -> str:
    return f"{num_parameters(config.model) / 1e6:,.1f} M"


def _using(asked: int, devices: Devices) -> str:
    names = devices.names[:asked]
    consecutive = all(name.isdigit() for name in names) and len(names) > 1
    consecutive = consecutive and [int(name) for name in names] == list(range(int(names[0]), int(names[0]) + asked))
    which = f"{names[0]}-{names[-1]}" if consecutive else ", ".join(names)
    return f"using {asked} of {devices.total} GPU{'s' if devices.total > 1 else ''} ({which})"
