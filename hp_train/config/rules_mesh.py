"""Rules on the sizes of the mesh. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from hp_train.config.rule import Rule
from hp_train.config.schema import TrainerConfig
from hp_train.config.schema_tree import value_at
from hp_train.topology import MeshSizes

_NOT_YET = ("accelerator.tp_size", "accelerator.cp_size", "accelerator.ep_size", "fsdp.edp_shard_size")
SIZE_KEYS = (
    "accelerator.pp_size", "fsdp.dp_replicate_size", "fsdp.dp_shard_size", "accelerator.cp_size", "accelerator.tp_size",
)  # fmt: skip
"""In the order of `topology.DIMENSIONS`."""


def known_mesh(config: TrainerConfig) -> MeshSizes | None:
    """Return the mesh that the config alone determines; None if `fsdp.dp_shard_size=-1` leaves it to the machine."""
    mesh = mesh_with(config, config.fsdp.dp_shard_size)
    if config.fsdp.dp_shard_size != -1:
        return mesh
    asked = processes_asked(config)
    return None if asked is None or asked % mesh.world_size else mesh_with(config, asked // mesh.world_size)


def mesh_with(config: TrainerConfig, dp_shard: int) -> MeshSizes:
    """Return the mesh of `config` with `dp_shard` shards; -1, which the machine decides, counts as 1."""
    return MeshSizes(
        pp=config.accelerator.pp_size,
        dp_replicate=config.fsdp.dp_replicate_size,
        dp_shard=1 if dp_shard == -1 else dp_shard,
        cp=config.accelerator.cp_size,
        tp=config.accelerator.tp_size,
    )


def processes_asked(config: TrainerConfig) -> int | None:
    """Return the number of processes that the launcher section names; None for auto."""
    if config.launcher.nproc_per_node == "auto":
        return None
    return int(config.launcher.nproc_per_node) * config.launcher.nodes


def _sizes_not_yet(config: TrainerConfig) -> Iterator[str]:
    for key in _NOT_YET:
        size = value_at(config, key)
        if size > 1:
            yield f"{key}={size} is not supported yet; use 1"


def _mode(config: TrainerConfig) -> Iterator[str]:
    fsdp = config.fsdp
    if fsdp.dp_mode == "ddp" and fsdp.dp_shard_size != 1:
        yield (
            f"fsdp.dp_shard_size={fsdp.dp_shard_size} must be 1 in fsdp.dp_mode=ddp, which replicates; "
            "set fsdp.dp_replicate_size, or use fsdp=fsdp or fsdp=hsdp"
        )
    if fsdp.dp_mode == "fsdp" and fsdp.dp_replicate_size != 1:
        yield (
            f"fsdp.dp_replicate_size={fsdp.dp_replicate_size} must be 1 in fsdp.dp_mode=fsdp, which shards; "
            "set fsdp.dp_shard_size, or use fsdp=ddp or fsdp=hsdp"
        )


def _nodes(config: TrainerConfig) -> Iterator[str]:
    if config.launcher.name == "local" and config.launcher.nodes > 1:
        yield (
            f"launcher.nodes={config.launcher.nodes}: launcher=local starts processes on this machine only; use 1, or "
            "launcher=slurm"
        )


def _inline(config: TrainerConfig) -> Iterator[str]:
    if config.launcher.name != "inline":
        return
    keys = (*SIZE_KEYS, "launcher.nodes", "launcher.nproc_per_node")
    for key in keys:
        size = value_at(config, key)
        if isinstance(size, int) and size > 1:
            yield f"{key}={size}: launcher=inline runs one process; use 1, or launcher=local"


def _product(config: TrainerConfig) -> Iterator[str]:
    asked = processes_asked(config)
    if asked is None:
        return
    sizes = mesh_with(config, config.fsdp.dp_shard_size)
    factors = [f"{key}={size}" for key, size in zip(SIZE_KEYS, sizes.as_tuple(), strict=True) if size > 1]
    product = sizes.world_size
    nodes = config.launcher.nodes
    text = f"launcher.nproc_per_node={config.launcher.nproc_per_node}"
    if nodes > 1:
        text = f"launcher.nodes={nodes} x {text} = {asked}"
    mesh = f"{' x '.join(factors)} = {product}" if factors else "1"
    if config.fsdp.dp_shard_size == -1:
        if asked % product:
            yield f"{text} is not a multiple of the mesh {mesh}; use a multiple of {product}, or auto"
    elif asked != product and nodes > 1:
        yield f"{text} is not the mesh {mesh}; the two must be equal, or fsdp.dp_shard_size=-1 takes all"
    elif asked != product:
        yield f"{text} is not the mesh {mesh}; use {product}, or auto, or fsdp.dp_shard_size=-1 to take all"


RULES = (
    Rule(_NOT_YET, _sizes_not_yet),
    Rule(("fsdp.dp_mode", "fsdp.dp_shard_size", "fsdp.dp_replicate_size"), _mode),
    Rule(("launcher.name", "launcher.nodes"), _nodes),
    Rule((*SIZE_KEYS, "launcher.name", "launcher.nproc_per_node", "launcher.nodes"), _inline),
    Rule((*SIZE_KEYS, "launcher.nproc_per_node", "launcher.nodes"), _product),
)
