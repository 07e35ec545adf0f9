"""`hp-train resume RUN_DIR [key=value ...]`: go on with a run, perhaps changed. No torch until all is checked.

Plain keys apply to the run's config.yaml. A group or recipe among the arguments composes the run anew, from the
overrides that it was started with and these.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import yaml

from hp_train.checkpoint.fit import checkpoint_misfits
from hp_train.checkpoint.layout import newest_committed
from hp_train.commands.train import job_faults, warn
from hp_train.config.compose import Composition, change, examine
from hp_train.config.override_check import is_group_override
from hp_train.config.paths import still_pinned
from hp_train.config.schema import TrainerConfig
from hp_train.config.schema_tree import value_at
from hp_train.errors import ConfigError
from hp_train.launch.capsule import recorded_plugins
from hp_train.launch.find_run import find_run
from hp_train.launch.run_dir import check_resume_dir
from hp_train.launch.start import resume_run
from hp_train.plugins import load_recorded

USAGE = "hp-train resume RUN_DIR [key=value ...]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", help="the run to go on with: its directory, last, or the end of its id"
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="what is to differ, this time")
    parser.add_argument("--config-dir", metavar="DIR", help="a folder with recipes and options of your own")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Check the changed config as a new one would be, then go on. Raises ConfigError."""
    if "=" in args.run_dir and not Path(args.run_dir).expanduser().exists():
        raise ConfigError(f"resume needs a run directory before {args.run_dir}: {USAGE}")
    run_dir = find_run(args.run_dir)
    standing = check_resume_dir(run_dir)
    if standing:
        raise ConfigError(*standing)
    notes = load_recorded(recorded_plugins(run_dir / "config.yaml"))
    job = changed(run_dir, args.overrides, args.config_dir)
    found = [*_elsewhere(run_dir, job.config, args.overrides), *job_faults(job, run_dir)]
    if not found:
        found = [*_contradictions(run_dir, job.config, args.overrides)]
        found += checkpoint_misfits(run_dir / "checkpoints", job.config)
    if found:
        raise ConfigError(*found)
    warn(job.config, [*notes, *job.notes])
    if job.config.launcher.name == "slurm":
        from hp_train.commands.submit import start  # only runs that are submitted pay for it

        return start(job, argv, run_dir)
    return resume_run(run_dir, job.config, overrides=args.overrides, argv=argv)


def changed(run_dir: Path, overrides: list[str], config_dir: str | None = None) -> Composition:
    """Return the config of the run in `run_dir` with `overrides` applied, and its faults.

    Raises ConfigError when nothing could be composed.
    """
    recipe, first, paths = started_with(run_dir / "overrides.yaml")
    if any(is_group_override(override) for override in overrides):
        return examine([*first, *still_pinned(paths, overrides), *overrides], config_dir)
    return change(run_dir / "config.yaml", overrides, recipe)


def _contradictions(run_dir: Path, config: TrainerConfig, overrides: list[str]) -> Iterator[str]:
    """Yield why trainer.resume does not go with the verb."""
    if "trainer.resume=never" in overrides:
        yield "trainer.resume=never contradicts resume; leave it out, or use auto or must"
    if config.trainer.resume == "must" and newest_committed(run_dir / "checkpoints") is None:
        yield f"trainer.resume=must, and {run_dir} holds no complete checkpoint; use auto to begin at step 1"


def _elsewhere(run_dir: Path, config: TrainerConfig, overrides: list[str]) -> Iterator[str]:
    """Yield a line for each key among `overrides` that would place a new run; to name the run's own folder is fine."""
    typed = {override.partition("=")[0].lstrip("+") for override in overrides}
    own_folder = config.trainer.run_dir is not None and Path(config.trainer.run_dir).expanduser().absolute() == run_dir
    for key in ("trainer.run_dir", "trainer.run_name", "trainer.runs_root"):
        value = value_at(config, key)
        if key in typed and value is not None and not (key == "trainer.run_dir" and own_folder):
            yield f"{key}={value} has no effect: the run goes on in {run_dir}; leave it out"


def started_with(path: Path) -> tuple[str | None, list[str], list[str]]:
    """Return the recipe and the overrides that a run was started with, and those for paths that its files named."""
    try:
        saved = yaml.safe_load(path.read_text(encoding="utf-8"))
        paths = [str(override) for override in saved.get("paths", [])]  # not written by earlier versions
        return saved["recipe"] or None, [str(override) for override in saved["overrides"]], paths
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be used: {' '.join(str(error).split())}") from error
