"""The directory of one run: where it is, what is wrong with it, what it holds. No torch.

    <run>/config.yaml  config.attempt_N.yaml  overrides.yaml  capsule.json  owner.json  outcome.json
    <run>/logs/attempt_N/node_K.log                                       what the ranks of a node printed
    <run>/logs/attempt_N/rank_R/{failure.json,traceback.txt,stacks.txt}   of a rank that failed or hung

An attempt is one set of processes: the first start, each resume and each restart after a failure.
"""

from __future__ import annotations

import datetime
import os
import secrets
import shlex
import shutil
import tempfile
from pathlib import Path

from hp_train.checkpoint.size import DiskNeed, size_text
from hp_train.config.schema import TrainerConfig
from hp_train.errors import ConfigError
from hp_train.launch.find_run import folder_of_runs
from hp_train.launch.owner import living_owner

_RUN_MARKS = ("config.yaml", "owner.json", "outcome.json", "metrics.jsonl", "checkpoints", "logs")

_NO_NEED = DiskNeed(0, 0)
_LONGEST_NAME, _LONGEST_PATH = 255, 4095 - 512  # bytes; the files of a run need the rest of what Linux takes


def choose_run_dir(config: TrainerConfig, recipe: str) -> Path:
    """Return the absolute path of a new run: trainer.run_dir, else <root>/<name>/<date-time-id>."""
    if config.trainer.run_dir is not None:
        return Path(config.trainer.run_dir).expanduser().absolute()
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = config.trainer.run_name or recipe or "run"
    return runs_root(config) / name / f"{now}-{secrets.token_hex(2)}"


def runs_root(config: TrainerConfig) -> Path:
    """Return the folder of all runs: trainer.runs_root, else $HP_TRAIN_RUNS, else ./runs."""
    root = config.trainer.runs_root
    return folder_of_runs() if root is None else Path(root).expanduser().absolute()


def check_run_dir(config: TrainerConfig, need: DiskNeed = _NO_NEED) -> list[str]:
    """Return what stands against a new run where `config` puts it, one line each; nothing is created.

    `need` is what its checkpoints take, which must fit on the disk.
    """
    faults = []
    name = config.trainer.run_name
    if name is not None and (name != Path(name).name or name in ("", ".", "..")):
        faults.append(f"trainer.run_name={name} must be the name of a folder, without `/`")
    elif name is not None and _is_too_long(Path(name)):
        faults.append(f"trainer.run_name={name} is too long; a folder's name takes {_LONGEST_NAME} bytes")
    if config.trainer.run_dir is not None:
        path, key = choose_run_dir(config, ""), f"trainer.run_dir={config.trainer.run_dir}"
    else:
        path = runs_root(config)
        key = f"trainer.runs_root={path}" if config.trainer.runs_root else f"folder of runs {path}"
    if _is_too_long(path):
        return [*faults, f"{key} cannot be made: a folder's name takes {_LONGEST_NAME} bytes, a path {_LONGEST_PATH}"]
    if config.trainer.run_dir is not None:
        faults.extend(_occupied(path, key))
    return faults + _unfit(path, key, need)


def check_resume_dir(run_dir: Path, need: DiskNeed = _NO_NEED) -> list[str]:
    """Return what stands against going on with the run in `run_dir`, one line each."""
    if not run_dir.is_dir():
        return [f"run directory {run_dir} does not exist"]
    if not (run_dir / "config.yaml").is_file():
        return [f"run directory {run_dir} holds no run: there is no config.yaml in it"]
    owner = living_owner(run_dir)
    faults = [f"run directory {run_dir} is in use by {owner.describe()}"] if owner else []
    return faults + _unfit(run_dir, f"run directory {run_dir}", need)


def _occupied(path: Path, key: str) -> list[str]:
    if not path.is_dir():
        return []  # a file in the way is told by `_unfit`
    try:
        held = os.listdir(path)
    except PermissionError:
        return [f"{key} cannot be read"]
    if not held:
        return []
    owner = living_owner(path)
    if owner is not None:
        return [f"{key} is in use by {owner.describe()}"]
    if any(mark in held for mark in _RUN_MARKS):
        command = f"hp-train resume {shlex.quote(str(path))}"
        return [
            f"{key} holds a run already; go on with it by `{command}` or trainer.resume=auto, or choose another folder"
        ]
    return [f"{key} is not empty and holds no run; choose a new or an empty folder"]


def holds_run(path: Path) -> bool:
    """Say whether a run can be gone on with in `path`."""
    return (path / "config.yaml").is_file()


def free_bytes(path: Path) -> int | None:
    """Return what is free on the disk where `path` is or will be, None where the file system does not tell."""
    usage = shutil.disk_usage(nearest_standing(path))
    return usage.free if usage.total else None


def nearest_standing(path: Path) -> Path:
    """Return the nearest folder above `path`, itself included, that is there."""
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def _is_too_long(path: Path) -> bool:
    return len(os.fsencode(path)) > _LONGEST_PATH or any(len(os.fsencode(part)) > _LONGEST_NAME for part in path.parts)


def _unfit(path: Path, key: str, need: DiskNeed) -> list[str]:
    standing = nearest_standing(path)
    if not standing.is_dir():
        return [f"{key} cannot be made: {standing} is not a folder"]
    if not os.access(standing, os.W_OK | os.X_OK):
        return [f"{key} is not writable ({standing})"]
    free = free_bytes(standing)
    if free is None:  # no disk (/proc), or a file system that does not tell its size
        return [] if _takes_a_folder(standing) else [f"{key} is not writable ({standing} stores no files)"]
    if free < need.bytes_each - need.bytes_there:
        have, each = size_text(free), size_text(need.bytes_each)
        return [f"{key} has {have} free, one checkpoint needs {each}; free some or choose another disk"]
    if free < need.missing_bytes:
        return [
            f"{key} has too little room: {need.describe(free)}; free some, choose another disk, or keep fewer by "
            "checkpoint.keep_last"
        ]
    return []


def _takes_a_folder(path: Path) -> bool:
    try:
        with tempfile.TemporaryDirectory(dir=path):
            return True
    except OSError:
        return False


def create_run_dir(config: TrainerConfig, recipe: str) -> Path:
    """Make the directory of a new run and return it. Raises ConfigError if another run took it meanwhile."""
    path = choose_run_dir(config, recipe)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(exist_ok=False)
    except FileExistsError:
        if config.trainer.run_dir is None:
            return create_run_dir(config, recipe)  # another run drew the same name in the same second
        if os.listdir(path):
            raise ConfigError(*_occupied(path, f"trainer.run_dir={config.trainer.run_dir}")) from None
    return path


def attempt_dir(run_dir: Path, attempt: int) -> Path:
    """Return the folder of one attempt's logs."""
    return run_dir / "logs" / f"attempt_{attempt}"


def rank_dir(run_dir: Path, attempt: int, rank: int) -> Path:
    """Return the folder of one rank's logs."""
    return attempt_dir(run_dir, attempt) / f"rank_{rank}"
