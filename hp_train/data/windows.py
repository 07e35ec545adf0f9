"""How a corpus is cut into windows, one a sequence: pure arithmetic on offsets. Imports numpy only.

A window holds at most seq_len + 1 tokens: seq_len inputs and, one step ahead, as many targets. Neighbouring windows of
the same text share one token, the last target of one and the first input of the next, so every token but the first of a
text is predicted exactly once an epoch.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_BLOCK = 1 << 16  # documents whose sequences are counted at a time


class Windows(Protocol):
    """Maps a sequence number to the half-open range of tokens it covers."""

    num_sequences: int

    def bounds(self, sequences: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First token and end of each sequence, int64 [batch]; both 0 for numbers from num_sequences on."""
        ...


class DocumentOffsets:
    """Where documents start within tokens [begin, end) of a corpus, counted from `begin`; the last entry is the end.

    `raw` is the int64 offsets of the whole corpus, usually a memory map: entries are clipped as they are read, so
    that a part of a corpus costs no copy. A document across either border is cut there.
    """

    def __init__(self, raw: NDArray[np.int64], begin: int, end: int) -> None:
        # Needles have the dtype of the map: with another one numpy would convert, and so load, the whole file.
        borders = np.array([begin, end], dtype=np.int64)
        first = np.searchsorted(raw, borders[:1], side="right")[0] - 1
        last = np.searchsorted(raw, borders[1:], side="left")[0]
        self._raw = raw[first : last + 1]
        self._begin = begin
        self._end = end

    def __len__(self) -> int:
        return len(self._raw)

    def __getitem__(self, where: slice | NDArray[np.int64]) -> NDArray[np.int64]:
        return np.clip(self._raw[where], self._begin, self._end) - self._begin

    def strictly_inside(self, start: int, stop: int) -> NDArray[np.int64]:
        """Starts of documents between `start` and `stop`, both excluded."""
        needles = np.array([start + 1, stop], dtype=np.int64) + self._begin
        first, last = np.searchsorted(self._raw, needles)
        return self[first:last]


class Packed:
    """Windows back to back over `num_tokens` tokens; `keep_tail` keeps a last one that is shorter than the others."""

    def __init__(self, num_tokens: int, seq_len: int, keep_tail: bool) -> None:
        num_targets = max(num_tokens - 1, 0)
        self._num_tokens = num_tokens
        self._seq_len = seq_len
        self.num_sequences = -(-num_targets // seq_len) if keep_tail else num_targets // seq_len

    def bounds(self, sequences: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See `Windows`."""
        starts = sequences * self._seq_len
        stops = np.minimum(starts + self._seq_len + 1, self._num_tokens)
        exists = sequences < self.num_sequences
        return np.where(exists, starts, 0), np.where(exists, stops, 0)


class OnePerDocument:
    """Windows that start anew with each document.

    A document of n tokens gives ceil((n - 1) / seq_len) windows, none if it has a single token. Only one running count
    for every 65,536 documents is held in memory; the counts inside a block are taken again when a batch needs them.
    """

    def __init__(self, offsets: DocumentOffsets, seq_len: int) -> None:
        self._offsets = offsets
        self._seq_len = seq_len
        counts = [int(self._counts(first).sum()) for first in range(0, len(offsets) - 1, _BLOCK)]
        self._block_ends = np.cumsum(counts, dtype=np.int64)
        self.num_sequences = int(self._block_ends[-1]) if counts else 0

    def _counts(self, first: int) -> NDArray[np.int64]:
        """Number of windows of each document in the block that begins with document `first`."""
        lengths = np.diff(self._offsets[first : first + _BLOCK + 1])
        return -(-np.maximum(lengths - 1, 0) // self._seq_len)

    def bounds(self, sequences: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See `Windows`."""
        starts, stops = np.zeros_like(sequences), np.zeros_like(sequences)
        blocks = np.searchsorted(self._block_ends, sequences, side="right")
        for block in np.unique(blocks[sequences < self.num_sequences]):
            members = blocks == block
            ends = np.cumsum(self._counts(block * _BLOCK))
            within = sequences[members] - (self._block_ends[block] - ends[-1])
            documents = np.searchsorted(ends, within, side="right")
            counts_before = np.concatenate([[0], ends])[documents]
            documents += block * _BLOCK
            starts[members] = self._offsets[documents] + (within - counts_before) * self._seq_len
            stops[members] = np.minimum(starts[members] + self._seq_len + 1, self._offsets[documents + 1])
        return starts, stops
