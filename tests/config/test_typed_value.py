"""Text after `key=` as the schema means it: one table of spellings, and every text reaches the config through Hydra."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_train.config.argument import read_argument
from hp_train.config.compose import compose, examine
from hp_train.config.numbers import scalar
from hp_train.config.schema_tree import LEAVES
from hp_train.config.typed_value import Unreadable, quoted, read_value, split_top, typed_text, unquoted
from hp_train.config.yaml_text import read

NUMBERS = [
    ("1e5", 100_000), ("1.5e3", 1500), ("1.5", 1.5), ("-1", -1), ("+3", 3), ("1_000", 1000), ("0", 0), ("1e-3", 1e-3),
    ("1e400", math.inf), (".5", 0.5), ("-.inf", -math.inf), ("9223372036854775807", 2**63 - 1),
]  # fmt: skip
TEXTS = ["010", "1:30", "24:00:00", "1-00:00:00", "yes", "on", "off", "no", "0x10", "0o7", "2020-01-01", "1__0", "e5"]


@pytest.mark.parametrize(("word", "value"), [*NUMBERS, *((text, text) for text in TEXTS)])
def test_a_word_is_the_same_on_the_command_line_and_in_yaml(word: str, value: Any) -> None:
    assert (scalar(word), type(scalar(word))) == (value, type(value))
    assert (read(word), type(read(word))) == (value, type(value))


def test_yaml_keeps_truth_and_null() -> None:
    text = "[true, False, null, ~, , 'null', \"1\"]".replace(", ,", ",")
    assert read(text) == [True, False, None, None, "null", "1"]
    assert math.isnan(read(".nan"))


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("pp.layer_split", "8-8", [8, 8]), ("pp.layer_split", "[8, 8]", [8, 8]), ("pp.layer_split", "8", [8]),
        ("pp.layer_split", "1e1-2", [10, 2]), ("pp.layer_split", "-1-2", "-1-2"), ("pp.layer_split", "[]", []),
        ("optimizer.betas", "0.9-0.95", [0.9, 0.95]), ("optimizer.betas", "9e-1-0.95", [0.9, 0.95]),
        ("model.rope_scaling", "{factor: 4, low_freq_factor:1}", {"factor": 4, "low_freq_factor": 1}),
        ("data.sources", "{a: '~/x, y}', b c: ~/z}", {"a": "~/x, y}", "b c": "~/z"}),
        ("data.sources", '{a: it\'s, b: "{"}', {"a": "it's", "b": "{"}),
        ("trainer.run_name", "null", None), ("trainer.run_name", "'null'", "null"),
        ("trainer.run_name", "2024", "2024"),
        ("trainer.run_name", "'it''s'", "'it''s'"), ("trainer.run_name", "'a' or 'b'", "'a' or 'b'"),
    ],
)  # fmt: skip
def test_fields_read_their_own_way(key: str, text: str, value: Any) -> None:
    assert read_value(key, text) == value


@pytest.mark.parametrize("text", ["[1", "1]", "[1}", "{a:1", "'x", "[a,'b]"])
def test_what_does_not_close_cannot_be_read(text: str) -> None:
    with pytest.raises(Unreadable):
        read_argument(f"pp.layer_split={text}")


def test_commas_in_brackets_and_quotes_separate_nothing() -> None:
    assert split_top("[1,2],'a,b',{x:[3,4]},it's") == ["[1,2]", "'a,b'", "{x:[3,4]}", "it's"]


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1).filter(lambda s: s.strip())


@settings(max_examples=40, deadline=None)
@given(TEXT)
def test_hydra_reads_exactly_the_text(text: str) -> None:
    override = OverridesParser.create().parse_override(f"trainer.run_name={quoted(text)}")
    assert override.value() == text and not override.is_sweep_override()
    assert unquoted(quoted(text)) == text


@settings(max_examples=40, deadline=None)
@given(TEXT)
def test_a_written_text_is_read_back(text: str) -> None:
    assert read_value("trainer.run_name", typed_text(text)) == text


CHARACTERS = "a=b #c @d *e %f ,g [h {i ]j }k (l)m ~n $o \\p 'q \"r !s ?t &u |v ;w <x>"


@pytest.mark.parametrize("text", ["a=b", "[x", "~", "x,y", "a'b", "'", "a\\", "{", "*", "#1", "@", "%(x)s", CHARACTERS])
def test_text_arrives_in_the_config(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = examine([f"trainer.run_name={text}"])
    assert (job.messages, job.config.trainer.run_name) == ([], text)


def test_home_is_put_before_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    keys = [key for key, leaf in LEAVES.items() if leaf.is_path and key not in ("model.pretrained", "data.sources")]
    typed = [f"{key}=~/a b" for key in keys]
    job = examine([*typed, "data.sources.mine=~/a b", "pp.schedule=file:~/s.csv", "trainer.run_name=~x"])
    assert job.config.data.sources == {"mine": f"{tmp_path}/a b"}
    for key in keys:
        section, _, name = key.partition(".")
        assert getattr(getattr(job.config, section), name) == f"{tmp_path}/a b"
    assert job.config.pp.schedule == f"file:{tmp_path}/s.csv"
    assert job.config.trainer.run_name == "~x", "a name is no path"


def test_yaml_files_are_read_so_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    text = "# @package _global_\ntrainer:\n  max_steps: 1e5\n  run_name: 12:30:00\noptimizer:\n  lr: 1e-3\n"
    (tmp_path / "recipes/mine.yaml").write_text(text)
    trainer = compose(["recipe=mine"]).config.trainer
    assert (trainer.max_steps, trainer.run_name) == (100_000, "12:30:00")
