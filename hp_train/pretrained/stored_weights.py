"""The weights of a run's checkpoint, one whole tensor at a time, whatever mesh saved it. Imports torch.

A checkpoint holds each tensor in the pieces that its ranks had. Nothing is laid out in memory but the tensor that is
asked for, so that a model of any size can be copied out on a small machine. Optimizer state is never read.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from hp_train.checkpoint.layout import METADATA, Manifest, candidates, file_fault, read_json, read_manifest
from hp_train.checkpoint.metadata_json import Locations, decode_metadata
from hp_train.config.schema import ModelSection
from hp_train.errors import CheckpointError, ConfigError
from hp_train.models.shapes import parameter_shapes

_PREFIX = "model."  # before a parameter's name in the names of `checkpoint.state`


@dataclass(frozen=True, slots=True)
class _Source:
    """An undamaged checkpoint: its folder and what its JSON says of the tensors."""

    folder: Path
    step: int
    tensors: Mapping[str, TensorStorageMetadata]
    locations: Locations


class StoredWeights:
    """Context manager: the parameters in the newest undamaged checkpoint of a run, or in that of one step."""

    def __init__(self, run_dir: Path, model: ModelSection, step: int | None = None) -> None:
        """Find the checkpoint and hold its model files against their checksums.

        Raises ConfigError when there is none or it holds another model, CheckpointError when the one asked for is
        damaged.
        """
        self._source = _find(run_dir, step)
        self._files = ExitStack()
        self._open: dict[str, Any] = {}
        wanted = parameter_shapes(model)
        held = {name: tuple(tensor.size) for name, tensor in self._source.tensors.items()}
        if held != wanted:
            name = next(name for name in [*wanted, *held] if wanted.get(name) != held.get(name))
            raise ConfigError(
                f"checkpoint {self._source.folder} is not of the model in config.yaml: {name} is {held.get(name)} in "
                f"it and {wanted.get(name)} by the config"
            )
        self.names = tuple(wanted)

    @property
    def step(self) -> int:
        """Return the optimizer step after which the weights were saved."""
        return self._source.step

    @property
    def folder(self) -> Path:
        """Return the checkpoint's folder."""
        return self._source.folder

    def shape(self, name: str) -> torch.Size:
        """Return the shape of parameter `name`."""
        return self._source.tensors[name].size

    def read(self, name: str) -> torch.Tensor:
        """Return parameter `name` whole, in the dtype it was saved in, on the CPU."""
        tensor = self._source.tensors[name]
        pieces = [(chunk, self._piece(name, chunk.offsets)) for chunk in tensor.chunks]
        if len(pieces) == 1:
            return pieces[0][1]
        whole = torch.empty(tensor.size, dtype=tensor.properties.dtype)
        for chunk, piece in pieces:
            whole[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))] = piece
        return whole

    def _piece(self, name: str, offsets: torch.Size) -> torch.Tensor:
        location = self._source.locations[MetadataIndex(_PREFIX + name, offsets)]
        if location.file not in self._open:
            path = self._source.folder / location.file
            self._open[location.file] = self._files.enter_context(safe_open(path, framework="pt", device="cpu"))
        return self._open[location.file].get_tensor(location.key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._files.close()


def _find(run_dir: Path, step: int | None) -> _Source:
    faults = []
    found = [folder for folder in candidates(run_dir / "checkpoints") if step in (None, folder.step)]
    for folder in found:
        try:
            manifest = read_manifest(folder.path)
            source = _read_source(folder.path, manifest)
            fault = next(filter(None, (
                file_fault(folder.path, name, manifest.files[name])
                for name in sorted({location.file for location in source.locations.values()})
            )), None)  # fmt: skip
        except CheckpointError as error:
            fault = str(error)
        if fault is None:
            return source
        faults.append(f"{folder.path.name}: {fault}")
    if faults:
        raise CheckpointError(f"no checkpoint of {run_dir} can be read: {'; '.join(faults)}")
    steps = sorted({folder.step for folder in candidates(run_dir / "checkpoints")})
    if steps:
        raise ConfigError(f"run {run_dir} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    raise ConfigError(f"run {run_dir} has no complete checkpoint yet; it saves one at its end, or see checkpoint.every")


def _read_source(folder: Path, manifest: Manifest) -> _Source:
    metadata, locations = decode_metadata(read_json(folder, manifest, METADATA), manifest)
    tensors = {
        name.removeprefix(_PREFIX): tensor
        for name, tensor in metadata.state_dict_metadata.items()
        if name.startswith(_PREFIX)
    }
    mine = {index: place for index, place in locations.items() if index.fqn.startswith(_PREFIX)}
    return _Source(folder, manifest.step, tensors, mine)
