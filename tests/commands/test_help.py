"""Help on groups, keys and verbs, and what is said to a command line written by another tool's habit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hp_train import cli
from hp_train.config.fields import Bounds
from hp_train.config.schema_tree import GROUPS, LEAVES, SECTIONS
from hp_train.verbs import VERB_GROUPS, VERBS


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Runs `hp-train WORDS` in this process, in an empty folder; gives the exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hp-train", *words])
        code = cli.main()
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


@pytest.mark.parametrize("section", SECTIONS)
def test_help_on_a_group_tells_every_key_with_what_it_takes(told, section: str) -> None:
    code, out, err = told("help", section)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert all(len(line) <= 120 for line in lines)
    text = " ".join(out.split())
    for key, leaf in LEAVES.items():
        if key.startswith(f"{section}."):
            [first] = [line for line in lines if line.split()[:1] == [key] and "default" in line]
            kind = first.split(maxsplit=1)[1]
            assert kind[0].islower(), "the type of the value comes first"
            bounds = leaf.bounds.describe() if leaf.bounds != Bounds() else ""
            assert bounds in text


def test_help_on_one_key_a_verb_and_what_is_both(told) -> None:
    code, out, _ = told("help", "trainer.max_grad_norm")
    assert code == 0 and out.startswith("  trainer.max_grad_norm  number; default 1.0; above 0 to 1e+09 or null\n")
    assert told("help", "recipes")[1].startswith("usage: hp-train recipes")
    both = told("help", "data")[1]
    assert both.startswith("data: What is read") and "usage: hp-train data" in both
    assert "recipe=NAME" in told("help", "recipe")[1] and told("help", "train")[0] == 0


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "train"])
def test_every_verb_has_help_and_stands_in_the_overview_once(told, verb: str) -> None:
    with pytest.raises(SystemExit) as exited:
        told(verb, "--help")
    assert exited.value.code == 0
    assert [verb in group for group in VERB_GROUPS.values()].count(True) == 1


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("help fsdpp", ("did you mean fsdp?",)),
        ("help max_steps", ("did you mean trainer.max_steps?",)),
        ("help trainer.max_stepz", ("did you mean trainer.max_steps?",)),
        ("llama_fsdp_pp trainer.seed=1", ("type hp-train recipe=llama_fsdp_pp trainer.seed=1",)),
        ("recipe llama_fsdp_pp", ("type hp-train recipe=llama_fsdp_pp",)),
        ("fsdp ddp", ("type hp-train fsdp=ddp",)),
        ("--trainer.max_steps 10", ("type hp-train trainer.max_steps=10",)),
        (
            "recipe=llama_pp --trainer.max_steps=10 pp=zbv",
            ("type hp-train recipe=llama_pp trainer.max_steps=10 pp=zbv",),
        ),
        ("--max_steps 10", ("type hp-train trainer.max_steps=10",)),
        ("--trainer.max_stepz 10", ("type hp-train trainer.max_steps=10",)),
        ("--recipe llama_pp", ("type hp-train recipe=llama_pp",)),
        ("--fsdp", ("type hp-train fsdp=...",)),
        ("--hlep", ("did you mean --help?",)),
        ("--cofnig-dir=x", ("did you mean --config-dir?",)),
        ("resum last", ("did you mean resume?", *VERBS)),
        ("lama_pp", ("did you mean recipe=llama_pp?",)),
        ("optimizer", ("optimizer=...: adamw, sgd",)),
        ("trainer", ("trainer.max_steps=",)),
    ],
)
def test_another_spelling_is_answered_with_the_right_one(told, typed: str, words: tuple[str, ...]) -> None:
    code, out, err = told(*typed.split())
    assert (code, out) == (2, "")
    [line] = err.splitlines()
    assert all(word in line for word in words), line


def test_groups_of_the_help_are_those_of_the_schema(told) -> None:
    out = told("help")[1]
    assert all(f"\n  {group} " in out for group in GROUPS)
