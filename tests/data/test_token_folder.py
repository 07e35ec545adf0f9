"""A folder of tokens that is not whole, not ours or not there is refused in one line that names the setting."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_train.data.prepare import prepare
from hp_train.data.token_folder import DOCUMENTS_FILE, INDEX_FILE, TOKENS_FILE, TokenIndex
from hp_train.data.writer import token_dtype
from hp_train.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("to be, or not to be\n")
    prepare([tmp_path / "a.txt"], tmp_path / "tokens")
    return tmp_path / "tokens"


def edit(**changes: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        fields = json.loads((folder / INDEX_FILE).read_text())
        fields.update(changes)
        (folder / INDEX_FILE).write_text(json.dumps(fields))

    return apply


def cut(name: str, num_bytes: int) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:num_bytes])


DAMAGE = {
    "tokens cut short": (cut(TOKENS_FILE, 6), "tokens.bin holds 6 bytes where index.json says 42"),
    "documents cut short": (cut(DOCUMENTS_FILE, 8), "documents.bin holds 8 bytes where index.json says 16"),
    "tokens missing": (lambda folder: (folder / TOKENS_FILE).unlink(), "tokens.bin cannot be read (No such file"),
    "newer version": (edit(version=2), "format version 2, this hp-train reads version 1; prepare the data again"),
    "someone else's index": (edit(format="other"), "index.json is damaged (ValueError: it is not marked as"),
    "index cut short": (cut(INDEX_FILE, 40), "index.json is damaged (JSONDecodeError"),
    "not text": (lambda folder: (folder / INDEX_FILE).write_bytes(b"\xff\xfe"), "index.json is damaged (not text)"),
    "a list": (lambda folder: (folder / INDEX_FILE).write_text("[]"), "index.json is damaged"),
    "unknown field": (edit(more=1), "index.json is damaged (TypeError"),
    "unknown dtype": (edit(dtype="int128"), "index.json is damaged (ValueError: dtype 'int128' is none of uint8"),
    "bool for a count": (edit(num_tokens=True), "index.json is damaged (ValueError: num_tokens True is not a count"),
    "vocabulary missing": (edit(vocabulary=None), "index.json is damaged (TypeError"),
    "no index": (
        lambda folder: (folder / INDEX_FILE).unlink(),
        "holds no prepared tokens; prepare it: hp-train data prepare",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_said_in_one_line(damage: str, folder: Path) -> None:
    apply, message = DAMAGE[damage]
    apply(folder)
    with pytest.raises(ConfigError) as refused:
        TokenIndex.read(folder, "data.val_path")
    (line,) = refused.value.messages
    assert line.startswith(f"data.val_path={folder}") and message in line and "\n" not in line


def test_text_and_missing_paths_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "my text.txt").write_text("words")
    with pytest.raises(ConfigError) as refused:
        TokenIndex.read(tmp_path / "my text.txt")
    command = f"hp-train data prepare '{tmp_path}/my text.txt' --tokenizer byte --out '{tmp_path}/my text-tokens'"
    assert str(refused.value).endswith(f"holds no prepared tokens; prepare it: {command}")
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        TokenIndex.read(tmp_path / "nowhere")


def test_an_index_survives_its_text(folder: Path) -> None:
    index = TokenIndex.read(folder)
    assert TokenIndex.from_json(index.to_json()) == index
    assert (index.num_tokens, index.num_documents, index.longest_document, index.max_token_id) == (21, 1, 21, 257)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_the_dtype_is_the_smallest_that_holds_the_ids(max_token_id: int) -> None:
    dtype = token_dtype(max_token_id)
    smaller = {"uint8": -1, "uint16": np.iinfo("uint8").max, "uint32": np.iinfo("uint16").max}[dtype]
    assert smaller < max_token_id <= np.iinfo(dtype).max


def test_describing_the_data_needs_neither_torch_nor_numpy_and_is_fast(folder: Path) -> None:
    """A config is checked on every start: the budget is milliseconds, and a tenth of a second would be noticed."""
    code = f"""
import sys, time
from types import SimpleNamespace
from hp_train.data.index import describe_source
base = dict(path={str(folder)!r}, val_path=None, tokenizer="byte", document_boundaries="attend", mix={{}}, sources={{}})
started = time.perf_counter()
for name in ("shakespeare", "tokens", "random"):
    info = describe_source(SimpleNamespace(name=name, **base))
    info.faults(seq_len=8, vocab_size=260, document_boundaries="attend", evaluates=True)
elapsed_s = time.perf_counter() - started
assert not {{"torch", "numpy"}} & set(sys.modules), "imported"
import hp_train.data.source, hp_train.data.order, hp_train.data.prepare, hp_train.commands.data
assert "torch" not in sys.modules
print(elapsed_s)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.1, f"{time.ctime()}: {done.stdout}"
