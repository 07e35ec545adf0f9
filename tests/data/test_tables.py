"""Parquet files and Hugging Face datasets give the same tokens as the same documents in JSONL."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hp_train.data import inputs, tables
from hp_train.data.prepare import prepare
from hp_train.data.token_folder import TokenIndex
from hp_train.errors import ConfigError

TEXTS = [f"document {number}: \u00e9t\u00e9\n\ttext \U0001f3ad\x00" * (number % 5) for number in range(700)]


def tokens_of(folder: Path) -> tuple[bytes, bytes]:
    return (folder / "tokens.bin").read_bytes(), (folder / "documents.bin").read_bytes()


def test_every_format_gives_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets
    import pyarrow
    from pyarrow import parquet

    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    table = pyarrow.table({"id": np.arange(len(TEXTS)), "body": TEXTS})
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=100)
    saved = datasets.Dataset(table)
    saved.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": saved.select(range(10)), "held": saved}).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "hub").mkdir()
    parquet.write_table(table, tmp_path / "hub" / "train.parquet")
    sources = {
        "lines": (tmp_path / "lines.jsonl", {}),
        "parquet": (tmp_path / "rows.parquet", {"num_workers": 2}),
        "folder": (tmp_path / "saved", {}),
        "split": (f"hf:{tmp_path}/splits", {"split": "held"}),
        "streamed": (f"hf:{tmp_path}/hub", {}),
    }
    found = {}
    for name, (source, options) in sources.items():
        prepare([source], tmp_path / "out" / name, field="body", **options)
        found[name] = tokens_of(tmp_path / "out" / name)
    assert TokenIndex.read(tmp_path / "out" / "lines").num_documents == sum(1 for text in TEXTS if text)
    assert all(tokens == found["lines"] for tokens in found.values())
    recorded = json.loads((tmp_path / "out" / "parquet" / "sources.json").read_text())
    assert recorded[0]["bytes"] == (tmp_path / "rows.parquet").stat().st_size
    assert len(recorded[0]["sha256"]) == 64
    for source, options, words in (
        (tmp_path / "rows.parquet", {}, "rows.parquet: no field 'text'; it has 'id', 'body'; use --field"),
        (tmp_path / "saved", {}, "no field 'text'; it has 'id', 'body'"),
        (tmp_path / "rows.parquet", {"field": "id"}, "rows.parquet:1: field 'id' is not text but an int"),
        (f"hf:{tmp_path}/splits", {"split": "test"}, "has no split 'test'; use --split train or held"),
        (f"hf:{tmp_path}/nothing", {"field": "body"}, "hf:.*nothing cannot be read: "),
        (tmp_path / "lines.jsonl", {"split": "test"}, "--split test has no effect"),
        ("hf:", {}, "hf: names no dataset"),
    ):
        with pytest.raises(ConfigError, match=words) as refused:
            prepare([source], tmp_path / "none", **options)
        assert len(refused.value.messages) == 1
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no PAR1")
    with pytest.raises(ConfigError, match="bad.parquet is no Parquet file"):
        prepare([tmp_path / "bad.parquet"], tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_missing_library_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables.importlib.util, "find_spec", lambda name: None)
    (tmp_path / "rows.parquet").write_bytes(b"")
    with pytest.raises(ConfigError) as refused:
        inputs.find_inputs([tmp_path / "rows.parquet", "hf:some/name"])
    assert refused.value.messages == (
        "rows.parquet needs the package pyarrow: pip install 'hp-train[data]'",
        "hf:some/name needs the package datasets: pip install 'hp-train[data]'",
    )
