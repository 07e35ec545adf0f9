"""Batches against a slow reference that walks documents token by token, in every way to treat document boundaries."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_train.config.schema import DataSection
from hp_train.data import windows
from hp_train.data.order import sequence_indices
from hp_train.data.source import IGNORED, UNLIMITED, Corpus, CorpusSource, open_data
from hp_train.data.token_folder import BYTE_VOCABULARY
from hp_train.data.windows import DocumentOffsets, OnePerDocument
from hp_train.data.writer import TokenFolderWriter
from hp_train.errors import ConfigError, HpTrainError

PAD = 99


def corpus_of(lengths: list[int], begin: int = 0, end: int | None = None) -> Corpus:
    """Documents of distinct tokens, so that a misplaced token shows."""
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    end = int(offsets[-1]) if end is None else end
    return Corpus(
        np.arange(1000, 1000 + offsets[-1], dtype=np.uint16)[begin:end], DocumentOffsets(offsets, begin, end), PAD
    )


@dataclass
class Row:
    """One sequence of the reference: input token (None: padding), target (None: ignored), position, visible keys."""

    tokens: list[int | None]
    targets: list[int | None]
    positions: list[int]
    keys: list[set[int]]


def reference_rows(documents: list[list[int]], boundaries: str, seq_len: int, keep_tail: bool) -> list[Row]:
    """Every sequence of an epoch, by definition rather than by arithmetic."""
    if boundaries == "pad":
        texts = [[(token, 0) for token in document] for document in documents]
        keep_tail = True
    else:
        texts = [[(token, number) for number, document in enumerate(documents) for token in document]]
    rows = []
    for text in texts:
        for start in range(0, len(text) - 1, seq_len):
            inputs, nexts = text[start : start + seq_len], text[start + 1 : start + seq_len + 1]
            if len(nexts) < seq_len and not keep_tail:
                continue
            rows.append(reference_row(inputs, nexts, boundaries, seq_len))
    return rows


def reference_row(inputs: list, nexts: list, boundaries: str, seq_len: int) -> Row:
    isolate = boundaries == "isolate"
    row = Row([], [], [], [])
    for place in range(len(inputs)):
        token, document = inputs[place]
        crosses = place >= len(nexts) or (isolate and nexts[place][1] != document)
        visible = {key for key in range(place + 1) if not isolate or inputs[key][1] == document}
        row.tokens.append(token)
        row.targets.append(None if crosses else nexts[place][0])
        row.positions.append(place - min(visible))
        row.keys.append(visible)
    missing = seq_len - len(inputs)
    row.tokens += [None] * missing
    row.targets += [None] * missing
    return row


def check(source: CorpusSource, expected: list[Row], seq_len: int, order: list[int]) -> None:
    batch = source.batch(range(len(order)))
    for number, sequence in enumerate(order):
        row = expected[sequence]
        num_inputs = len(row.positions)
        assert batch.tokens[number].tolist() == [PAD if token is None else token for token in row.tokens]
        assert batch.targets[number].tolist() == [IGNORED if target is None else target for target in row.targets]
        positions = np.arange(seq_len) if batch.positions is None else batch.positions[number]
        assert positions[:num_inputs].tolist() == row.positions
        ids = np.zeros(seq_len, dtype=int) if batch.document_ids is None else batch.document_ids[number]
        for place in range(num_inputs):
            assert {key for key in range(place + 1) if ids[key] == ids[place]} == row.keys[place]


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    seq_len=st.integers(1, 9),
    boundaries=st.sampled_from(["attend", "isolate", "pad"]),
    seed=st.one_of(st.none(), st.integers(0, 99)),
    borders=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_batches_equal_the_reference(
    lengths: list[int], seq_len: int, boundaries: str, seed: int | None, borders: tuple[float, float]
) -> None:
    """Also for a part of a corpus whose borders cut documents."""
    total = sum(lengths)
    begin, end = sorted(int(border * total) for border in borders)
    if end == begin:
        begin, end = 0, total
    tokens = list(range(1000, 1000 + total))
    starts = np.cumsum([0, *lengths])
    documents = [tokens[max(a, begin) : min(b, end)] for a, b in zip(starts[:-1], starts[1:], strict=True)]
    expected = reference_rows(
        [document for document in documents if document], boundaries, seq_len, keep_tail=seed is None
    )
    source = CorpusSource(corpus_of(lengths, begin, end), boundaries, seq_len, seed, vocab_size=5000)
    n = len(expected)
    assert source.num_sequences == n
    if n:
        order = list(range(n)) if seed is None else sequence_indices(seed, range(2 * n), n).tolist()
        check(source, expected, seq_len, order)


def test_counting_documents_in_blocks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(0).integers(1, 40, size=500)
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    numbers = np.random.default_rng(1).permutation(sum(-(-(length - 1) // 7) for length in lengths))
    bounds = {}
    for block in (1 << 16, 16):
        monkeypatch.setattr(windows, "_BLOCK", block)
        cut = OnePerDocument(DocumentOffsets(offsets, 0, int(offsets[-1])), seq_len=7)
        assert cut.num_sequences == len(numbers)
        bounds[block] = cut.bounds(numbers)
    assert np.array_equal(bounds[1 << 16], bounds[16])


@pytest.mark.parametrize("boundaries", ["attend", "isolate", "pad"])
def test_validation_counts_each_token_once_in_batches_of_any_size(boundaries: str) -> None:
    lengths = [5, 1, 17, 30, 2]
    corpus = corpus_of(lengths)
    source = CorpusSource(corpus, boundaries, seq_len=8, seed=None, vocab_size=5000)
    targets = np.concatenate([source.batch(range(first, first + 4)).targets for first in range(0, 20, 4)])
    assert source.num_sequences < 20 and (targets[source.num_sequences :] == IGNORED).all()
    predicted = targets[targets != IGNORED].tolist()
    first_tokens = {1000} if boundaries == "attend" else set(1000 + np.cumsum([0, *lengths])[:-1])
    assert sorted(predicted) == sorted(set(corpus.tokens.tolist()) - first_tokens)


def write_folder(out: Path, lengths: list[int], first: int = 0) -> None:
    with TokenFolderWriter(out, "uint16", eos_id=None) as writer:
        ids = (np.arange(sum(lengths), dtype=np.uint32) + first) % 250
        writer.add(ids, np.array(lengths, dtype=np.int64))
        writer.finish(BYTE_VOCABULARY, [], None)


def test_the_last_tenth_is_held_out_unless_other_text_is_given(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", [40, 60])
    write_folder(tmp_path / "val", [50], first=200)
    config = DataSection(name="tokens", path=str(tmp_path / "train"))
    seen = open_data(config, 9, 0, "train", 260).batch(range(9))
    held_out = open_data(config, 9, 0, "val", 260).batch([0])
    assert sorted(np.unique(seen.tokens)) == list(range(81)) and seen.targets.max() == 81
    assert held_out.tokens[0].tolist() == list(range(90, 99)) and held_out.targets[0].tolist() == list(range(91, 100))
    config.val_path = str(tmp_path / "val")
    assert open_data(config, 9, 0, "train", 260).num_sequences == 11
    assert open_data(config, 9, 0, "val", 260).batch([0]).tokens[0].tolist() == list(range(200, 209))


def test_training_order_follows_the_seed_and_validation_does_not() -> None:
    config = DataSection(name="shakespeare")
    batches = {
        (split, seed): open_data(config, 64, seed, split, 260).batch(range(8)).tokens
        for split in ("train", "val")
        for seed in (1, 2)
    }
    assert not np.array_equal(batches["train", 1], batches["train", 2])
    assert np.array_equal(batches["val", 1], batches["val", 2])


def test_random_tokens_depend_on_seed_split_and_sample_alone() -> None:
    config = DataSection(name="random")
    source = open_data(config, 32, 5, "train", 1000)
    batch = source.batch([7, 8, 10**12])
    assert source.num_sequences == UNLIMITED
    assert np.array_equal(source.batch([10**12]).tokens[0], batch.tokens[2])
    assert np.array_equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    others = [open_data(config, 32, 6, "train", 1000), open_data(config, 32, 5, "val", 1000)]
    assert not any(np.array_equal(other.batch([7]).tokens[0], batch.tokens[0]) for other in others)
    many = source.batch(range(2000)).tokens
    assert many.min() == 0 and many.max() == 999
    # 64,000 draws from 1,000 values: each count is Poisson with mean 64, so 6 standard deviations hold for all.
    assert np.abs(np.bincount(many.ravel(), minlength=1000) - 64).max() < 6 * 8


@pytest.mark.parametrize(
    ("config", "seq_len", "vocab_size", "message"),
    [
        (
            DataSection(name="shakespeare"),
            900_000,
            260,
            "trainer.seq_len=900000 is longer than the data: 820,314 training tokens",
        ),
        (
            DataSection(name="shakespeare"),
            64,
            100,
            "model.vocab_size=100 is too small: data=shakespeare holds token id 127",
        ),
        (
            DataSection(name="shakespeare", tokenizer="x.json"),
            64,
            260,
            "data.tokenizer=x.json: data=shakespeare is read as bytes",
        ),
        (
            DataSection(name="tokens"),
            64,
            260,
            "data.path is not set: data=tokens needs a folder made by `hp-train data prepare",
        ),
        (DataSection(name="shakespear"), 64, 260, "data.name=shakespear is unknown; use shakespeare, tokens, random"),
    ],
)
def test_data_that_does_not_fit_is_refused_in_one_line(
    config: DataSection, seq_len: int, vocab_size: int, message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        open_data(config, seq_len, 0, "train", vocab_size)
    assert refused.value.messages[0].startswith(message)
    assert len(refused.value.messages) == 1 and "\n" not in refused.value.messages[0]


def test_documents_of_one_token_leave_nothing_to_predict(tmp_path: Path) -> None:
    write_folder(tmp_path / "singles", [1] * 50)
    config = DataSection(name="tokens", path=str(tmp_path / "singles"), document_boundaries="pad")
    with pytest.raises(ConfigError, match="no document is longer than one token"):
        open_data(config, 8, 0, "train", 260)


def test_a_token_beyond_the_vocabulary_never_reaches_the_model() -> None:
    source = CorpusSource(corpus_of([30]), "attend", 8, None, vocab_size=1020)
    source.batch([0])
    with pytest.raises(HpTrainError, match="token id 1024, beyond the vocabulary of 1020"):
        source.batch([0, 1, 2])
