"""`hp-train cancel RUN`: end a run for good: its SLURM job, or its launcher here, which saves first. No torch."""

from __future__ import annotations

import argparse
import os
import signal

from hp_train.errors import ConfigError
from hp_train.launch import slurm_tools
from hp_train.launch.owner import living_owner, machine_identity
from hp_train.launch.run_of_job import find_run_or_job
from hp_train.launch.run_state import read_state
from hp_train.launch.slurm_end import CANCELLED_FILE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run", metavar="RUN", help="a run's directory, the end of its id, last, or a job's id")


def run(args: argparse.Namespace) -> int:
    """Cancel the job, which then never goes on by itself, or stop the launcher. Raises ConfigError if nothing runs."""
    run_dir = find_run_or_job(args.run)
    state = read_state(run_dir)
    if state.job is not None and state.job.is_active:
        (run_dir / CANCELLED_FILE).touch()  # what SLURM shows of a job that ends does not tell why
        slurm_tools.cancel(state.job.job_id)
        print(f"cancelled job {state.job.job_id} of {run_dir}; its last checkpoint stays")
        return 0
    owner = living_owner(run_dir)
    if owner is None:
        raise ConfigError(f"{run_dir} is not running" + (f": {state.note}" if state.note else ""))
    if owner.machine != machine_identity():
        raise ConfigError(f"{run_dir} is run by {owner.describe()}; stop it there: kill {owner.pid}")
    os.kill(owner.pid, signal.SIGTERM)
    print(f"told {owner.describe()} to save and stop {run_dir}")
    return 0
