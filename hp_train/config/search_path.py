"""Where config files are found: the package's own, and a person's. No torch, no Hydra.

A person's folders come first, so that a copy of a recipe that was changed is the one that runs: `--config-dir`, then
`$HP_TRAIN_CONFIG_DIR`, then `./recipes`. Each may hold recipes (NAME.yaml, or recipe/NAME.yaml, or recipes/NAME.yaml)
and further options of the groups (GROUP/NAME.yaml).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hp_train.config.schema_tree import GROUPS
from hp_train.errors import ConfigError

PACKAGE = Path(__file__).resolve().parent.parent
CONFIGS = PACKAGE / "configs"
RECIPES = PACKAGE / "recipes"
RECIPE_GROUP = "recipe"
RECIPE_PACKAGE = "@package _global_"


@dataclass(frozen=True, slots=True)
class SearchPath:
    """The folders in the order in which they are searched, a person's own first."""

    own: tuple[Path, ...] = ()
    _options: dict[str, dict[str, Path]] = field(default_factory=dict, compare=False, repr=False)  # folders, once read

    def folders_of(self, group: str) -> list[Path]:
        """Return the folders that may hold options of `group`, in order."""
        if group == RECIPE_GROUP:
            own = [folder / name for folder in self.own for name in ("", "recipe", "recipes")]
            return [*own, RECIPES]
        return [*(folder / group for folder in self.own), CONFIGS / group]

    def options_of(self, group: str) -> dict[str, Path]:
        """Return option name -> file, sorted by name; the first folder that has a name wins."""
        if group not in self._options:
            found: dict[str, Path] = {}
            for folder in self.folders_of(group):
                if folder.is_dir():
                    for path in folder.glob("*.yaml"):
                        found.setdefault(path.stem, path)
            self._options[group] = dict(sorted(found.items()))
        return self._options[group]


def search_path(config_dir: str | None = None) -> SearchPath:
    """Return where to look, given `--config-dir` if there was one.

    Raises ConfigError when a folder that was named does not exist.
    """
    named = {"--config-dir": config_dir, "$HP_TRAIN_CONFIG_DIR": os.environ.get("HP_TRAIN_CONFIG_DIR") or None}
    own, faults = [], []
    for origin, folder in named.items():
        if folder is None:
            continue
        if Path(folder).is_dir():
            own.append(Path(folder).resolve())
        else:
            faults.append(f"{origin}={folder} is not a folder")
    if faults:
        raise ConfigError(*faults)
    here = Path("recipes").resolve()
    if here.is_dir() and here != RECIPES.resolve():
        own.append(here)
    return SearchPath(tuple(own))


def is_recipe(path: Path) -> bool:
    """Say whether a file starts with the header that makes its keys global, as every recipe does."""
    return any(line.lstrip("# ").startswith(RECIPE_PACKAGE) for line in _head(path))


def description_of(path: Path) -> str:
    """Return the first comment line of a recipe that is no header: what it is, for the list of recipes."""
    for line in _head(path):
        text = line.lstrip("# ")
        if text and not text.startswith("@"):
            return text
    return ""


def _head(path: Path) -> Sequence[str]:
    lines = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.strip() and not line.startswith("#"):
                break
            lines.append(line.strip())
    return lines


def shown(path: Path) -> str:
    """Return a path as short as it can be read from the current folder."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


assert RECIPE_GROUP not in GROUPS
