"""`hp-train watch RUN`: the live view of any run, from its files; ending it ends nothing else. No torch."""

from __future__ import annotations

import argparse

from hp_train.launch.run_of_job import find_run_or_job
from hp_train.launch.watch import watch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run", metavar="RUN", help="a run's directory, the end of its id, last, or a job's id")


def run(args: argparse.Namespace) -> int:
    """Show the run until it is over, then how it ended."""
    watch(find_run_or_job(args.run))
    return 0
