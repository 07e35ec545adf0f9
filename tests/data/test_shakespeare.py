"""The shipped text is the text that was meant, and its split is by position."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import pytest

from hp_train.data import shakespeare
from hp_train.errors import HpTrainError


def test_the_shipped_text_is_whole_and_split_by_position() -> None:
    text = shakespeare.load_text()
    assert len(text) == shakespeare.TEXT_BYTES == shakespeare.NUM_TRAIN_BYTES + shakespeare.NUM_VAL_BYTES
    assert hashlib.sha256(text).hexdigest() == shakespeare.TEXT_SHA256
    assert shakespeare.load_train_text() + shakespeare.load_val_text() == text
    assert shakespeare.NUM_VAL_BYTES == pytest.approx(len(text) / 10, abs=1)


def test_it_is_clean_ascii_with_seven_plays() -> None:
    text = shakespeare.load_text().decode("ascii")
    assert not set(text) & set("*_#\\\t\r")
    lines = text.split("\n")
    titles = [
        "Romeo and Juliet",
        "A Midsummer Night's Dream",
        "Hamlet",
        "Othello",
        "King Lear",
        "Macbeth",
        "The Tempest",
    ]
    places = [lines.index(title) for title in titles]
    assert places == sorted(places) and lines.count("ACT V") == 7
    assert "To be, or not to be: that is the question:" in lines


@pytest.mark.parametrize("damage", [b"", b"not gzip", gzip.compress(b"another text", mtime=0)])
def test_a_damaged_file_is_said_to_be(damage: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "shakespeare.txt.gz"
    file.write_bytes(damage)
    monkeypatch.setattr(shakespeare, "TEXT_FILE", file)
    with pytest.raises(HpTrainError, match="install hp-train again"):
        shakespeare.load_text()


def test_a_file_cut_short_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "shakespeare.txt.gz"
    file.write_bytes(shakespeare.TEXT_FILE.read_bytes()[:-1000])
    monkeypatch.setattr(shakespeare, "TEXT_FILE", file)
    with pytest.raises(HpTrainError, match="install hp-train again"):
        shakespeare.load_text()
