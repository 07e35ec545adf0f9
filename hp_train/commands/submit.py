"""`hp-train submit recipe=NAME launcher.nodes=N ...`: check as `train` does, then hand a script to SLURM. No torch.

A plain run with launcher=slurm comes here too. --dry-run (or --print) writes the script to stdout, and that is all.
Inside an allocation (`salloc`) the run starts now, over all its nodes, with the live view.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hp_train.commands.arguments import add_config_dir, add_overrides
from hp_train.config.schema import TrainerConfig
from hp_train.errors import ConfigError

if TYPE_CHECKING:  # it imports Hydra, as what the functions below import does: completion does without
    from hp_train.config.compose import Composition

_TASK = "SLURM_ARRAY_TASK_ID"  # what SLURM calls a task's number, and a config refers to


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_overrides(parser, "recipe=NAME and what differs from it")
    parser.add_argument(
        "--dry-run", "--print", action="store_true", help="write the job script to stdout, nothing else"
    )
    parser.add_argument("--multirun", "-m", action="store_true", help="one job for each combination of values key=a,b")
    add_config_dir(parser)


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Compose and check as `train` does, then submit. Raises ConfigError."""
    from hp_train.commands.train import check, run_to_go_on_with, warn
    from hp_train.config.compose import run_hydra
    from hp_train.config.override_check import check_request
    from hp_train.config.search_path import search_path

    path = search_path(args.config_dir)
    request = check_request(args.overrides, path, multirun=args.multirun)
    if "launcher" not in request.files.choices:  # neither typed nor chosen by the recipe
        request = check_request([*args.overrides, "launcher=slurm"], path, multirun=args.multirun)
    jobs = run_hydra(["--multirun"] if args.multirun else [], request)
    if any(job.config.launcher.name == "local" for job in jobs):
        raise ConfigError("submit needs a launcher that submits, and launcher.name=local does not; use launcher=slurm")
    check(jobs)
    for job in jobs:
        warn(job.config, job.notes)
        code = start(job, argv, run_to_go_on_with(job.config), script_only=args.dry_run)
        if code:
            return code
    return 0


def start(job: Composition, argv: list[str], run_dir: Path | None = None, *, script_only: bool = False) -> int:
    """Submit a job that has passed all checks, to go on in `run_dir` if it is given; return the exit code.

    Raises ConfigError if SLURM refuses it.
    """
    from hp_train.launch import slurm_tools
    from hp_train.launch.submit import Submission, print_script, submit_again, submit_runs

    runs = [Submission(job.config, job.recipe or "", list(job.overrides))]
    if run_dir is None and job.config.launcher.array is not None:
        runs = [replace(runs[0], config=config, task=task) for task, config in tasks_of(job)]
    if script_only:
        print_script(runs[0], run_dir)
        return 0
    missing = slurm_tools.missing_tools()
    if missing is not None:
        raise ConfigError(missing)
    if slurm_tools.in_allocation():
        from hp_train.launch.allocation import run_here

        return run_here(runs[0], argv, run_dir)
    if run_dir is None:
        submit_runs(runs, argv)
    else:
        submit_again(runs[0], run_dir, argv)
    return 0


def tasks_of(job: Composition) -> Iterator[tuple[int, TrainerConfig]]:
    """Yield the tasks of a job's array, each with the config that $SLURM_ARRAY_TASK_ID gives it. Raises ConfigError."""
    from hp_train.config.compose import compose_request
    from hp_train.config.override_check import check_request
    from hp_train.config.rules_slurm import array_tasks

    before = os.environ.get(_TASK)
    try:
        for task in array_tasks(job.config.launcher.array):
            os.environ[_TASK] = str(task)
            composed = compose_request(check_request(job.overrides, job.path))
            if composed.faults:
                raise ConfigError(*(f"{message} (task {task} of launcher.array)" for message in composed.messages))
            yield task, composed.config
    finally:
        os.environ.pop(_TASK, None)
        if before is not None:
            os.environ[_TASK] = before
