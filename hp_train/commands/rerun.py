"""`hp-train rerun RUN_DIR [key=value ...]`: start a new run from an old one's config. No torch until all is checked.

The old run stays as it is. Plain keys apply to its config.yaml, the config that it was first started with; a group or
recipe among the arguments composes it anew, from the overrides of then and these. The new run has its own directory.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from hp_train.commands.arguments import add_config_dir, add_overrides, add_run_dir
from hp_train.config.typed_value import key_of

_OF_THE_OLD_RUN = {"trainer.run_dir": "null", "trainer.resume": "never"}  # where it was, and that it went on there


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run_dir(parser, "the run to repeat")
    add_overrides(parser, "what is to differ from it")
    add_config_dir(parser)


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Check the config as a new one is checked, then start it. Raises ConfigError."""
    from hp_train.commands.saved_run import changed, named_run  # Hydra, which completion does without
    from hp_train.commands.train import run as start
    from hp_train.launch.capsule import recorded_plugins
    from hp_train.plugins import load_recorded

    run_dir = named_run(args.run_dir, "rerun")
    notes = load_recorded(recorded_plugins(run_dir / "config.yaml"))
    typed = set(map(key_of, args.overrides))
    anew = [f"{key}={value}" for key, value in _OF_THE_OLD_RUN.items() if key not in typed]
    job = changed(run_dir, [*args.overrides, *anew], args.config_dir)
    overrides = tuple(_all_overrides(run_dir, args.overrides))
    return start([replace(job, overrides=overrides, notes=(*notes, *job.notes))], argv)


def _all_overrides(run_dir: Path, typed: list[str]) -> list[str]:
    """Return what composes the new run's config from nothing: what the old one was started with, then `typed`."""
    from hp_train.commands.saved_run import started_with
    from hp_train.config.paths import still_pinned

    _, first, pins = started_with(run_dir / "overrides.yaml")
    anew = {*map(key_of, typed), *_OF_THE_OLD_RUN}
    kept = [override for override in [*first, *still_pinned(pins, typed)] if key_of(override) not in anew]
    return [*kept, *typed]
