"""Where config files are found: the package's own, and a person's. No torch, no Hydra.

A person's folders come first, so that a copy of a recipe that was changed is the one that runs: `--config-dir`, then
`$HP_TRAIN_CONFIG_DIR`, `./configs`, `./recipes`, `~/.config/hp-train`. Each may hold recipes (NAME.yaml, or
recipe/NAME.yaml, or recipes/NAME.yaml) and further options of the groups (GROUP/NAME.yaml).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hp_train.config.schema_tree import GROUPS
from hp_train.errors import ConfigError

PACKAGE = Path(__file__).resolve().parent.parent
CONFIGS = PACKAGE / "configs"
RECIPES = PACKAGE / "recipes"
RECIPE_GROUP = "recipe"
RECIPE_PACKAGE = "@package _global_"
_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class SearchPath:
    """The folders in the order in which they are searched, a person's own first."""

    own: tuple[Path, ...] = ()
    shared: frozenset[Path] = frozenset()  # own folders whose YAML files may be another program's, unless they say
    _options: dict[str, dict[str, list[Path]]] = field(default_factory=dict, compare=False, repr=False)  # once read
    _given: dict[str, Path] = field(default_factory=dict, compare=False, repr=False)  # alias -> file

    def folders_of(self, group: str) -> list[Path]:
        """Return the folders that may hold options of `group`, in order."""
        if group == RECIPE_GROUP:
            own = [folder / name for folder in self.own for name in ("", "recipe", "recipes")]
            return [*own, RECIPES]
        return [*(folder / group for folder in self.own), CONFIGS / group]

    def options_of(self, group: str) -> dict[str, Path]:
        """Return option name -> file, sorted by name; the first folder that has a name wins."""
        return {name: files[0] for name, files in self._all_of(group).items()}

    def file_of(self, group: str, name: str) -> Path | None:
        """Return the file of an option, or of an alias; None if there is none."""
        given = self._given.get(name) if group == RECIPE_GROUP else None
        return given or self.options_of(group).get(name)

    def hidden_by(self, group: str, file: Path) -> Path | None:
        """Return the file that would have the name of `file` if that were not there."""
        files = self._all_of(group).get(file.stem, [])
        behind = files[files.index(file) + 1 :] if file in files else files
        return behind[0] if behind else None

    def alias_of(self, file: Path) -> str:
        """Return a name for a recipe's file that no folder of the path holds, or that another one hides."""
        for alias, given in self._given.items():
            if given == file:
                return alias
        stem = file.stem.strip(". ") or RECIPE_GROUP
        alias = f"{stem}:{len(self._given) + 1}"
        self._given[alias] = file
        return alias

    def typed_for(self, alias: str) -> str:
        """Return what is typed after `recipe=` for a name or an alias."""
        return str(self._given[alias]) if alias in self._given else alias

    def _all_of(self, group: str) -> dict[str, list[Path]]:
        """Return option name -> its files, the one that counts first."""
        if group not in self._options:
            found: dict[str, list[Path]] = {}
            for folder in self.folders_of(group):
                if folder.is_dir():
                    for path in sorted(folder.glob("*.yaml")):
                        if not (group == RECIPE_GROUP and folder in self.shared and not is_recipe(path)):
                            found.setdefault(path.stem, []).append(path)
            self._options[group] = dict(sorted(found.items()))
        return self._options[group]


def search_path(config_dir: str | None = None) -> SearchPath:
    """Return where to look, given `--config-dir` if there was one.

    Raises ConfigError when a folder that was named does not exist.
    """
    named = {"--config-dir": config_dir, "$HP_TRAIN_CONFIG_DIR": os.environ.get("HP_TRAIN_CONFIG_DIR") or None}
    faults = [
        f"{origin}={folder} is not a folder"
        for origin, folder in named.items()
        if folder is not None and not Path(folder).expanduser().is_dir()
    ]
    if faults:
        raise ConfigError(*faults)
    own = [Path(folder).expanduser().resolve() for folder in named.values() if folder is not None]
    wanted = frozenset(own)
    shipped = (CONFIGS.resolve(), RECIPES.resolve())
    configs = Path("configs").resolve()
    for folder in (configs, Path("recipes").resolve(), _home_folder()):
        if folder.is_dir() and folder not in (*shipped, *own):
            own.append(folder)
    return SearchPath(tuple(own), frozenset({configs}) - wanted)


def _home_folder() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return (Path(base).expanduser() / "hp-train").resolve()


def is_path(text: str) -> bool:
    """Say whether what is typed after `recipe=` names a file, rather than a recipe by its name."""
    return text.endswith(_SUFFIXES)


def name_of(alias: str) -> str:
    """Return the name of a recipe from its name or alias: what runs of it are filed under."""
    return alias.partition(":")[0]


def ships(file: Path) -> bool:
    """Say whether a file came with the package."""
    return any(file.resolve().is_relative_to(folder.resolve()) for folder in (CONFIGS, RECIPES))


def is_recipe(path: Path) -> bool:
    """Say whether a file starts with the header that makes its keys global, as every recipe does."""
    return any(line.lstrip("# ").startswith(RECIPE_PACKAGE) for line in _head(path))


def package_of(path: Path) -> str | None:
    """Return the `@package ...` of a file's header, if it has one."""
    headers = [line.lstrip("# ") for line in _head(path) if line.startswith("#")]
    return next((" ".join(header.split()) for header in headers if header.startswith("@package")), None)


def description_of(path: Path) -> str:
    """Return the first comment line of a recipe that is no header: what it is, for the list of recipes."""
    for line in _head(path):
        text = line.lstrip("# ")
        if text and not text.startswith("@"):
            return text
    return ""


def _head(path: Path) -> Sequence[str]:
    lines = []
    with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:  # told by whoever needs its content
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
