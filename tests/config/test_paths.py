"""A run is resumed from another folder than it was started in: its paths must mean the same files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hp_train.commands.saved_run import changed
from hp_train.config.compose import compose, examine
from hp_train.config.paths import with_absolute_paths
from hp_train.config.schema_tree import value_at
from hp_train.launch import start
from hp_train.launch.start import _overrides_yaml, _to_yaml

TYPED = [
    "data=tokens", "data.path=\"it's \\\\'here\\\\\"", "data.val_path=held", "data.tokenizer=tok.json",
    "trainer.run_dir=run", "pp.schedule=file:s.csv", "accelerator.pp_size=2",
]  # fmt: skip
RECIPE = "# @package _global_\ndefaults:\n  - override /data: tokens\n  - _self_\ndata:\n  path: {}\n"


def write_run(overrides: list[str], folder: Path) -> Path:
    """Write down a run as `start_run` does, without checks: the files it names need not be there."""
    job = examine(overrides, None)
    folder.mkdir()
    (folder / "config.yaml").write_text(_to_yaml(with_absolute_paths(job.config)))
    (folder / "overrides.yaml").write_text(_overrides_yaml(job.recipe or "", list(job.overrides), job.config))
    return folder


@pytest.mark.parametrize("more", [[], ["optimizer=sgd"]], ids=["saved", "composed anew"])
def test_typed_paths_mean_the_folder_of_the_start(more: list[str], tmp_path: Path, monkeypatch) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir()
    other.mkdir()
    monkeypatch.chdir(home)
    run_dir = write_run(TYPED, tmp_path / "written")
    monkeypatch.chdir(other)
    config = changed(run_dir, more).config
    assert config.data.path == f"{home}/it's \\\\'here\\"
    assert (config.data.val_path, config.data.tokenizer) == (f"{home}/held", f"{home}/tok.json")
    assert (config.trainer.run_dir, config.pp.schedule) == (f"{home}/run", f"file:{home}/s.csv")


def test_paths_of_a_recipe_mean_the_folder_of_the_start_until_a_group_is_chosen_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, other, recipes = tmp_path / "home", tmp_path / "other", tmp_path / "all/recipes"
    for folder in (home, other, recipes):
        folder.mkdir(parents=True)
    (recipes / "mine.yaml").write_text(RECIPE.format("tokens"))
    (recipes / "new.yaml").write_text(RECIPE.format("/new"))
    monkeypatch.setenv("HP_TRAIN_CONFIG_DIR", str(tmp_path / "all"))
    monkeypatch.chdir(home)
    run_dir = write_run(["recipe=mine"], tmp_path / "written")
    monkeypatch.chdir(other)
    assert changed(run_dir, ["optimizer=sgd"]).config.data.path == f"{home}/tokens"
    assert changed(run_dir, ["recipe=new"]).config.data.path == "/new"


def test_what_is_no_path_stays(tmp_path: Path) -> None:
    config = compose(["recipe=llama_pp"]).config
    assert with_absolute_paths(config) == config
    assert value_at(config, "data.tokenizer") == "byte"


def test_a_started_run_has_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    handed = []
    monkeypatch.setattr(start, "_launch", lambda run_dir, path, config, *_: handed.append((path, config)) or 0)
    overrides = ["trainer.run_dir=run", "trainer.device=cpu"]
    config = compose(overrides).config
    assert start.start_run(config, recipe="", overrides=overrides, argv=[]) == 0
    [(path, given)] = handed
    assert given.trainer.run_dir == str(tmp_path / "run") and f"run_dir: {tmp_path}/run\n" in path.read_text()
    assert str(tmp_path) in (path.parent / "overrides.yaml").read_text()
