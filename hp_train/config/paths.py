"""Paths in a config: `~` is the home folder; what is written down is absolute, so that a run goes on from any folder.

No torch. The fields declared by `fields.file_path` hold them, and `pp.schedule=file:PATH`. Errors name paths as typed;
hence `with_absolute_paths` comes last, when a new run has passed its checks and its config is saved.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path

from hp_train.config.schema import TrainerConfig
from hp_train.config.schema_tree import LEAVES, entry_of, value_at
from hp_train.config.typed_value import key_of, typed_text

_SCHEDULE = "pp.schedule"
_SCHEDULE_FILE = "file:"  # what `compile.pass_config.normalize_pp_schedule` leaves before a path
_NO_PATHS = {("data.tokenizer", "byte")}


def expand_home(config: TrainerConfig) -> None:
    """Put the home folder in the place of `~` before every path, in place."""
    for key in _keys(config):
        value = _get(config, key)
        if isinstance(value, str) and "~" in value:
            prefix = _SCHEDULE_FILE if key == _SCHEDULE and value.startswith(_SCHEDULE_FILE) else ""
            _set(config, key, prefix + os.path.expanduser(value.removeprefix(prefix)))


def with_absolute_paths(config: TrainerConfig) -> TrainerConfig:
    """Return `config` with each path that is relative joined to the current folder."""
    config = copy.deepcopy(config)
    for key in _keys(config):
        _set(config, key, _absolute(key, _get(config, key)))
    return config


def overrides_with_absolute_paths(overrides: Sequence[str], config: TrainerConfig) -> list[str]:
    """Return `overrides`, which gave `config`, with the paths among them absolute."""
    absolute, moved = with_absolute_paths(config), _moved(config)
    keys = map(key_of, overrides)
    return [_typed(key, absolute) if key in moved else typed for key, typed in zip(keys, overrides, strict=True)]


def pinned_paths(overrides: Sequence[str], config: TrainerConfig) -> list[str]:
    """Return overrides for the paths that a recipe or an option set relative to the current folder."""
    typed = {key_of(override) for override in overrides}
    absolute = with_absolute_paths(config)
    return [_typed(key, absolute) for key in _moved(config) if key not in typed]


def still_pinned(pins: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return those of `pins` whose group is not chosen anew, by itself or with a recipe, among `overrides`."""
    chosen = {key_of(override) for override in overrides}
    return [pin for pin in pins if not {"recipe", pin.partition(".")[0]} & chosen]


def _keys(config: TrainerConfig) -> list[str]:
    """Return the keys of all paths, those of the entries of a mapping one by one."""
    keys = [_SCHEDULE]
    for key, leaf in LEAVES.items():
        if leaf.is_path:
            keys += [f"{key}.{name}" for name in value_at(config, key) or ()] if leaf.is_mapping else [key]
    return keys


def _get(config: TrainerConfig, key: str) -> str | None:
    entry = entry_of(key)
    return value_at(config, key) if entry is None else value_at(config, entry[0].key)[entry[1]]


def _set(config: TrainerConfig, key: str, value: str | None) -> None:
    section, _, name = key.rpartition(".")
    owner = value_at(config, section)
    if isinstance(owner, dict):
        owner[name] = value
    elif owner is not None:
        setattr(owner, name, value)


def _moved(config: TrainerConfig) -> list[str]:
    return [key for key in _keys(config) if _get(config, key) != _absolute(key, _get(config, key))]


def _absolute(key: str, value: str | None) -> str | None:
    if value is None or (key, value) in _NO_PATHS:
        return value
    if key == _SCHEDULE:
        path = value.removeprefix(_SCHEDULE_FILE)
        return value if path == value else _SCHEDULE_FILE + str(Path(path).expanduser().absolute())
    return str(Path(value).expanduser().absolute())


def _typed(key: str, config: TrainerConfig) -> str:
    """Return the override that gives `key` its value in `config`."""
    return f"{key}={typed_text(_get(config, key))}"
