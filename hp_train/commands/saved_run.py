"""What `resume` and `rerun` start from: a run's directory, and its config with changes. No torch."""

from __future__ import annotations

from pathlib import Path

import yaml

from hp_train.config.compose import Composition, change, compose_request
from hp_train.config.override_check import check_request, is_group_override
from hp_train.config.paths import still_pinned
from hp_train.config.search_path import search_path
from hp_train.errors import ConfigError
from hp_train.launch.find_run import find_run


def named_run(text: str, verb: str) -> Path:
    """Return the run that RUN_DIR of a verb stands for. Raises ConfigError, and says so where it was left out."""
    if "=" in text and not Path(text).expanduser().exists():
        raise ConfigError(f"{verb} needs a run directory before {text}: hp-train {verb} RUN_DIR [key=value ...]")
    return find_run(text)


def changed(run_dir: Path, overrides: list[str], config_dir: str | None = None) -> Composition:
    """Return the config of the run in `run_dir` with `overrides` applied, and its faults.

    Raises ConfigError when nothing could be composed.
    """
    path = search_path(config_dir)
    recipe, first, pins = started_with(run_dir / "overrides.yaml")
    if any(map(is_group_override, overrides)):
        return compose_request(check_request([*first, *still_pinned(pins, overrides), *overrides], path))
    return change(run_dir / "config.yaml", overrides, recipe, path)


def started_with(path: Path) -> tuple[str | None, list[str], list[str]]:
    """Return the recipe and the overrides that a run was started with, and those for paths that its files named."""
    try:
        saved = yaml.safe_load(path.read_text(encoding="utf-8"))
        paths = [str(override) for override in saved.get("paths", [])]  # not written by earlier versions
        return saved["recipe"] or None, [str(override) for override in saved["overrides"]], paths
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be used: {' '.join(str(error).split())}") from error
