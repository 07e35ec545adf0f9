"""`hp-train resume RUN_DIR [key=value ...]`: go on with a run, perhaps changed. No torch until all is checked.

Plain keys apply to the run's config.yaml. A group or recipe among the arguments composes the run anew, from the
overrides that it was started with and these.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from hp_train.checkpoint.layout import newest_committed
from hp_train.commands.arguments import add_config_dir, add_overrides, add_run_dir
from hp_train.config.schema import TrainerConfig
from hp_train.config.schema_tree import value_at
from hp_train.config.typed_value import key_of
from hp_train.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run_dir(parser, "the run to go on with")
    add_overrides(parser, "what is to differ, this time")
    add_config_dir(parser)


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Check the changed config as a new one would be, then go on. Raises ConfigError."""
    from hp_train.checkpoint.fit import checkpoint_misfits  # Hydra and the checks, which completion does without
    from hp_train.commands.saved_run import changed, named_run
    from hp_train.commands.train import job_faults, warn
    from hp_train.launch.capsule import recorded_plugins
    from hp_train.launch.run_dir import check_resume_dir
    from hp_train.launch.start import resume_run
    from hp_train.plugins import load_recorded

    run_dir = named_run(args.run_dir, "resume")
    standing = check_resume_dir(run_dir)
    if standing:
        raise ConfigError(*standing)
    notes = load_recorded(recorded_plugins(run_dir / "config.yaml"))
    job = changed(run_dir, args.overrides, args.config_dir)
    typed = set(map(key_of, args.overrides))
    found = [*_elsewhere(run_dir, job.config, typed), *job_faults(job, run_dir)]
    if not found:
        found = [*_contradictions(run_dir, job.config, typed)]
        found += checkpoint_misfits(run_dir / "checkpoints", job.config)
    if found:
        raise ConfigError(*found)
    warn(job.config, [*notes, *job.notes])
    if job.config.launcher.name == "slurm":
        from hp_train.commands.submit import start  # only runs that are submitted pay for it

        return start(job, argv, run_dir)
    return resume_run(run_dir, job.config, overrides=args.overrides, argv=argv)


def _contradictions(run_dir: Path, config: TrainerConfig, typed: set[str]) -> Iterator[str]:
    """Yield why trainer.resume does not go with the verb."""
    if config.trainer.resume == "never" and "trainer.resume" in typed:
        yield "trainer.resume=never contradicts resume; leave it out, or use auto or must"
    if config.trainer.resume == "must" and newest_committed(run_dir / "checkpoints") is None:
        yield f"trainer.resume=must, and {run_dir} holds no complete checkpoint; use auto to begin at step 1"


def _elsewhere(run_dir: Path, config: TrainerConfig, typed: set[str]) -> Iterator[str]:
    """Yield a line for each key that was typed and would place a new run; to name the run's own folder is fine."""
    own_folder = config.trainer.run_dir is not None and Path(config.trainer.run_dir).expanduser().absolute() == run_dir
    for key in ("trainer.run_dir", "trainer.run_name", "trainer.runs_root"):
        value = value_at(config, key)
        if key in typed and value is not None and not (key == "trainer.run_dir" and own_folder):
            yield f"{key}={value} has no effect: the run goes on in {run_dir}; leave it out"
