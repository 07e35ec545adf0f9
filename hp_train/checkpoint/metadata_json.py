"""DCP's `Metadata` to JSON and back. Imports torch and `layout`.

For every tensor: dtype, shape, and its pieces with offsets, sizes and the file and key that hold each. What is read
back is checked before use: a checkpoint may come from a stranger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hp_train.checkpoint.layout import METADATA, Manifest, folder_name
from hp_train.checkpoint.safetensors_file import DTYPE_CODES, DTYPES_BY_CODE
from hp_train.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Location:
    """Where one piece of a tensor is stored: file name inside the checkpoint, key inside the file."""

    file: str
    key: str


Locations = dict[MetadataIndex, Location]


def encode_metadata(metadata: Metadata, locations: Mapping[MetadataIndex, Location]) -> dict[str, Any]:
    """Return `metadata` with the place of every piece as values that JSON can hold."""
    tensors = {}
    for name, tensor in sorted(metadata.state_dict_metadata.items()):
        assert isinstance(tensor, TensorStorageMetadata), f"{name} is not a tensor"
        chunks = []
        for chunk in tensor.chunks:
            location = locations[MetadataIndex(name, chunk.offsets)]
            chunks.append(
                {
                    "offsets": list(chunk.offsets),
                    "sizes": list(chunk.sizes),
                    "file": location.file,
                    "key": location.key,
                }
            )
        code = DTYPE_CODES[tensor.properties.dtype]
        tensors[name] = {"dtype": code, "shape": list(tensor.size), "chunks": chunks}
    return {"tensors": tensors}


def decode_metadata(content: object, manifest: Manifest) -> tuple[Metadata, Locations]:
    """Return what `encode_metadata` was given. Raises CheckpointError when it makes no sense."""
    tensors: dict[str, TensorStorageMetadata] = {}
    locations: Locations = {}
    try:
        for name, entry in content["tensors"].items():  # type: ignore[index]
            tensors[name] = _decode_tensor(name, entry, manifest, locations)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        problem = f"{METADATA} makes no sense ({error!r})"
        raise CheckpointError(f"checkpoint {folder_name(manifest.step)} is damaged: {problem}") from error
    return Metadata(dict(tensors)), locations


def _decode_tensor(name: str, entry: Any, manifest: Manifest, locations: Locations) -> TensorStorageMetadata:
    shape = _sizes(entry["shape"])
    chunks, covered = [], 0
    for piece in entry["chunks"]:
        chunk = ChunkStorageMetadata(_sizes(piece["offsets"]), _sizes(piece["sizes"]))
        if not _fits(chunk, shape):
            raise ValueError(f"{name} has a piece at {tuple(chunk.offsets)} outside its shape {tuple(shape)}")
        if piece["file"] not in manifest.files:
            raise ValueError(f"{name} lies in {piece['file']!r}, which the manifest lacks")
        locations[MetadataIndex(name, chunk.offsets)] = Location(piece["file"], str(piece["key"]))
        chunks.append(chunk)
        covered += chunk.sizes.numel()
    if covered != shape.numel():
        raise ValueError(f"{name} has {shape.numel()} elements, its pieces {covered}")
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES_BY_CODE[entry["dtype"]]), shape, chunks)


def _sizes(values: Any) -> torch.Size:
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{values!r} is not a list of sizes")
    return torch.Size(values)


def _fits(chunk: ChunkStorageMetadata, shape: torch.Size) -> bool:
    if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
        return False
    pieces = zip(chunk.offsets, chunk.sizes, shape, strict=True)
    return all(offset + size <= whole for offset, size, whole in pieces)
