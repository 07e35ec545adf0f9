"""Imports a person's own code and makes what it registers part of the config. No torch, unless a plugin imports it.

Plugins are named on the command line (`--plugin my_pkg.ext`, repeatable), in $HP_TRAIN_PLUGINS (separated by commas) or
by installed packages (entry points `hp_train.plugins`); never by a config file. A run records their names and what
their files held; its workers, and a resume, import them from there.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hp_train import registry
from hp_train.errors import ConfigError

OPTION = "--plugin"
VARIABLE = "HP_TRAIN_PLUGINS"
ENTRY_POINTS = "hp_train.plugins"
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plugin that is loaded: its module's name, its file, a hash of that, and the folder it is imported from."""

    name: str
    file: str | None
    sha256: str | None
    folder: str | None


_loaded: dict[str, Plugin] = {}


def take_options(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Take `--plugin NAME` and `--plugin=NAME` off a command line; return what is left, and the names."""
    rest, names = [], []
    words = iter(arguments)
    for word in words:
        if word == OPTION:
            name = next(words, None)
            if name is None:
                raise ConfigError(f"{OPTION} needs the name of a module, such as my_package.my_module")
            names.append(name)
        elif word.startswith(f"{OPTION}="):
            names.append(word.partition("=")[2])
        else:
            rest.append(word)
    return rest, names


def load_all(named: Iterable[str] = ()) -> None:
    """Import the plugins of installed packages, of the environment, and those `named` on the command line.

    Raises ConfigError with one line for each that cannot be imported.
    """
    wanted = {name: f"entry point {ENTRY_POINTS}" for name in _entry_points()}
    wanted.update({name.strip(): f"${VARIABLE}" for name in os.environ.get(VARIABLE, "").split(",") if name.strip()})
    wanted.update({name: OPTION for name in named})
    faults = [fault for name, origin in wanted.items() if (fault := _load(name, origin)) is not None]
    if faults:
        raise ConfigError(*faults)
    _extend_config()


def load_recorded(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Import the plugins that a run was started with; return a line for each whose file is another now.

    Raises ConfigError.
    """
    changed, faults = [], []
    for record in records:
        fault = _load(record["name"], "plugin of the run:", record.get("folder"))
        if fault is not None:
            faults.append(fault)
        elif _loaded[record["name"]].sha256 != record.get("sha256"):
            changed.append(f"plugin {record['name']} ({_loaded[record['name']].file}) has changed since the run began")
    if faults:
        raise ConfigError(*faults)
    _extend_config()
    return changed


def records() -> list[dict[str, Any]]:
    """Return what a run keeps of the plugins that are loaded."""
    return [asdict(plugin) for plugin in _loaded.values()]


def _load(name: str, origin: str, folder: str | None = None) -> str | None:
    """Import one plugin; return what is wrong, if anything."""
    if name in _loaded:
        return None
    if not _MODULE.fullmatch(name):
        return f"{origin} {name} is not the name of a module; give it with dots, such as my_package.my_module"
    added = str(Path(folder or os.getcwd()).absolute())
    if added not in sys.path:
        sys.path.append(added)  # last: a file here must not be imported in the place of a package
    try:
        module = importlib.import_module(name)
    except ConfigError as error:
        return f"{origin} {name}: {'; '.join(error.messages)}"
    except Exception as error:  # whatever their code raises is told in one line, with the place
        import traceback  # slow to import, as hashlib is, and only plugins need it

        places = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
        place = f" ({places[-1].filename}:{places[-1].lineno})" if places and places[-1].filename != __file__ else ""
        return f"{origin} {name} cannot be imported: {type(error).__name__}: {error}{place}"
    import hashlib

    file = getattr(module, "__file__", None)
    digest = None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    root = None if file is None else str(_root_of(name, Path(file)))
    _loaded[name] = Plugin(name, file, digest, root)
    return None


def _root_of(name: str, file: Path) -> Path:
    """Return the folder that holds the top-level package of a module."""
    depth = name.count(".") + (file.name == "__init__.py")
    return file.absolute().parents[depth]


def _extend_config() -> None:
    if registry.components():
        from hp_train.config.schema_tree import extend

        extend()


def _entry_points() -> list[str]:
    """Return the modules that installed packages name as plugins."""
    if not any(_mentions_plugins(Path(folder)) for folder in sys.path if folder):
        return []  # importlib.metadata is slow to import
    from importlib.metadata import entry_points

    return sorted(entry.value.partition(":")[0] for entry in entry_points(group=ENTRY_POINTS))


def _mentions_plugins(folder: Path) -> bool:
    wanted = f"[{ENTRY_POINTS}]".encode()
    try:
        inside = [entry.path for entry in os.scandir(folder) if entry.name.endswith((".dist-info", ".egg-info"))]
    except OSError:
        return False
    for path in inside:
        try:
            with open(os.path.join(path, "entry_points.txt"), "rb") as file:
                if wanted in file.read():
                    return True
        except OSError:
            continue
    return False
