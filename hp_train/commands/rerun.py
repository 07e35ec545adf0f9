"""`hp-train rerun RUN_DIR [key=value ...]`: start a new run from the config of an old one. No torch until all is checked.

The old run stays as it is. Plain keys apply to its config.yaml, the config that it was first started with; a group or
recipe among the arguments composes it anew, from the overrides of then and these. The new run has a directory of its own.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from hp_train.errors import ConfigError
from hp_train.launch.capsule import recorded_plugins
from hp_train.launch.find_run import find_run
from hp_train.plugins import load_recorded

USAGE = "hp-train rerun RUN_DIR [key=value ...]"

_OF_THE_OLD_RUN = {"trainer.run_dir": "null", "trainer.resume": "never"}  # where it was, and that it went on there


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", help="the run to repeat: its directory, last, or the end of its id"
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="what is to differ from it")
    parser.add_argument("--config-dir", metavar="DIR", help="a folder with recipes and options of your own")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Check the config as a new one is checked, then start it. Raises ConfigError."""
    from hp_train.commands.resume import changed
    from hp_train.commands.train import run as start

    if "=" in args.run_dir and not Path(args.run_dir).expanduser().exists():
        raise ConfigError(f"rerun needs a run directory before {args.run_dir}: {USAGE}")
    run_dir = find_run(args.run_dir)
    notes = load_recorded(recorded_plugins(run_dir / "config.yaml"))
    typed = {_key(override) for override in args.overrides}
    anew = [f"{key}={value}" for key, value in _OF_THE_OLD_RUN.items() if key not in typed]
    job = changed(run_dir, [*args.overrides, *anew], args.config_dir)
    overrides = tuple(_all_overrides(run_dir, args.overrides))
    return start([replace(job, overrides=overrides, notes=(*notes, *job.notes))], argv)


def _all_overrides(run_dir: Path, typed: list[str]) -> list[str]:
    """Return what composes the new run's config from nothing: what the old one was started with, then `typed`."""
    from hp_train.commands.resume import started_with
    from hp_train.config.paths import still_pinned

    _, first, pins = started_with(run_dir / "overrides.yaml")
    anew = {_key(override) for override in typed} | set(_OF_THE_OLD_RUN)
    kept = [override for override in [*first, *still_pinned(pins, typed)] if _key(override) not in anew]
    return [*kept, *typed]


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+")
