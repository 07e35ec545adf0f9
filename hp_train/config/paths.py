"""Paths in a config that is written down: made absolute, so that a run can be resumed from any folder. No torch.

Errors name paths as typed; hence this comes last, when a new run has passed its checks and its config is saved.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from hp_train.config.schema import TrainerConfig
from hp_train.config.schema_tree import value_at

_KEYS = ("trainer.run_dir", "data.path", "data.val_path", "data.tokenizer", "pp.schedule", "model.pretrained")
_SCHEDULE_FILE = "file:"  # what `compile.pass_config.normalize_pp_schedule` leaves before a path


def with_absolute_paths(config: TrainerConfig) -> TrainerConfig:
    """Return `config` with each path that is relative joined to the current folder."""
    changed = {key: _absolute(key, value_at(config, key)) for key in _KEYS}
    for section in {key.partition(".")[0] for key in changed}:
        values = {key.partition(".")[2]: value for key, value in changed.items() if key.startswith(f"{section}.")}
        config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})
    return config


def overrides_with_absolute_paths(overrides: Sequence[str], config: TrainerConfig) -> list[str]:
    """Return `overrides`, which gave `config`, with the paths among them absolute."""
    absolute, moved = with_absolute_paths(config), _moved(config)
    keys = map(_key_of, overrides)
    return [_typed(key, absolute) if key in moved else typed for key, typed in zip(keys, overrides, strict=True)]


def pinned_paths(overrides: Sequence[str], config: TrainerConfig) -> list[str]:
    """Return overrides for the paths that a recipe or an option set relative to the current folder."""
    typed = {_key_of(override) for override in overrides}
    absolute = with_absolute_paths(config)
    return [_typed(key, absolute) for key in _moved(config) if key not in typed]


def still_pinned(pins: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return those of `pins` whose group is not chosen anew, by itself or with a recipe, among `overrides`."""
    chosen = {_key_of(override) for override in overrides}
    return [pin for pin in pins if not {"recipe", pin.partition(".")[0]} & chosen]


def _moved(config: TrainerConfig) -> list[str]:
    return [key for key in _KEYS if value_at(config, key) != _absolute(key, value_at(config, key))]


def _absolute(key: str, value: str | None) -> str | None:
    if value is None or (key == "data.tokenizer" and value == "byte"):
        return value
    if key == "pp.schedule":
        path = value.removeprefix(_SCHEDULE_FILE)
        return value if path == value else _SCHEDULE_FILE + str(Path(path).absolute())
    path = Path(value)
    return str((path.expanduser() if key in ("trainer.run_dir", "model.pretrained") else path).absolute())


def _key_of(override: str) -> str:
    return override.partition("=")[0].lstrip("+")


def _typed(key: str, config: TrainerConfig) -> str:
    """Return the override that gives `key` its value in `config`, quoted as Hydra's grammar wants it."""
    text = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + match[2].replace("'", r"\'"), str(value_at(config, key)))
    return f"{key}='{text}'"
