"""Tab completion: the words that are offered, and that bash, zsh and fish insert them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hp_train.commands.candidates import candidates
from hp_train.commands.completion import SCRIPTS
from hp_train.config.schema_tree import LEAVES
from hp_train.verbs import VERBS


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe of one's own, two runs, and a folder of tokens."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HP_TRAIN_RUNS", raising=False)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text("# @package _global_\n# My own.\n")
    for run in ("llama/20261130-100000-aaaa", "llama/20261130-110000-bbbb"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "config.yaml").touch()
    (tmp_path / "tokens").mkdir()
    (tmp_path / "with blank").mkdir()
    (tmp_path / "some.csv").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "offered", "withheld"),
    [
        ("", {*VERBS, "recipe=", "fsdp=", "fsdp.", "trainer."}, {"trainer=", "--help"}),
        ("re", {"resume", "recipes", "recipe="}, {"train"}),
        ("--c", {"--cfg", "--config-dir"}, {"--help"}),
        ("recipe=", {"recipe=mine", "recipe=llama_pp"}, set()),
        ("recipe=m", {"recipe=mine"}, {"recipe=llama_pp"}),
        ("recipe=llama_pp fsdp=", {"fsdp=ddp", "fsdp=fsdp", "fsdp=hsdp"}, set()),
        ("train fsdp=d", {"fsdp=ddp"}, {"fsdp=fsdp"}),
        ("trainer.", {f"{key}=" for key in LEAVES if key.startswith("trainer.")}, {"fsdp.dp_mode="}),
        ("model.rope_scaling.f", {"model.rope_scaling.factor="}, set()),
        (
            "fsdp.reshard_after_forward=",
            {f"fsdp.reshard_after_forward={word}" for word in ("auto", "true", "false")},
            set(),
        ),
        ("trainer.compile=t", {"trainer.compile=true"}, {"trainer.compile=false"}),
        ("trainer.max_grad_norm=", {"trainer.max_grad_norm=null"}, set()),
        ("pp.schedule=z", {"pp.schedule=zbv", "pp.schedule=zb_h1"}, {"pp.schedule=1f1b"}),
        ("data.path=t", {"data.path=tokens/"}, {"data.path=runs/"}),
        ("data.path=~/", set(), {"data.path=tokens/"}),
        ("--cfg ", {"job"}, {"recipe="}),
        ("--config-dir r", {"runs/", "recipes/"}, {"some.csv"}),
        ("resume ", {"last", "20261130-100000-aaaa", "20261130-110000-bbbb", "runs/"}, {"some.csv", "recipe="}),
        ("resume runs/l", {"runs/llama/"}, {"last"}),
        ("resume last trainer.max_st", {"trainer.max_steps="}, {"last"}),
        ("schedule ", {"list", "show", "draw", "lower", "verify"}, set()),
        ("schedule verify z", {"zbv", "zb_h1"}, {"1f1b"}),
        ("schedule verify zbv --", {"--pp", "--transport"}, {"--width"}),
        ("schedule show s", {"some.csv"}, {"runs/"}),
        ("help fs", {"fsdp"}, {"trainer"}),
        ("help trainer.max_s", {"trainer.max_steps"}, set()),
        ("completion ", {"bash", "zsh", "fish"}, set()),
        ("data prepare x.txt --tokenizer ", {"byte"}, set()),
        ("nonsense ", {"recipe="}, set()),
    ],
)
def test_what_is_offered(here: Path, typed: str, offered: set[str], withheld: set[str]) -> None:
    found = {text for text, _ in candidates(typed.split(" "))}
    assert offered <= found and not withheld & found
    assert all(text.startswith(typed.split(" ")[-1]) for text in found)


def test_own_recipes_of_a_folder_named_on_the_line_are_offered(here: Path) -> None:
    (here / "elsewhere").mkdir()
    (here / "elsewhere" / "theirs.yaml").write_text("# @package _global_\n# Theirs.\n")
    for words in (["--config-dir", "elsewhere"], ["--config-dir=elsewhere"], ["-cd", "elsewhere"]):
        assert dict(candidates([*words, "recipe=th"])) == {"recipe=theirs": "Theirs."}


def test_no_verb_loads_hydra_or_torch_to_tell_its_arguments() -> None:
    code = (
        "import sys\nfrom hp_train.commands.verb_parser import parser_of\nfrom hp_train.verbs import VERBS\n"
        "for verb in set(VERBS) - {'train'}:\n"
        "    parser_of(verb)\n    assert not {'hydra', 'torch'} & set(sys.modules), verb\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def command(here: Path) -> dict[str, str]:
    """An environment in which `hp-train` is the command under test."""
    bin_folder = here / "bin"
    bin_folder.mkdir()
    (bin_folder / "hp-train").write_text(f'#!/bin/sh\nexec {sys.executable} -m hp_train "$@"\n')
    (bin_folder / "hp-train").chmod(0o755)
    (here / "home").mkdir()
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("COMP_", "HP_TRAIN"))}
    return {**inherited, "PATH": f"{bin_folder}:{os.environ['PATH']}", "HOME": str(here / "home"), "TERM": "dumb"}


def _ask(words: list[str], env: dict[str, str], cwd: Path) -> list[str]:
    done = subprocess.run(words, env=env, cwd=cwd, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_across_the_equals_sign_where_it_breaks_words(here: Path, command: dict[str, str]) -> None:
    """The function is called as readline calls it; it replaces only what follows the last `=`."""
    asked = r"""
    eval "$(hp-train completion bash)"
    for COMP_LINE in "hp-train recipe=m" "hp-train res" "hp-train fsdp.dp_mode=" "OMP_NUM_THREADS=1 hp-train fsdp=d" \
            "hp-train sample --" "hp-train export last --to wi" 'hp-train data.path=with\ b' 'hp-train report "with'; do
        COMP_POINT=${#COMP_LINE}
        _hp_train 2> /dev/null  # compopt complains outside of a completion
        echo "${COMPREPLY[@]}" /
    done"""
    found = " ".join(_ask(["bash", "--norc", "-c", asked], command, here)).split(" /")
    assert [set(words.split()) for words in found[:4]] == [{"mine"}, {"resume"}, {"ddp", "fsdp", "hsdp"}, {"ddp"}]
    assert {"--prompt", "--seed"} <= set(found[4].split())
    assert [words.strip() for words in found[5:8]] == [r"with\ blank/", r"with\ blank/", "with blank/"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_take_their_script(here: Path, command: dict[str, str], shell: str) -> None:
    """Where the shell is installed it completes; the script is the same everywhere, and looked at elsewhere too."""
    script = SCRIPTS[shell]
    assert "completion --candidates" in script and script.count("{") == script.count("}")
    if shutil.which(shell) is None:
        return
    (here / "script").write_text(script)
    if shell == "fish":
        asked = r"source script; complete -C 'hp-train recipe=m'; complete -C 'hp-train report with\ b'"
        found = _ask(["fish", "--no-config", "-c", asked], command, here)
        assert found[0] == "recipe=mine" and found[-2:] == ["with", "blank/"]
    else:
        driver = r"""
        zmodload zsh/zpty
        zpty z zsh -f -i
        zpty -w z 'PS1=; source script; print READY'
        zpty -r z out '*READY*READY*'
        zpty -n -w z $'hp-train recipe=m\t'
        zpty -r z out '*recipe=mine*'
        print -r -- $out
        zpty -d z"""
        assert any("recipe=mine" in word for word in _ask(["zsh", "-f", "-c", driver], command, here))
