"""What a run directory says of the circumstances: versions, git state, command line, host. No torch import."""

from __future__ import annotations

import datetime
import os
import platform
import socket
import subprocess
from pathlib import Path
from typing import Any

import hp_train.errors
from hp_train import plugins
from hp_train.launch.files import read_json

_PACKAGES = ("hp-train", "torch", "hydra-core", "omegaconf", "numpy", "safetensors", "tokenizers")


def describe_circumstances(argv: list[str], recipe: str) -> dict[str, Any]:
    """Return what capsule.json holds."""
    return {
        "argv": argv,
        "recipe": recipe,
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "folder": os.getcwd(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: version_of(name) for name in _PACKAGES},
        "plugins": plugins.records(),
        "git": _git_state(Path(hp_train.errors.__file__).parent),
    }


def recorded_plugins(config_path: Path) -> list[dict[str, Any]]:
    """Return the plugins of the launch that wrote `config_path`: config.attempt_3.yaml has capsule.attempt_3.json."""
    capsule = config_path.with_name(config_path.name.replace("config", "capsule", 1)).with_suffix(".json")
    found = read_json(capsule) or read_json(config_path.with_name("capsule.json")) or {}
    return found.get("plugins", [])


def recorded_recipe(run_dir: Path) -> str:
    """Return the recipe that the run in `run_dir` was started with; empty where there was none."""
    return (read_json(run_dir / "capsule.json") or {}).get("recipe", "")


def version_of(package: str) -> str | None:
    """Return the version of an installed package, None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import, and a refused run needs it not

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_state(folder: Path) -> dict[str, Any] | None:
    """Return commit and whether files differ from it; None for an installed wheel or a machine without git."""

    def ask(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        if ask("ls-files", "errors.py") != "errors.py":
            return None  # some other repository holds the environment we are installed in
        return {"commit": ask("rev-parse", "HEAD"), "changed": bool(ask("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None
