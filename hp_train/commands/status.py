"""`hp-train status [RUN_DIR|JOB]`: state, step, time left, attempts, goodput and last checkpoint of runs. No torch."""

from __future__ import annotations

import argparse

from hp_train.launch.find_run import find_run, folder_of_runs, list_runs, started_at
from hp_train.launch.run_of_job import find_run_or_job
from hp_train.launch.run_state import describe_state, read_state

_MOST_LOOKED_AT = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="a run's directory, the end of its id, last, or a job's id"
    )


def run(args: argparse.Namespace) -> int:
    """Print the state of one run; without an argument that of all that are queued or run, else of the last one."""
    if args.run is not None:
        print(*describe_state(read_state(find_run_or_job(args.run))), sep="\n")
        return 0
    newest = sorted(list_runs(folder_of_runs()), key=started_at, reverse=True)[:_MOST_LOOKED_AT]
    states = [state for state in map(read_state, newest) if not state.is_over]
    for state in states or [read_state(find_run("last"))]:
        print(*describe_state(state), sep="\n")
    return 0
