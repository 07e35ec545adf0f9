"""Token files of Megatron-LM, PREFIX.bin with PREFIX.idx, read as they are. Never torch nor numpy.

The index is little-endian: nine bytes `MMIDIDX\\0\\0`, uint64 version 1, uint8 code of the dtype, uint64 number of
sequences, uint64 number of documents plus one; then int32 length and int64 byte position of each sequence, and int64
number of the first sequence of each document, the end included. Only the head is read here; the arrays are mapped by
`source`, when a run starts.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path

from hp_train.errors import ConfigError

BIN, IDX = ".bin", ".idx"
MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_DTYPES = {1: ("uint8", 1), 2: ("int8", 1), 3: ("int16", 2), 4: ("int32", 4), 5: ("int64", 8), 8: ("uint16", 2)}
_HEAD = struct.Struct("<9sQBQQ")
_LENGTH_BYTES, _POSITION_BYTES = 4, 8
_SAMPLED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class MegatronIndex:
    """What the head of an .idx file and the sizes of both files say. `dtype` is numpy's name of the tokens' type."""

    prefix: Path
    dtype: str
    num_tokens: int
    num_sequences: int
    num_documents: int

    @property
    def bin_path(self) -> Path:
        """Return the file of tokens."""
        return _with_suffix(self.prefix, BIN)

    @property
    def idx_path(self) -> Path:
        """Return the file of positions."""
        return _with_suffix(self.prefix, IDX)

    @property
    def lengths_at(self) -> int:
        """Return the byte at which the int32 lengths of the sequences begin, in the .idx file."""
        return _HEAD.size

    @property
    def positions_at(self) -> int:
        """Return the byte at which the int64 byte positions of the sequences begin."""
        return self.lengths_at + _LENGTH_BYTES * self.num_sequences

    @property
    def documents_at(self) -> int:
        """Return the byte at which the int64 sequence numbers of the documents begin, one more than documents."""
        return self.positions_at + _POSITION_BYTES * self.num_sequences

    def fingerprint(self) -> str:
        """Return a hash of both files' sizes and of their first and last MiB: they may be too large to be read."""
        checksum = hashlib.sha256()
        for path in (self.idx_path, self.bin_path):
            size = path.stat().st_size
            checksum.update(str(size).encode())
            with path.open("rb") as file:
                checksum.update(file.read(_SAMPLED_BYTES))
                file.seek(max(0, size - _SAMPLED_BYTES))
                checksum.update(file.read(_SAMPLED_BYTES))
        return checksum.hexdigest()

    @classmethod
    def read(cls, prefix: str | Path, key: str) -> MegatronIndex:
        """Read and check the files of `prefix`; `key` is the setting to name in errors.

        Raises ConfigError, one line, if they are damaged, cut short or of a kind that holds no tokens.
        """
        prefix, setting = Path(prefix), f"{key}={prefix}"
        try:
            with _with_suffix(prefix, IDX).open("rb") as file:
                head = file.read(_HEAD.size)
            idx_bytes, bin_bytes = (_with_suffix(prefix, suffix).stat().st_size for suffix in (IDX, BIN))
        except OSError as error:
            raise ConfigError(f"{setting}: {Path(error.filename).name} cannot be read ({error.strerror})") from None
        name = prefix.name + IDX
        if len(head) < _HEAD.size or not head.startswith(MAGIC):
            raise ConfigError(f"{setting}: {name} is no index of Megatron's memory-mapped data")
        _, version, code, num_sequences, num_ends = _HEAD.unpack(head)
        if version != _VERSION or code not in _DTYPES:
            raise ConfigError(
                f"{setting}: {name} has version {version} and dtype code {code}; 1 and {_codes()} can be read"
            )
        dtype, token_bytes = _DTYPES[code]
        index = cls(prefix, dtype, bin_bytes // token_bytes, num_sequences, num_ends - 1)
        expected = index.documents_at + _POSITION_BYTES * num_ends
        if idx_bytes not in (expected, expected + num_sequences):  # some files end with a mode for each sequence
            raise ConfigError(
                f"{setting}: {name} holds {idx_bytes:,} bytes where its head says {expected:,}; copy it again"
            )
        if bin_bytes % token_bytes or num_ends < 1:
            raise ConfigError(f"{setting}: {prefix.name + BIN} is no whole number of {dtype} tokens; copy it again")
        if index.num_tokens == 0:
            raise ConfigError(f"{setting} holds no tokens")
        return index


def is_megatron(path: str) -> bool:
    """Say whether `path` is the prefix of a pair of Megatron's files."""
    return not Path(path).is_dir() and _with_suffix(Path(path), IDX).exists()


def _with_suffix(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


def _codes() -> str:
    return ", ".join(f"{code} ({dtype})" for code, (dtype, _) in _DTYPES.items())
