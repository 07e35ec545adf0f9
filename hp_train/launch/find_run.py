"""From what a person types for RUN_DIR to the directory of a run. No torch.

A path, `last` for the run that was started or resumed last, or the end of a run's id (`8506`), which must fit one run
only. Runs are looked for in the folder of runs, `$HP_TRAIN_RUNS` or `./runs`: `<root>/<name>/<id>`, or `<root>/<id>`
for those that were given their own directory there.
"""

from __future__ import annotations

import os
from pathlib import Path

from hp_train.config.near_match import did_you_mean, nearest
from hp_train.errors import ConfigError

LAST = "last"
CONFIG_FILE = "config.yaml"
_MOST_NAMED = 3


def find_run(text: str) -> Path:
    """Return the absolute path of the run that `text` stands for. Raises ConfigError when it is none, or several."""
    if not text.strip():
        raise ConfigError("the run directory is empty; give a path, last, or the end of a run's id")
    path = Path(text).expanduser().absolute()
    if (path / CONFIG_FILE).is_file():
        return path
    root = folder_of_runs()
    runs = list_runs(root)
    if text == LAST:
        if not runs:
            raise ConfigError(f"last: there is no run in {root}; give the path of a run, or set $HP_TRAIN_RUNS")
        return max(runs, key=started_at)
    if path.is_dir():
        raise ConfigError(_no_run_in(path))
    return _by_suffix(text, path, root, runs)


def folder_of_runs() -> Path:
    """Return the absolute folder of all runs: $HP_TRAIN_RUNS, else ./runs."""
    return Path(os.environ.get("HP_TRAIN_RUNS") or "runs").expanduser().absolute()


def list_runs(root: Path) -> list[Path]:
    """Return every run below `root`, at most two folders deep, in order of their paths; none if there is no `root`."""
    found = []
    for folder in _folders_in(root):
        if (folder / CONFIG_FILE).is_file():
            found.append(folder)
        else:
            found += [run for run in _folders_in(folder) if (run / CONFIG_FILE).is_file()]
    return found


def started_at(run_dir: Path) -> float:
    """Return when the last attempt at a run was started, in seconds since the epoch: each makes a folder in logs/."""
    times = []
    for name in (CONFIG_FILE, "logs"):
        try:
            times.append((run_dir / name).stat().st_mtime)
        except OSError:
            continue  # not started yet, or removed while we look
    return max(times, default=0.0)


def _folders_in(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return []


def _by_suffix(text: str, path: Path, root: Path, runs: list[Path]) -> Path:
    """Return the one run whose id ends in `text`; a whole id counts before the end of another."""
    by_id = {run.relative_to(root).as_posix(): run for run in runs}
    wanted = text.strip("/")
    whole = [name for name in by_id if wanted in (name, name.rpartition("/")[2])]
    fitting = whole or [name for name in by_id if name.endswith(wanted)]
    if len(fitting) == 1:
        return by_id[fitting[0]]
    if fitting:
        newest = sorted(fitting, key=lambda name: started_at(by_id[name]), reverse=True)
        raise ConfigError(f"{text} fits {len(fitting)} runs in {root}: {_some(newest)}; give more of the id")
    ends = {name.rpartition("/")[2]: name for name in by_id} | {name: name for name in by_id}
    close = nearest(wanted, ends) or _like_in_its_end(wanted, by_id)
    near = did_you_mean([ends[close] if close else None])
    raise ConfigError(
        f"run directory {path} does not exist, and no id of the {len(runs)} runs in {root} ends in {wanted}{near}; "
        "give a path, last, or the end of a run's id"
    )


def _like_in_its_end(wanted: str, names: dict[str, Path]) -> str | None:
    """Return the id whose last characters, as many as were typed, are most like `wanted`."""
    ends = {name[-len(wanted) :]: name for name in names}
    close = nearest(wanted, ends)
    return ends[close] if close else None


def _no_run_in(path: Path) -> str:
    inside = sorted((run for run in list_runs(path)), key=started_at, reverse=True)
    near = f"; in it: {_some([str(run.relative_to(path)) for run in inside])}" if inside else ""
    return f"run directory {path} holds no run: there is no {CONFIG_FILE} in it{near}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
