"""The scripts about the shipped text: the bigram table against a slow count, and the mark-up that is taken out."""

from __future__ import annotations

import importlib.util
import json
import math
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_bigram_table_equals_a_slow_count() -> None:
    train, val = b"the cat sat on the mat and ate that", b"that hat, the cat \xff"
    pairs, firsts = Counter(zip(train, train[1:], strict=False)), Counter(train[:-1])
    losses = [-math.log((pairs[a, b] + 1) / (firsts[a] + 256)) for a, b in zip(val, val[1:], strict=False)]
    found = load("bigram_baseline").bigram_nats_per_byte(train, val)
    assert found == pytest.approx(sum(losses) / len(losses), rel=1e-12)


def test_the_last_validation_loss_of_a_run_is_found(tmp_path: Path) -> None:
    rows = [{"step": 1, "val_loss": None}, {"step": 2, "val_loss": 2.5}, {"step": 3, "val_loss": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load("bigram_baseline").last_val_loss(tmp_path) == (2, 2.5)


def test_mark_up_goes_and_words_stay() -> None:
    markdown = (
        "# Hamlet\n\n## ACT I\n\n_Enter HAMLET,\nreading_\n\n"
        "**HAMLET**  \n_\\[Aside]_  \nWords, words'\\--  \nwords.\n\n\n\n"
        "_Enter Priest, & c_\n\n__\\[Reads]_\nno\u2014\n"
    )
    assert load("build_shakespeare").plain_text(markdown) == (
        "Hamlet\n\nACT I\n\n[Enter HAMLET,\nreading]\n\nHAMLET\n[Aside]\nWords, words'--\nwords.\n\n"
        "[Enter Priest, &c]\n\n[Reads]\nno--\n"
    )
