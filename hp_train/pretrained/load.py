"""Weights of a Hugging Face directory into a model that is cut over any mesh. Imports torch.

torch.distributed.checkpoint's HuggingFaceStorageReader does the reading: every rank asks for the regions that its own
shards cover, and reads those bytes of the files and no others. Values are converted to the parameters' dtype as they
are copied (bf16 to fp32 is exact).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem

from hp_train.checkpoint.agreement import first_failure, is_distributed
from hp_train.checkpoint.storage import ShardLoadPlanner
from hp_train.checkpoint.tensor_shard import TensorShard, shard_of
from hp_train.config.schema import ModelSection
from hp_train.errors import HpTrainError
from hp_train.pretrained.fit import KEY, directory, stored_name
from hp_train.pretrained.safetensors_header import stored_tensors


def load_pretrained(
    model: ModelSection, parameters: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """Fill `parameters`, this rank's by Hugging Face name, with the weights of `model.pretrained`. Collective.

    Every parameter is filled whole or HpTrainError is raised on all ranks. That the tensors are there with these shapes
    has been checked before any worker started (`fit.misfits`).
    """
    folder, setting = directory(model), f"{KEY}={model.pretrained}"
    tensors = stored_tensors(folder, setting)
    shards: dict[str, TensorShard] = {}
    copies: list[tuple[TensorShard, TensorShard]] = []  # a tied matrix that this rank holds twice: read once
    for name, parameter in parameters.items():
        stored, shard = stored_name(name, model, tensors), shard_of(parameter)
        if stored in shards:
            copies.append((shards[stored], shard))
        else:
            shards[stored] = shard
    files = sorted({tensor.file for tensor in tensors.values()})
    try:
        with warnings.catch_warnings(), torch.no_grad():
            if not is_distributed():
                warnings.filterwarnings("ignore", message="torch.distributed is")  # one process is what is meant
            dcp.load(
                dict(shards), storage_reader=_Reader(folder, files), planner=ShardLoadPlanner(), process_group=group
            )
            for original, copy in copies:
                copy.local.copy_(original.local)
    except CheckpointException as error:
        rank, cause = first_failure(error)
        raise HpTrainError(f"{setting} could not be read (rank {rank}: {cause!r})") from error


class _Reader(HuggingFaceStorageReader):
    """Reads the files that belong to the model: torch's own takes every safetensors file that lies in the folder."""

    def __init__(self, folder: Path, files: list[str]) -> None:
        super().__init__(str(folder))
        self.fs = _ListedFiles([str(folder / file) for file in files])


class _ListedFiles(FileSystem):
    def __init__(self, paths: list[str]) -> None:
        self._paths = paths

    def ls(self, path: str) -> list[str]:
        return list(self._paths)
