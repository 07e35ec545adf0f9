"""Mixing sources: shares kept at every length, no sample lost or read twice, in whatever order they are asked for."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_train.commands.train import job_faults
from hp_train.config.compose import examine
from hp_train.config.schema import DataSection
from hp_train.data.index import describe_source, tokenizer_of
from hp_train.data.megatron import MAGIC
from hp_train.data.mix import MixedSource
from hp_train.data.source import IGNORED, Batch, open_data
from hp_train.errors import ConfigError, HpTrainError


class Numbered:
    """A source whose row i holds its own number and i."""

    def __init__(self, number: int, num_sequences: int) -> None:
        self.number, self.num_sequences = number, num_sequences

    def batch(self, samples: list[int]) -> Batch:
        rows = np.array([[self.number, sample] for sample in samples], dtype=np.int64)
        return Batch(rows, rows + 1)


def mix_of(weights: list[float], num_sequences: int = 10) -> MixedSource:
    sources = {str(number): Numbered(number, num_sequences) for number in range(len(weights))}
    return MixedSource(sources, dict(zip(sources, weights, strict=True)))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=5), st.integers(0, 2**40))
def test_shares_hold_from_the_first_sample_on_and_none_is_lost(weights: list[float], start: int) -> None:
    mix, total = mix_of(weights), sum(weights)
    rows = mix.batch(range(300)).tokens.tolist()
    for number, weight in enumerate(weights):
        own = [index for source, index in rows if source == number]
        assert own == list(range(len(own)))  # in order, without a gap: each of a source's samples once
        for length in (1, 7, 100, 300):
            count = sum(source == number for source, _ in rows[:length])
            assert abs(count - length * weight / total) <= len(weights) / 2 + 1e-6
    far = [mix.place(start + offset) for offset in range(50)]
    assert len(set(far)) == 50
    for number, weight in enumerate(weights):
        indices = [index for source, index in far if source == number]
        assert indices == sorted(indices)
        # shares are rounded to 2**-32: far out that is a drift of at most 2**-31 of the samples so far
        assert all(abs(index - start * weight / total) <= start * 2**-30 + 60 for index in indices)


def test_a_batch_is_the_same_in_any_order() -> None:
    mix, generator = mix_of([0.7, 0.2, 0.1]), np.random.default_rng(0)
    whole = mix.batch(range(40)).tokens
    order = generator.permutation(40)
    assert np.array_equal(mix.batch(order.tolist()).tokens, whole[order])
    assert np.array_equal(np.concatenate([mix.batch([sample]).tokens for sample in range(40)]), whole)


def test_validation_covers_each_token_once(tmp_path: Path) -> None:
    mine = write_megatron(tmp_path / "mine", [list(range(start, start + 50)) for start in range(0, 200, 50)])
    config = DataSection(mix={"shakespeare": 1.0, "mine": 3.0}, sources={"mine": str(mine)})
    alone = [open_data(part, 16, 0, "val", 300) for part in
             (DataSection(), DataSection(name="tokens", path=str(mine)))]  # fmt: skip
    assert alone[1].num_sequences == 2
    mixed = open_data(config, 16, 0, "val", 300)
    expected = sum((source.batch(range(source.num_sequences)).targets != IGNORED).sum() for source in alone)
    assert (mixed.batch(range(mixed.num_sequences)).targets != IGNORED).sum() == expected


def write_megatron(prefix: Path, documents: list[list[int]], dtype: str = "<u2", code: int = 8) -> Path:
    """Write the two files as Megatron-LM's index builder lays them out, a sequence a document."""
    tokens = np.concatenate([np.array(document) for document in documents]).astype(dtype)
    tokens.tofile(f"{prefix}.bin")
    lengths = np.array([len(document) for document in documents], dtype="<i4")
    positions = (np.concatenate([[0], np.cumsum(lengths)[:-1]]) * tokens.itemsize).astype("<i8")
    head = struct.pack("<9sQBQQ", MAGIC, 1, code, len(documents), len(documents) + 1)
    ends = np.arange(len(documents) + 1, dtype="<i8")
    Path(f"{prefix}.idx").write_bytes(head + lengths.tobytes() + positions.tobytes() + ends.tobytes())
    return prefix


@pytest.mark.parametrize(("dtype", "code"), [("<u2", 8), ("<i4", 4), ("<i8", 5)])
@pytest.mark.parametrize("boundaries", ["attend", "isolate", "pad"])
def test_megatron_files_read_like_a_prepared_folder(tmp_path: Path, dtype: str, code: int, boundaries: str) -> None:
    from hp_train.data.token_folder import BYTE_VOCABULARY
    from hp_train.data.writer import TokenFolderWriter

    documents = [[number * 7 % 250 for number in range(length)] for length in (30, 1, 55, 17, 90)]
    write_megatron(tmp_path / "megatron", documents, dtype, code)
    with TokenFolderWriter(tmp_path / "folder", "uint8", None) as writer:
        for document in documents:
            writer.add(np.array(document, dtype=np.uint32), np.array([len(document)]))
        writer.finish(BYTE_VOCABULARY, [], None)
    for split in ("train", "val"):
        one, two = (
            open_data(
                DataSection(name="tokens", path=str(tmp_path / name), document_boundaries=boundaries), 8, 3, split, 260
            )
            for name in ("megatron", "folder")
        )
        assert one.num_sequences == two.num_sequences
        left, right = one.batch(range(one.num_sequences)), two.batch(range(one.num_sequences))
        seen = right.targets != IGNORED
        assert np.array_equal(left.targets, right.targets)
        assert np.array_equal(left.tokens[seen], right.tokens[seen])  # padding ids differ, and mean nothing
        assert (left.positions is None) == (right.positions is None)
        assert left.positions is None or np.array_equal(left.positions[seen], right.positions[seen])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda prefix: Path(f"{prefix}.bin").unlink(), "own.bin cannot be read"),
        (lambda prefix: Path(f"{prefix}.idx").write_bytes(b"MMIDIDX\0\0"), "own.idx is no index of Megatron's"),
        (
            lambda prefix: Path(f"{prefix}.idx").write_bytes(Path(f"{prefix}.idx").read_bytes()[:-8]),
            "where its head says",
        ),
        (lambda prefix: Path(f"{prefix}.bin").write_bytes(b"abc"), "is no whole number of uint16 tokens"),
        (lambda prefix: Path(f"{prefix}.bin").write_bytes(b""), "holds no tokens"),
    ],
)
def test_damaged_megatron_files_are_one_line(tmp_path: Path, spoil, words: str) -> None:
    prefix = write_megatron(tmp_path / "own", [[1, 2, 3]] * 50)
    spoil(prefix)
    with pytest.raises(ConfigError, match=words):
        describe_source(DataSection(name="tokens", path=str(prefix)))


def test_what_only_the_tokens_tell_is_told_when_they_are_read(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "own", [[1, 2, -3]] * 50, "<i4", 4)
    with pytest.raises(HpTrainError, match="holds token id -3"):
        open_data(DataSection(name="tokens", path=str(prefix)), 8, 0, "train", 10).batch([0])
    data = Path(f"{prefix}.bin").read_bytes()
    Path(f"{prefix}.bin").write_bytes(data + data)
    with pytest.raises(ConfigError, match="own.idx does not belong to own.bin"):
        open_data(DataSection(name="tokens", path=str(prefix)), 8, 0, "train", 10)
    assert tokenizer_of(DataSection(name="tokens", path=str(prefix))) is None


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (["data.mix={shakespeare: 0.7, mine: 0.3}"], ["data.mix.mine: there is no source mine; use own, shakespeare"]),
        (
            ["data.mix={shakespeare: 0.7, own: -1}"],
            ["data.mix={shakespeare:0.7,own:-1.0} is out of bounds; use above 0"],
        ),
        (["data.mix={shakespeare: 0}"], ["is out of bounds; use above 0"]),
        (["data.mix=[shakespeare, own]"], ["data.mix", "mapping of names to numbers"]),
        (["data.mix={shakespeare: null}"], ["data.mix", "mapping of names to numbers"]),
        (["data.mix={own: 1, gone: 1}", "data.sources.gone=/gone"], ["data.sources.gone=/gone does not exist"]),
        (
            ["data.mix={own: 1}", "trainer.seq_len=600"],
            ["trainer.seq_len=600 is longer than data.mix.own: 540 training tokens"],
        ),
    ],
)
def test_a_mix_that_cannot_be_is_one_line(tmp_path: Path, overrides: list[str], lines: list[str]) -> None:
    own = write_megatron(tmp_path / "own", [[1, 2, 3]] * 200)
    found = job_faults(examine([f"data.sources.own={own}", "trainer.device=cpu", *overrides]))
    assert len(found) == 1 and all(line in found[0] for line in lines), found


def test_sources_of_two_tokenizers_are_refused(tmp_path: Path) -> None:
    from hp_train.data.prepare import prepare
    from hp_train.pretrained.tokenizer_files import byte_tokenizer_json

    (tmp_path / "tokenizer.json").write_text(byte_tokenizer_json())
    (tmp_path / "text.txt").write_text("a text " * 100)
    prepare([tmp_path / "text.txt"], tmp_path / "out", str(tmp_path / "tokenizer.json"))
    config = DataSection(mix={"shakespeare": 1.0, "mine": 1.0}, sources={"mine": str(tmp_path / "out")})
    with pytest.raises(ConfigError, match="mine holds ids of the tokenizer tokenizer.json .*, shakespeare of byte"):
        describe_source(config)
    one = replace(config, mix={"mine": 2.0})
    assert tokenizer_of(one) == str(tmp_path / "out" / "tokenizer.json")


def test_the_fingerprint_is_of_shares_and_content(tmp_path: Path) -> None:
    names = [write_megatron(tmp_path / name, [[number, 2, 3]] * 50) for number, name in enumerate(("a", "b"))]
    sources = {name.name: str(name) for name in names}

    def fingerprint(**mix: float) -> str:
        return describe_source(DataSection(mix=mix, sources=sources)).fingerprint

    assert fingerprint(a=1.0, b=3.0) == fingerprint(a=0.25, b=0.75)
    assert len({fingerprint(a=1.0), fingerprint(b=1.0), fingerprint(a=1.0, b=3.0), fingerprint(b=3.0, a=1.0)}) == 4


def test_paths_of_sources_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hp_train.config.paths import overrides_with_absolute_paths, with_absolute_paths

    monkeypatch.chdir(tmp_path)
    write_megatron(tmp_path / "own", [[1, 2, 3]] * 200)
    typed = ["data.mix={own: 2}", "data.sources.own=own"]
    config = examine([*typed, "trainer.device=cpu"]).config
    assert with_absolute_paths(config).data.sources == {"own": str(tmp_path / "own")}
    assert overrides_with_absolute_paths(typed, config) == [typed[0], f"data.sources.own={tmp_path / 'own'}"]
