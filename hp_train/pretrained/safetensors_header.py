"""What tensors the safetensors files of a directory hold, read off their headers. No torch.

The format is a length, a JSON header and raw bytes (https://github.com/huggingface/safetensors#format): a model of any
size is described in milliseconds. A directory is one `model.safetensors`, or several files that
`model.safetensors.index.json` lists; other safetensors files beside them (adapters, an original's second copy) are none
of the model's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from hp_train.errors import ConfigError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SUFFIX = ".safetensors"
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Dtypes that weights are read from; the others are of quantised models."""

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the format's own bound


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a model on disk: the file's name in the directory, dtype in safetensors' spelling, shape."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def stored_tensors(folder: Path, setting: str) -> dict[str, StoredTensor]:
    """Return name -> tensor for the model in the directory `folder`; `setting` is the key as typed, for errors.

    Raises ConfigError, one line, for files that are missing, cut short or malformed, or that hold a tensor twice.
    """
    tensors: dict[str, StoredTensor] = {}
    files, listed = _files(folder, setting)
    for file in files:
        for name, tensor in _read_header(folder, file, setting).items():
            if name in tensors:
                raise ConfigError(f"{setting}: {name} is both in {tensors[name].file} and in {file}")
            tensors[name] = tensor
    lost = [name for name, file in listed.items() if name not in tensors or tensors[name].file != file]
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise ConfigError(
            f"{setting}: {INDEX_FILE} puts {lost[0]}{more} into {listed[lost[0]]}, which does not hold it"
        )
    return tensors


def _files(folder: Path, setting: str) -> tuple[list[str], Mapping[str, str]]:
    """Return the names of the model's files, and where the index says that each tensor is."""
    index = folder / INDEX_FILE
    if index.exists():
        listed = _read_index(index, setting)
        return sorted(set(listed.values())), listed
    if (folder / SINGLE_FILE).exists():
        return [SINGLE_FILE], {}
    if not folder.is_dir():
        raise ConfigError(f"{setting} does not exist")
    found = sorted(path.name for path in folder.iterdir() if path.name.endswith(SUFFIX))
    if len(found) == 1:
        return found, {}
    if found:
        raise ConfigError(
            f"{setting} holds {len(found)} safetensors files and no {INDEX_FILE}, which says what is in which"
        )
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
    hint = f"; {pickled[0]} must be converted first" if pickled else ""
    raise ConfigError(f"{setting} holds no safetensors file{hint}")


def _read_index(index: Path, setting: str) -> dict[str, str]:
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        assert isinstance(listed, dict)
        assert all(isinstance(file, str) and Path(file).name == file for file in listed.values())
    except OSError as error:
        raise ConfigError(f"{setting}: {INDEX_FILE} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AssertionError):
        raise ConfigError(f"{setting}: {INDEX_FILE} is damaged: it has no weight_map of names to files") from None
    return listed


def _read_header(folder: Path, file: str, setting: str) -> dict[str, StoredTensor]:
    path = folder / file
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            text = stream.read(length) if length <= _MAX_HEADER_BYTES else b""
        num_bytes = path.stat().st_size - _LENGTH_BYTES - length
    except FileNotFoundError:
        raise ConfigError(f"{setting}: {file} is missing") from None
    except OSError as error:
        raise ConfigError(f"{setting}: {file} cannot be read ({error.strerror})") from None
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        tensors = {name: _tensor(file, entry) for name, entry in entries.items()}
        expected = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise ConfigError(f"{setting}: {file} is damaged or no safetensors file") from None
    if num_bytes != expected:
        raise ConfigError(f"{setting}: {file} holds {num_bytes:,} bytes of tensors where its header says {expected:,}")
    return tensors


def _tensor(file: str, entry: Any) -> StoredTensor:
    shape = tuple(int(size) for size in entry["shape"])
    begin, end = entry["data_offsets"]
    dtype = str(entry["dtype"])
    if dtype in DTYPE_BYTES and end - begin != prod(shape) * DTYPE_BYTES[dtype]:
        raise ValueError("the bytes are not those of the shape")
    return StoredTensor(file, dtype, shape)
