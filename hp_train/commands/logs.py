"""`hp-train logs RUN [--rank N | --failed] [-f]`: what a run's launcher and ranks printed. No torch.

Without an option the launcher's log of a SLURM job, then every node's log, in which each line has its rank before it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from hp_train.checkpoint.fence import newest_attempt
from hp_train.errors import ConfigError
from hp_train.launch.history import LineTail, read_facts
from hp_train.launch.node_log import node_logs, prefix_of
from hp_train.launch.outcome import read_outcome
from hp_train.launch.run_dir import attempt_dir
from hp_train.launch.run_of_job import find_run_or_job
from hp_train.launch.run_state import read_state

_POLL_S = 0.5
_ASK_EVERY_S = 5.0  # the scheduler is asked no more often than that


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run", metavar="RUN", help="a run's directory, the end of its id, last, or a job's id")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, metavar="N", help="only this rank")
    which.add_argument("--failed", action="store_true", help="only the rank that failed first in the last attempt")
    parser.add_argument("--attempt", type=int, metavar="N", help="of this attempt; the last one unless given")
    parser.add_argument("-f", "--follow", action="store_true", help="go on printing until the run is over")


def run(args: argparse.Namespace) -> int:
    """Print the logs. Raises ConfigError where there can be none."""
    run_dir = find_run_or_job(args.run)
    attempt = newest_attempt(run_dir) if args.attempt is None else args.attempt
    rank = _failed_rank(run_dir, attempt) if args.failed else args.rank
    keep = "" if rank is None else prefix_of(rank)
    printer = _Printer(keep)
    printer.add([*(_job_logs(run_dir) if rank is None and args.attempt is None else []), *node_logs(run_dir, attempt)])
    if not args.follow and not printer.print_new(last=True):
        print(f"hp-train: {_why_nothing(run_dir, attempt, rank)}", file=sys.stderr)
    asked_at, over = -_ASK_EVERY_S, False
    while args.follow and not over:
        if time.monotonic() - asked_at >= _ASK_EVERY_S:
            asked_at, over = time.monotonic(), read_state(run_dir).is_over
        if args.attempt is None:
            attempt = newest_attempt(run_dir)
            printer.add(_job_logs(run_dir) if rank is None else [])
        printer.add(node_logs(run_dir, attempt))
        printer.print_new(last=over)
        time.sleep(0 if over else _POLL_S)
    return 0


def _why_nothing(run_dir: Path, attempt: int, rank: int | None) -> str:
    """Say that ranks which were there printed nothing. Raises ConfigError if there were none such."""
    facts = read_facts(attempt_dir(run_dir, attempt))
    if facts is None or not 0 <= (rank or 0) < facts.world_size:
        whose = f"rank {rank} in attempt {attempt}" if rank is not None else f"attempt {attempt}"
        raise ConfigError(f"{run_dir} has no logs of {whose}")
    return f"{'its ranks' if rank is None else f'rank {rank}'} printed nothing in attempt {attempt} of {run_dir}"


def _failed_rank(run_dir: Path, attempt: int) -> int:
    outcome = read_outcome(run_dir, attempt)
    if outcome is None or outcome.rank is None:
        raise ConfigError(f"no rank is said to have failed in attempt {attempt} of {run_dir}")
    return outcome.rank


def _job_logs(run_dir: Path) -> list[Path]:
    """Return the logs of a run's jobs, oldest first."""
    return sorted(run_dir.glob("slurm_*.out"), key=lambda path: path.stat().st_mtime)


class _Printer:
    """Prints what is new in a growing number of files: all lines, or those that begin with `keep`, without it."""

    def __init__(self, keep: str) -> None:
        self._keep = keep
        self._tails: dict[Path, LineTail] = {}

    def add(self, paths: Iterable[Path]) -> None:
        """Look at these files from now on, too."""
        for path in paths:
            self._tails.setdefault(path, LineTail(path))

    def print_new(self, *, last: bool) -> bool:
        """Print the lines that have come, with `last` the torn ones too, and say whether there were any."""
        printed = False
        for tail in self._tails.values():
            for line in tail.poll(torn=last):
                if line.startswith(self._keep):
                    print(line.removeprefix(self._keep), flush=True)
                    printed = True
        return printed
