"""Find the newest checkpoint that holds, and read it into a run on any mesh. Imports torch and the rest of this folder.

Resharding comes from torch.distributed.checkpoint: every rank reads those regions of the stored pieces that overlap
its own. Nothing in a checkpoint is executed: tensors are safetensors, everything else JSON.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from hp_train.checkpoint.agreement import first_failure, gather_all, is_distributed, rank_and_world
from hp_train.checkpoint.layout import (
    METADATA,
    PROGRESS,
    SAVING,
    Manifest,
    candidates,
    file_fault,
    read_json,
    read_manifest,
    step_folders,
)
from hp_train.checkpoint.metadata_json import Locations, decode_metadata
from hp_train.checkpoint.rng import PREFIX
from hp_train.checkpoint.state import CheckpointState, shards_to_load
from hp_train.checkpoint.storage import SafetensorsReader, ShardLoadPlanner
from hp_train.checkpoint.tensor_shard import TensorShard
from hp_train.errors import CheckpointError, ConfigError

_LOGGER = logging.getLogger(__name__)
_MAX_NAMED = 3  # names listed in an error before "and N more"


def find_checkpoint(checkpoints_dir: Path, group: dist.ProcessGroup | None = None) -> Path | None:
    """Return the newest checkpoint whose every byte matches its checksum, the same on all ranks, or None. Collective.

    Rank 0 says which folders there are; the ranks share the reading, and one rank's fault counts for all. A
    checkpoint that is incomplete or damaged is named in a warning of rank 0 and passed over.
    """
    rank, world_size = rank_and_world(group)
    names = gather_all([folder.path.name for folder in candidates(checkpoints_dir)] if rank == 0 else None, group)[0]
    if rank == 0:
        for folder in step_folders(checkpoints_dir):
            if folder.suffix == SAVING:
                _LOGGER.warning("checkpoint %s was never finished; passed over", folder.path)
    for name in names:
        folder = checkpoints_dir / name
        faults = [fault for fault in gather_all(_fault(folder, rank, world_size), group) if fault is not None]
        if not faults:
            return folder
        if rank == 0:
            _LOGGER.warning("%s; passed over", faults[0])
    return None


def _fault(folder: Path, rank: int, world_size: int) -> str | None:
    """Return what is wrong with the manifest or with this rank's share of the files, or None."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return str(error)
    for name in sorted(manifest.files)[rank::world_size]:
        fault = file_fault(folder, name, manifest.files[name])
        if fault is not None:
            return f"checkpoint {folder.name} is damaged: {fault}"
    return None


def load_checkpoint(folder: Path, state: CheckpointState, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Read the checkpoint in `folder` into `state`'s parameters and optimizer, and return its progress. Collective.

    The mesh may be another than the one that saved. Tensor files are taken to be whole: `find_checkpoint` has held
    them against their checksums. Raises on every rank, before anything is changed: CheckpointError when the folder
    cannot be read, ConfigError when it was written by a run of another model or optimizer.
    """
    shards, stored_names = shards_to_load(state)
    metadata, locations, progress = _read_headers(folder, group)
    _check_same_tensors(folder, metadata, shards, stored_names, group)
    reader = SafetensorsReader(folder, metadata, locations, stored_names)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            if not is_distributed():
                warnings.filterwarnings("ignore", message="torch.distributed is")  # one process is what is meant
            dcp.load(dict(shards), storage_reader=reader, planner=ShardLoadPlanner(), process_group=group)
    except CheckpointException as error:
        rank, cause = first_failure(error)
        raise CheckpointError(f"checkpoint {folder.name} could not be read (rank {rank}: {cause!r})") from error
    return progress


def _read_headers(folder: Path, group: dist.ProcessGroup | None) -> tuple[Metadata, Locations, dict[str, Any]]:
    fault: str | None = None
    try:
        manifest = read_manifest(folder)
        metadata, locations = decode_metadata(read_json(folder, manifest, METADATA), manifest)
        progress = _read_progress(folder, manifest)
    except CheckpointError as error:
        fault = str(error)
    for rank, fault in enumerate(gather_all(fault, group)):
        if fault is not None:
            raise CheckpointError(f"{fault} (seen by rank {rank})")
    return metadata, locations, progress


def _read_progress(folder: Path, manifest: Manifest) -> dict[str, Any]:
    progress = read_json(folder, manifest, PROGRESS)
    if not isinstance(progress, dict):
        raise CheckpointError(f"checkpoint {folder.name} is damaged: {PROGRESS} holds a {type(progress).__name__}")
    return progress


def _check_same_tensors(
    folder: Path,
    metadata: Metadata,
    shards: Mapping[str, TensorShard],
    stored_names: Mapping[str, str],
    group: dist.ProcessGroup | None,
) -> None:
    """Refuse a checkpoint that does not hold exactly this run's tensors; partial loading would train on noise."""
    saved = {name: tensor for name, tensor in metadata.state_dict_metadata.items() if not name.startswith(PREFIX)}
    wanted = {stored_names.get(name, name): shard for name, shard in shards.items()}
    missing = [name for name in wanted if name not in saved]
    different = [
        f"{name} is {_describe(saved[name].size, saved[name].properties.dtype)} in it and "
        f"{_describe(shard.global_shape, shard.local.dtype)} here"
        for name, shard in wanted.items()
        if name in saved and (saved[name].size, saved[name].properties.dtype) != (shard.global_shape, shard.local.dtype)
    ]
    of_ranks = gather_all((sorted(wanted), missing, different), group)
    used = {name for names, _, _ in of_ranks for name in names}
    faults = [
        ("lacks", _union(missing for _, missing, _ in of_ranks)),
        ("does not fit:", _union(different for _, _, different in of_ranks)),
        ("holds more than this run has:", [name for name in sorted(saved) if name not in used]),
    ]
    messages = [f"checkpoint {folder.name} {what} {_some(names)}" for what, names in faults if names]
    if messages:
        hint = "are model.* and optimizer.name those it was saved with?"
        raise ConfigError(*(f"{message} ({hint})" for message in messages))


def _union(lists: Any) -> list[str]:
    return sorted({name for names in lists for name in names})


def _describe(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
