"""Save a checkpoint: all ranks together, complete or not at all. Imports torch and the rest of this folder.

torch.distributed.checkpoint plans and carries each rank's success or failure to all; only when every rank has written
does rank 0 commit, and only then prune older checkpoints: a save that fails leaves them as they were.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from hp_train.checkpoint.agreement import first_failure, is_distributed, rank_and_world
from hp_train.checkpoint.layout import encode_json
from hp_train.checkpoint.retention import delete_folder
from hp_train.checkpoint.state import CheckpointState, shards_to_save
from hp_train.checkpoint.storage import SafetensorsWriter, SavePolicy, ShardSavePlanner
from hp_train.checkpoint.tensor_shard import TensorShard
from hp_train.errors import CheckpointError, SupersededError

_LOGGER = logging.getLogger(__name__)


def save_checkpoint(
    checkpoints_dir: Path,
    step: int,
    state: CheckpointState,
    policy: SavePolicy,
    *,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Save `state` as the checkpoint of `step` and return its folder. Collective over `group` (default: all ranks).

    Raises on every rank: CheckpointError when any rank could not write, the checkpoints before are then untouched;
    SupersededError when a newer attempt has taken over, nothing is then written.
    """
    shards, progress = shards_to_save(state), encode_json(dict(state.progress))
    return write_shards(checkpoints_dir, step, shards, progress, policy, group=group)


def write_shards(
    checkpoints_dir: Path,
    step: int,
    shards: Mapping[str, TensorShard],
    progress: bytes,
    policy: SavePolicy,
    *,
    group: dist.ProcessGroup | None,
) -> Path:
    """Write, commit and prune; the part of a save that needs no live training state."""
    writer = SafetensorsWriter(checkpoints_dir, step, progress, policy)
    try:
        with warnings.catch_warnings():
            if not is_distributed():
                warnings.filterwarnings("ignore", message="torch.distributed is")  # one process is what is meant
            dcp.save(dict(shards), storage_writer=writer, planner=ShardSavePlanner(), process_group=group)
    except CheckpointException as error:
        rank, cause = first_failure(error)
        if isinstance(cause, SupersededError):
            raise SupersededError(str(cause)) from None
        if rank_and_world(group)[0] == 0:
            _discard(writer.folder)
        if isinstance(cause, OSError | CheckpointError):
            raise CheckpointError(
                f"the checkpoint of step {step} was not written (rank {rank}: {cause}); those before it are untouched"
            ) from error
        raise RuntimeError(f"saving the checkpoint of step {step} failed on rank {rank}: {cause!r}\n{error}") from error
    return writer.final


def _discard(folder: Path) -> None:
    # What was written of it may be what filled the disk.
    try:
        if folder.exists():
            delete_folder(folder)
    except OSError as error:
        _LOGGER.warning("the unfinished checkpoint %s could not be deleted: %s", folder, error)
