"""`hp-train logs RUN [--rank N | --failed] [-f]`: what a run's launcher and ranks printed. No torch.

Without an option the launcher's log of a SLURM job, then every rank's lines, each with its rank before it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from hp_train.checkpoint.fence import newest_attempt
from hp_train.errors import ConfigError
from hp_train.launch.history import LineTail
from hp_train.launch.outcome import read_outcome
from hp_train.launch.run_dir import attempt_dir, rank_dir
from hp_train.launch.run_of_job import find_run_or_job
from hp_train.launch.run_state import read_state

_POLL_S = 0.5
_STREAMS = ("stdout.log", "stderr.log")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run", metavar="RUN", help="a run's directory, the end of its id, last, or a job's id")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, metavar="N", help="only this rank")
    which.add_argument("--failed", action="store_true", help="only the rank that failed first in the last attempt")
    parser.add_argument("--attempt", type=int, metavar="N", help="of this attempt; the last one unless given")
    parser.add_argument("-f", "--follow", action="store_true", help="go on printing until the run is over")


def run(args: argparse.Namespace) -> int:
    """Print the logs. Raises ConfigError where there are none."""
    run_dir = find_run_or_job(args.run)
    attempt = newest_attempt(run_dir) if args.attempt is None else args.attempt
    rank = _failed_rank(run_dir, attempt) if args.failed else args.rank
    tails = _launcher_logs(run_dir) if rank is None and args.attempt is None else {}
    tails |= _rank_logs(run_dir, attempt, rank)
    if not tails:
        raise ConfigError(
            f"{run_dir} has no logs of " + (f"rank {rank} in " if rank is not None else "") + f"attempt {attempt}"
        )
    _print(tails, last=not args.follow)
    while args.follow:
        over = read_state(run_dir).is_over
        newest = newest_attempt(run_dir)
        if args.attempt is None and newest != attempt:
            attempt = newest
        tails |= {name: tail for name, tail in _rank_logs(run_dir, attempt, rank).items() if name not in tails}
        _print(tails, last=over)
        if over:
            break
        time.sleep(_POLL_S)
    return 0


def _failed_rank(run_dir: Path, attempt: int) -> int:
    outcome = read_outcome(run_dir, attempt)
    if outcome is None or outcome.rank is None:
        raise ConfigError(f"no rank is said to have failed in attempt {attempt} of {run_dir}")
    return outcome.rank


def _launcher_logs(run_dir: Path) -> dict[tuple[str, str], LineTail]:
    """Return the logs of a run's jobs, oldest first, keyed by file and what to print before each line."""
    logs = sorted(run_dir.glob("slurm_*.out"), key=lambda path: path.stat().st_mtime)
    return {(str(path), ""): LineTail(path) for path in logs}


def _rank_logs(run_dir: Path, attempt: int, only: int | None) -> dict[tuple[str, str], LineTail]:
    folders = attempt_dir(run_dir, attempt).glob("rank_*")
    ranks = sorted(int(folder.name.removeprefix("rank_")) for folder in folders if folder.name[5:].isdigit())
    chosen = ranks if only is None else [rank for rank in ranks if rank == only]
    paths = [(rank, rank_dir(run_dir, attempt, rank) / stream) for rank in chosen for stream in _STREAMS]
    return {
        (str(path), "" if only is not None else f"[rank {rank}] "): LineTail(path)
        for rank, path in paths
        if path.exists()
    }


def _print(tails: dict[tuple[str, str], LineTail], *, last: bool) -> None:
    for (_, prefix), tail in tails.items():
        for line in tail.poll(torn=last):
            print(f"{prefix}{line}", flush=True)
