"""From global sample indices to batches of tokens, in numpy; knows no rank and no device.

May import errors and the other modules of `data` that are free of torch. A corpus is a memory-mapped run of tokens
with the offsets of its documents. `Packed` and `OnePerDocument` cut it into windows of at most seq_len + 1 tokens,
one for each sequence; `CorpusSource` looks up the window of a sample and lays inputs, targets, positions and document
ids out of it.

The three ways to treat document boundaries:
    attend   documents back to back; attention, positions and targets run across them
    isolate  documents back to back; attention stays inside a document, positions restart, and no target crosses
    pad      a document starts a new sequence; what is left of its last sequence is padding with ignored targets
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hp_train import registry
from hp_train.data import shakespeare
from hp_train.data.index import SHAKESPEARE, DataConfig, describe_source, num_held_out_tokens
from hp_train.data.megatron import MegatronIndex, is_megatron
from hp_train.data.order import hash_words, sequence_indices
from hp_train.data.token_folder import BYTE_VOCABULARY, DOCUMENTS_FILE, TOKENS_FILE, TokenIndex
from hp_train.data.windows import DocumentOffsets, OnePerDocument, Packed, Windows
from hp_train.errors import ConfigError, HpTrainError

IGNORED = -100
"""Target of a position that is not predicted; torch's cross_entropy ignores this value by default."""
UNLIMITED = 2**62
"""`num_sequences` of a source that has no end."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences for one forward. All arrays are int64 [batch, seq].

    `targets` are the tokens one step ahead, IGNORED where nothing is predicted. `positions` is None if they are
    0, 1, ... in every row. `document_ids` is None if attention is plainly causal; else a token attends only to earlier
    tokens of its row with the same id.
    """

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    positions: NDArray[np.int64] | None = None
    document_ids: NDArray[np.int64] | None = None


class TokenSource(Protocol):
    """Sequences of one split. The same sample gives the same row in any batch, on any rank, at any time."""

    num_sequences: int

    def batch(self, samples: Sequence[int]) -> Batch:
        """Rows for the global sample indices `samples`, in their order."""
        ...


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens of one split, `tokens` [num_tokens] unsigned, and where its documents start."""

    tokens: NDArray[np.unsignedinteger]
    offsets: DocumentOffsets
    pad_id: int


def open_data(config: DataConfig, seq_len: int, seed: int, split: str, vocab_size: int) -> TokenSource:
    """Open the `train` or `val` split of what `config` names, cut into sequences of `seq_len` tokens.

    Training samples go on for ever, each epoch in a new order that depends on `seed`; a last window shorter than
    seq_len is left out. Validation sample i is sequence i whatever the seed, the last sequence is padded instead of
    left out, and samples from num_sequences on are rows in which every target is ignored: so any number of whole
    batches may be read, and each token of the split counts once.

    Raises ConfigError if the data is missing, damaged, shorter than a sequence or beyond the vocabulary.
    """
    assert split in ("train", "val"), f"no split {split!r}"
    plugged = registry.find("data", config.name)
    if plugged is not None and not config.mix:
        own = None if plugged.config is None else getattr(config, plugged.name)
        return registry.resolve(plugged.build)(own, seq_len=seq_len, seed=seed, split=split, vocab_size=vocab_size)
    if config.name == "random" and not config.mix:
        return RandomSource(seq_len, seed, split, vocab_size)
    boundaries = str(config.document_boundaries)
    faults = describe_source(config).faults(
        seq_len=seq_len, vocab_size=vocab_size, document_boundaries=boundaries, evaluates=split == "val"
    )
    if faults:
        raise ConfigError(*faults)

    def cut(corpus: Corpus, setting: str) -> CorpusSource:
        source = CorpusSource(corpus, boundaries, seq_len, None if split == "val" else seed, vocab_size)
        if source.num_sequences == 0:
            raise ConfigError(f"{setting}: the {split} part, {len(corpus.tokens):,} tokens, leaves nothing to predict")
        return source

    if config.mix:
        from hp_train.data.mix import MixedSource  # it builds on this module

        sources = {name: cut(_open_part(config, name, split), f"data.mix.{name}") for name in config.mix}
        return MixedSource(sources, config.mix)
    if config.name == SHAKESPEARE:
        return cut(_open_shakespeare(split), "data=shakespeare")
    assert config.path is not None, "describe_source has refused this"
    return cut(_open_tokens(config.path, config.val_path, "data.path", split), "data=tokens")


class CorpusSource:
    """Sequences cut from a corpus. `seed` None means the fixed order of validation."""

    def __init__(self, corpus: Corpus, boundaries: str, seq_len: int, seed: int | None, vocab_size: int) -> None:
        assert boundaries in ("attend", "isolate", "pad"), f"no document boundaries {boundaries!r}"
        self._corpus = corpus
        self._isolate = boundaries == "isolate"
        self._seq_len = seq_len
        self._seed = seed
        self._vocab_size = vocab_size
        self._pad_id = corpus.pad_id if corpus.pad_id < vocab_size else 0  # never predicted, never attended to
        self._windows: Windows
        if boundaries == "pad":
            self._windows = OnePerDocument(corpus.offsets, seq_len)
        else:
            self._windows = Packed(len(corpus.tokens), seq_len, keep_tail=seed is None)
        self.num_sequences = self._windows.num_sequences

    def batch(self, samples: Sequence[int]) -> Batch:
        """See `TokenSource`. Raises HpTrainError if the file holds a token id beyond the vocabulary."""
        starts, stops = self._windows.bounds(self._sequences(samples))
        rows = np.full((len(samples), self._seq_len + 1), self._pad_id, dtype=np.int64)
        for row, start, stop in zip(rows, starts, stops, strict=True):
            row[: stop - start] = self._corpus.tokens[start:stop]
        for extreme in (rows.max(), rows.min()) if rows.size else ():
            if not 0 <= extreme < self._vocab_size:
                raise HpTrainError(f"the data holds token id {extreme}, beyond the vocabulary of {self._vocab_size}")
        targets = rows[:, 1:].copy()
        targets[np.arange(self._seq_len) >= (stops - starts)[:, None] - 1] = IGNORED
        if not self._isolate:
            return Batch(rows[:, :-1].copy(), targets)
        document_ids, positions = self._documents(starts, stops)
        targets[document_ids[:, 1:] != document_ids[:, :-1]] = IGNORED
        return Batch(rows[:, :-1].copy(), targets, positions[:, :-1].copy(), document_ids[:, :-1].copy())

    def _sequences(self, samples: Sequence[int]) -> NDArray[np.int64]:
        if self._seed is None:
            return np.asarray(samples, dtype=np.int64)
        return sequence_indices(self._seed, samples, self.num_sequences)

    def _documents(
        self, starts: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Document ids and positions, [batch, seq + 1]: ids count from 0 in each row, padding is one more document."""
        begins = np.zeros((len(starts), self._seq_len + 1), dtype=np.int64)
        for row, start, stop in zip(begins, starts, stops, strict=True):
            row[self._corpus.offsets.strictly_inside(start, stop) - start] = 1
            row[stop - start :][:1] = 1
        document_ids = begins.cumsum(axis=1)
        places = np.arange(self._seq_len + 1)
        positions = places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
        return document_ids, positions


class RandomSource:
    """Tokens made from seed, split, sample and place by a hash; nothing to learn, and no file. For measuring speed."""

    num_sequences = UNLIMITED

    def __init__(self, seq_len: int, seed: int, split: str, vocab_size: int) -> None:
        self._seq_len = seq_len
        self._key = int(hash_words(seed, split == "val")[0])
        self._vocab_size = vocab_size

    def batch(self, samples: Sequence[int]) -> Batch:
        """See `TokenSource`."""
        sample_words = np.asarray(samples, dtype=np.uint64)[:, None]
        places = np.arange(self._seq_len + 1, dtype=np.uint64)
        words = hash_words(self._key, sample_words, places)
        rows = (words % np.uint64(self._vocab_size)).astype(np.int64)
        return Batch(rows[:, :-1].copy(), rows[:, 1:].copy())


def _open_shakespeare(split: str) -> Corpus:
    text = shakespeare.load_train_text() if split == "train" else shakespeare.load_val_text()
    tokens = np.frombuffer(text, dtype=np.uint8)
    one_document = DocumentOffsets(np.array([0, len(tokens)], dtype=np.int64), 0, len(tokens))
    assert BYTE_VOCABULARY.pad_id is not None
    return Corpus(tokens, one_document, BYTE_VOCABULARY.pad_id)


def _open_part(config: DataConfig, name: str, split: str) -> Corpus:
    """One source of a mix; each holds out a tenth of its own."""
    if name == SHAKESPEARE and name not in config.sources:
        return _open_shakespeare(split)
    return _open_tokens(config.sources[name], None, f"data.sources.{name}", split)


def _open_tokens(path: str, val_path: str | None, key: str, split: str) -> Corpus:
    """The files at `val_path` for val, if it is given, else those at `path`, of which a tenth is held out."""
    if split == "val" and val_path:
        path, key = val_path, "data.val_path"
    tokens, offsets, pad_id = _map_megatron(path, key) if is_megatron(path) else _map_folder(path, key)
    begin, end = 0, len(tokens)
    if not val_path:
        cut = end - num_held_out_tokens(end)
        begin, end = (0, cut) if split == "train" else (cut, end)
    return Corpus(tokens[begin:end], DocumentOffsets(offsets, begin, end), pad_id)


def _map_folder(path: str, key: str) -> tuple[NDArray[np.unsignedinteger], NDArray[np.int64], int]:
    """Tokens, document offsets and padding id of a prepared folder, memory-mapped."""
    index = TokenIndex.read(path, key)
    tokens = np.memmap(Path(path, TOKENS_FILE), dtype=np.dtype(index.dtype).newbyteorder("<"), mode="r")
    offsets = np.memmap(Path(path, DOCUMENTS_FILE), dtype="<i8", mode="r")  # below 2**63: as good as the uint64 on disk
    if offsets[0] != 0 or offsets[-1] != index.num_tokens:
        raise ConfigError(f"{key}={path}: {DOCUMENTS_FILE} does not belong to {TOKENS_FILE}; prepare the data again")
    return tokens, offsets, index.vocabulary.pad_id or 0


def _map_megatron(path: str, key: str) -> tuple[NDArray[np.integer], NDArray[np.int64], int]:
    """Tokens of Megatron's files, memory-mapped, and their document offsets, which take 8 bytes of memory each."""
    index = MegatronIndex.read(path, key)
    dtype = np.dtype(index.dtype).newbyteorder("<")

    def mapped(kind: str, at: int, count: int) -> NDArray[np.integer]:
        return np.memmap(index.idx_path, dtype=kind, mode="r", offset=at, shape=(count,))

    positions = mapped("<i8", index.positions_at, index.num_sequences)
    lengths = mapped("<i4", index.lengths_at, index.num_sequences)
    firsts = mapped("<i8", index.documents_at, index.num_documents + 1)
    ends_well = (
        index.num_sequences > 0 and firsts[0] == 0 and firsts[-1] == index.num_sequences
        and positions[0] == 0 and positions[-1] + lengths[-1] * dtype.itemsize == index.num_tokens * dtype.itemsize
    )  # fmt: skip
    if not ends_well:
        raise ConfigError(
            f"{key}={path}: {index.idx_path.name} does not belong to {index.bin_path.name}; copy both again"
        )
    offsets = np.append(positions[firsts[:-1]] // dtype.itemsize, np.int64(index.num_tokens))
    return np.memmap(index.bin_path, dtype=dtype, mode="r"), offsets, 0
