"""The command as a person types it: overview, recipes, help, printing, completion, several jobs, resuming."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hp_train import cli
from hp_train.commands import train as train_command
from hp_train.config.compose import compose
from hp_train.config.schema import TrainerConfig
from hp_train.config.schema_tree import GROUPS, LEAVES
from hp_train.config.search_path import RECIPES
from hp_train.launch import start
from hp_train.verbs import VERBS
from tests.command import hp_train, slowness_of_this_machine
from tests.commands.run_folders import saved_config

CFG_LIMIT_S = 0.5
RECIPE_NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))


def test_bare_command_prints_verbs_five_commands_and_recipes(tmp_path: Path) -> None:
    done = hp_train(cwd=tmp_path)
    assert (done.code, done.stderr) == (0, "")
    blocks = [block.splitlines() for block in done.stdout.split("\n\n")]
    assert [line.split()[0] for line in blocks[1][1:]] == list(VERBS)
    assert len(blocks[2][1:]) == 5 and all(line.startswith("  hp-train ") for line in blocks[2][1:])
    assert [line.split()[0] for line in blocks[3][1:]] == RECIPE_NAMES
    assert all(len(line.split()) > 3 for line in blocks[3][1:]), "each recipe has its line"


def test_the_commands_of_the_overview_compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose(["recipe=llama_fsdp_pp", "accelerator.pp_size=1", "fsdp.dp_shard_size=2"]).config
    assert (config.accelerator.pp_size, config.fsdp.dp_shard_size, config.fsdp.dp_mode) == (1, 2, "fsdp")


def test_recipes_tells_size_and_processes(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "bad.yaml").write_text("# @package _global_\n# Broken.\nnope: 1\ndefaults: 3\n")
    done = hp_train("recipes", cwd=tmp_path)
    assert (done.code, done.stderr) == (0, "")
    rows = {line.split()[0]: line.split(maxsplit=3)[1:] for line in done.stdout.splitlines()[1:]}
    assert set(rows) == {*RECIPE_NAMES, "bad"}
    assert rows["llama3_8b_fsdp"][:2] == ["8,030,261,248", "8"]
    assert rows["llama3_70b_fsdp_pp"][:2] == ["70,553,706,496", "32"]
    assert [rows[name][1] for name in ("llama_single", "llama_ddp", "llama_hsdp", "llama_fsdp_pp")] == list("1244")
    assert rows["smollm2_135m"][:2] == ["134,515,008", "all"]
    assert rows["bad"][0] == "broken"


def test_help_fits_a_screen_and_names_verbs_groups_and_options(tmp_path: Path) -> None:
    done = hp_train("--help", "recipe=llama_pp", cwd=tmp_path)
    assert (done.code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) < 60 and max(map(len, lines)) <= 120
    first_words = [line.split()[0] for line in lines if line.startswith("  ")]
    assert {*VERBS, *GROUPS, "--cfg", "recipe"} <= set(first_words)
    assert any(line.split() == ["fsdp", "ddp,", "fsdp,", "hsdp"] for line in lines)
    assert hp_train("help", cwd=tmp_path).stdout == done.stdout


def test_version(tmp_path: Path) -> None:
    assert hp_train("--version", cwd=tmp_path).stdout.startswith("hp-train 0.")


def test_cfg_prints_the_config_soon(tmp_path: Path) -> None:
    times = []
    for _ in range(3):
        done = hp_train("--cfg", "job", "recipe=llama_fsdp_pp", "trainer.seed=4", cwd=tmp_path)
        assert (done.code, done.stderr) == (0, "")
        times.append(done.wall_s)
        if done.wall_s >= CFG_LIMIT_S:
            times.append(done.wall_s / max(1.0, slowness_of_this_machine()))
    printed = yaml.safe_load(done.stdout)
    assert printed["trainer"]["seed"] == 4 and printed["accelerator"]["pp_size"] == 2
    assert set(printed) == {key.split(".")[0] for key in LEAVES}
    assert min(times) < CFG_LIMIT_S


def test_cfg_of_one_group(tmp_path: Path) -> None:
    done = hp_train("--cfg", "job", "--resolve", "-p", "fsdp", "trainer.seq_len=${model.dim}", cwd=tmp_path)
    assert yaml.safe_load(done.stdout)["dp_mode"] == "fsdp"


def test_info_shows_where_configs_are_looked_for(tmp_path: Path) -> None:
    done = hp_train("--info", "searchpath", cwd=tmp_path)
    assert done.code == 0 and "hp-train://" in done.stdout


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", ["--help", "schedule lower gpipe --pp 64 --microbatches 64"])
def test_output_that_can_not_be_written_is_one_line(arguments: str, unbuffered: str) -> None:
    command = [sys.executable, "-m", "hp_train", *arguments.split()]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": unbuffered}
        )
    assert (done.returncode, done.stderr) == (2, "hp-train: the output can't be written: No space left on device\n")


def test_closed_output_is_no_error() -> None:
    command = f"{sys.executable} -m hp_train schedule show gpipe --pp 2 --microbatches 2 >&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m hp_train --help | head -1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout.startswith("Usage: hp-train")


# --- what is started, without starting it --------------------------------------------------------------------------


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[TrainerConfig, str, list[str]]]:
    """Collects what would have been started; `main` runs in this process, in a folder of its own."""
    calls: list[tuple[TrainerConfig, str, list[str]]] = []

    def start_run(config: TrainerConfig, *, recipe: str, overrides: list[str], argv: list[str]) -> int:
        assert argv == sys.argv, "the command line as it was typed"
        calls.append((config, recipe, overrides))
        return 3 if config.trainer.seed == 33 else 75 if config.trainer.seed == 75 else 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_command, "start_run", start_run)
    return calls


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["hp-train", *arguments])
    return cli.main()


def test_a_run_is_started_once_with_what_was_typed(started: list, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["recipe=llama_pp", "trainer.device=cpu", "trainer.run_name=${model.name}"]
    assert main(monkeypatch, "train", *typed) == 0
    [(config, recipe, overrides)] = started
    assert (recipe, sorted(overrides)) == ("llama_pp", sorted(typed))
    assert (config.accelerator.pp_size, config.trainer.run_name) == (2, "llama")
    assert compose(overrides).config == config


def test_a_run_without_recipe_has_none(started: list, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(monkeypatch, "trainer.max_steps=3") == 0
    assert started[0][1] == ""


def test_a_setting_without_effect_is_told(
    started: list, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert main(monkeypatch, "pp=gpipe", "trainer.device=cpu") == 0
    assert "hp-train: warning: pp.schedule=gpipe has no effect" in capsys.readouterr().err


def test_multirun_runs_each_combination_and_ends_with_the_worst_code(
    started: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = main(monkeypatch, "--multirun", "trainer.seed=1,33,2", "recipe=llama_pp,llama_single", "trainer.device=cpu")
    assert [(config.trainer.seed, recipe) for config, recipe, _ in started] == [
        (seed, recipe) for seed in (1, 33, 2) for recipe in ("llama_pp", "llama_single")
    ]
    assert all(compose(overrides).config == config for config, _, overrides in started)
    assert code == 3


def test_multirun_starts_nothing_if_one_job_is_wrong(
    started: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        main(monkeypatch, "--multirun", "recipe=llama_pp", "trainer.global_batch_size=8,6", "trainer.device=cpu") == 2
    )
    assert main(monkeypatch, "--multirun", "trainer.seed=1,x") == 2
    assert started == [] and os.listdir(tmp_path) == []
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "trainer.global_batch_size=6" in lines[0] and "trainer.seed=x" in lines[1]


def test_multirun_stops_when_a_job_was_stopped(started: list, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(monkeypatch, "--multirun", "trainer.seed=1,75,2", "trainer.device=cpu") == 75
    assert [config.trainer.seed for config, _, _ in started] == [1, 75]


def test_resume_hands_over_the_changed_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def resume_run(run_dir: Path, config: TrainerConfig, **more: object) -> int:
        calls.append((run_dir, config, more))
        return 0

    monkeypatch.setattr(start, "resume_run", resume_run)
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(saved_config("{max_steps: 3, seed: 5, device: cpu}"))
    (run_dir / "overrides.yaml").write_text("recipe: ''\noverrides: [trainer.max_steps=3]\n")
    assert main(monkeypatch, "resume", "run", "trainer.max_steps=6") == 0
    [(given, config, more)] = calls
    assert (given, config.trainer.max_steps, config.trainer.seed) == (run_dir, 6, 5)
    assert more == {"overrides": ["trainer.max_steps=6"], "argv": sys.argv}


def test_a_finished_run_says_so(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(saved_config("{max_steps: 3, device: cpu}"))
    (run_dir / "overrides.yaml").write_text("recipe: ''\noverrides: []\n")
    outcome = {"cause": "done", "attempt": 1, "step": 3, "exit_code": 0}
    (run_dir / "outcome.json").write_text(json.dumps(outcome))
    before = sorted(os.listdir(run_dir))
    done = hp_train("resume", "run", cwd=tmp_path)
    assert (done.code, done.stderr) == (0, "") and "finished" in done.stdout
    assert sorted(os.listdir(run_dir)) == before
