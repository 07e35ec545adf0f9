"""Write a safetensors file tensor by tensor. Imports torch and `layout`.

The format (https://github.com/huggingface/safetensors#format) is a length, a JSON header and raw little-endian bytes.
The library's own writer builds the whole file in memory; here at most one tensor is copied at a time, and the SHA-256
is taken of the bytes as they pass instead of reading the file again.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hp_train.checkpoint.layout import FileRecord

DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES_BY_CODE = {code: dtype for dtype, code in DTYPE_CODES.items()}

_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor to write; `resolve` is called when its turn comes."""

    key: str
    dtype: torch.dtype
    shape: torch.Size
    resolve: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """Return the size of the tensor's data."""
        return self.shape.numel() * self.dtype.itemsize


def write_safetensors(path: Path, entries: Sequence[Entry]) -> FileRecord:
    """Write `entries` to `path` under a temporary name, flush it to the disk, rename it; return size and SHA-256.

    Raises OSError (disk full, no permission); then `path` does not exist.
    """
    assert sys.byteorder == "little", "safetensors data is little-endian"
    # Wide types first, so that every tensor is aligned to its own element size in the memory-mapped file.
    ordered = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.key))
    header = _header(ordered)
    checksum = hashlib.sha256(header)
    num_bytes = len(header)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(header)
        for entry in ordered:
            data = _raw_bytes(entry)
            file.write(data)
            checksum.update(data)
            num_bytes += len(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return FileRecord(num_bytes, checksum.hexdigest())


def _header(entries: Sequence[Entry]) -> bytes:
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for entry in entries:
        assert entry.key not in table, f"{entry.key} twice in one file"
        end = position + entry.num_bytes
        table[entry.key] = {
            "dtype": DTYPE_CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _raw_bytes(entry: Entry) -> memoryview:
    tensor = entry.resolve().detach()
    assert tensor.dtype == entry.dtype and tensor.shape == entry.shape, f"{entry.key} changed between plan and write"
    return memoryview(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
