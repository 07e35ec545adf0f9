"""The code that a submitted run uses: copied into its run directory, and told apart by a hash. No torch.

A job may start days after its submission, and again after that. A checkout changes meanwhile; the copy does not. An
installed package is not copied.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import site
from collections.abc import Iterator
from pathlib import Path

import hp_train.errors
from hp_train.launch.files import read_json, write_json

FOLDER = "code"
_PLUGINS = "plugins"  # in it
HASH_FILE = "code.sha256"  # in the run directory's slurm/
_NOT_CODE = ("__pycache__", "*.pyc", ".*")


def package_folder() -> Path:
    """Return the folder of the package that this process runs."""
    return Path(hp_train.errors.__file__).parent


def checkout() -> Path | None:
    """Return the folder to put on PYTHONPATH for the package of this process; None if it is installed."""
    root = package_folder().parent
    installed = (*site.getsitepackages(), site.getusersitepackages())
    return None if str(root) in installed else root


def take_snapshot(run_dir: Path) -> Path | None:
    """Copy the package into the run directory and return the folder for PYTHONPATH; None if it is installed."""
    if checkout() is None:
        return None
    target = run_dir / FOLDER / package_folder().name
    shutil.copytree(package_folder(), target, ignore=shutil.ignore_patterns(*_NOT_CODE), dirs_exist_ok=True)
    return target.parent


def take_plugins(run_dir: Path, capsule: Path) -> None:
    """Copy the plugins that `capsule` records into the run directory, and have it name the copies.

    A plugin's whole top-level package goes along; one that an installed package brings stays where it is.
    """
    found = read_json(capsule) or {}
    records = found.get("plugins") or []
    for record in records:
        folder = record.get("folder")
        if folder is None or folder in (*site.getsitepackages(), site.getusersitepackages()):
            continue
        name = record["name"].partition(".")[0]
        target = run_dir / FOLDER / _PLUGINS
        target.mkdir(parents=True, exist_ok=True)
        package, module = Path(folder) / name, Path(folder) / f"{name}.py"
        if package.is_dir():
            shutil.copytree(package, target / name, ignore=shutil.ignore_patterns(*_NOT_CODE), dirs_exist_ok=True)
        else:
            shutil.copy(module, target)
        record["folder"] = str(target)
    if records:
        write_json(capsule, found)


def code_hash(package: Path | None = None) -> str:
    """Return a hash of a package's files, names and contents; of this process's unless another is given."""
    package = package or package_folder()
    digest = hashlib.sha256()
    for name in sorted(_files_of(package)):
        digest.update(f"{name}\0".encode())
        digest.update(hashlib.sha256((package / name).read_bytes()).digest())
    return digest.hexdigest()


def _files_of(package: Path) -> Iterator[str]:
    """Yield the files of a package by their names in it; links are followed, as a copy follows them."""
    for folder, folders, files in os.walk(package, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__" and not name.startswith(".")]
        for name in files:
            if not name.endswith(".pyc") and not name.startswith("."):
                yield (Path(folder) / name).relative_to(package).as_posix()
