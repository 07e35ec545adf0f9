"""Save in the background: training stops for one copy into CPU memory, a thread does the rest. Imports torch.

What is written is the copy, so training may change every tensor at once. The thread talks over a gloo group of its
own: its exchanges can never be confused with training's collectives, and need no GPU. At most one save is in flight.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from hp_train.checkpoint.agreement import is_distributed
from hp_train.checkpoint.layout import encode_json, folder_name
from hp_train.checkpoint.save import write_shards
from hp_train.checkpoint.state import CheckpointState, shards_to_save
from hp_train.checkpoint.storage import SavePolicy
from hp_train.checkpoint.tensor_shard import TensorShard


class AsyncSaver:
    """Saves checkpoints of one run in the background. Every method is collective: all ranks call it alike.

    An error of a save in flight is raised by the next `save` or `wait`, on every rank. The buffers and the process
    group live as long as the process.
    """

    def __init__(self, checkpoints_dir: Path, policy: SavePolicy) -> None:
        self._checkpoints_dir = checkpoints_dir
        self._policy = policy
        self._group = dist.new_group(backend="gloo") if is_distributed() else None
        self._buffers: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, step: int, state: CheckpointState) -> Path:
        """Copy `state`, start writing it as the checkpoint of `step`, and return the folder it will have.

        Waits for the save before, if that is still in flight. Raises CheckpointError when that one failed.
        """
        self.wait()
        shards = self._stage(shards_to_save(state))
        progress = encode_json(dict(state.progress))
        # A daemon: a rank that fails must be able to exit, so that the launcher sees it, while this thread still
        # waits for peers that may be gone.
        self._thread = threading.Thread(
            target=self._write, args=(step, shards, progress), name=f"checkpoint-{step}", daemon=True
        )
        self._thread.start()
        return self._checkpoints_dir / folder_name(step)

    def wait(self) -> None:
        """Return when no save is in flight. Raises what the last one raised, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def peek_error(self) -> BaseException | None:
        """Return what the save in flight has failed with so far on this rank; it stays to be raised."""
        return self._error

    def _write(self, step: int, shards: Mapping[str, TensorShard], progress: bytes) -> None:
        try:
            write_shards(self._checkpoints_dir, step, shards, progress, self._policy, group=self._group)
        except BaseException as error:  # carried to the training thread, which raises it
            self._error = error

    def _stage(self, shards: Mapping[str, TensorShard]) -> dict[str, TensorShard]:
        """Return the shards over copies in CPU memory; buffers are made at the first save and used again."""
        staged = {}
        on_cuda = False
        for name, shard in shards.items():
            on_cuda |= shard.local.is_cuda
            buffer = self._buffer(name, shard.local)
            buffer.copy_(shard.local, non_blocking=True)
            staged[name] = TensorShard(buffer, shard.global_shape, shard.offsets)
        if on_cuda:
            torch.cuda.current_stream().synchronize()  # the copies must have landed before training goes on
        return staged

    def _buffer(self, name: str, source: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            # Pinned memory: the copy runs at the full speed of the bus, and does not block the host for each tensor.
            buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            self._buffers[name] = buffer
        return buffer
