"""`hp-train runs [FOLDER]`: the runs with their state, step, loss and age, the newest first. No torch."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from hp_train.errors import ConfigError
from hp_train.launch.find_run import folder_of_runs, list_runs, started_at
from hp_train.launch.units import duration_text
from hp_train.reports.run_listing import RunListing, read_listing

_HEADER = ("run", "state", "step", "loss", "val", "age")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("folder", nargs="?", metavar="DIR", help="folder of runs; default: $HP_TRAIN_RUNS, else ./runs")
    parser.add_argument("-n", "--most", default="20", metavar="N", help="runs to list (20); 0 lists all")


def run(args: argparse.Namespace) -> int:
    """Print the table. Raises ConfigError for a folder that is not there."""
    if not args.most.isdecimal():
        raise ConfigError(f"runs: -n {args.most} is not a count; use 0 (all) or more")
    root = folder_of_runs() if args.folder is None else Path(args.folder).expanduser().absolute()
    if args.folder is not None and not root.is_dir():
        raise ConfigError(f"runs: {args.folder} is not a folder")
    found = sorted(list_runs(root), key=started_at, reverse=True)
    if not found:
        print(f"no runs in {root}; start one: hp-train recipe=llama_single")
        return 0
    shown = found[: int(args.most) or None]
    rows = [_HEADER, *(_row(read_listing(path), root) for path in shown)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    for row in rows:
        left = f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}"
        print(
            "  ".join([left, *(f"{text:>{width}}" for text, width in zip(row[2:], widths[2:], strict=True))]).rstrip()
        )
    if len(shown) < len(found):
        print(f"and {len(found) - len(shown)} older; -n 0 lists all {len(found)}")
    return 0


def _row(state: RunListing, root: Path) -> tuple[str, ...]:
    return (
        str(state.path.relative_to(root)),
        state.state,
        f"{state.step}/{state.max_steps if state.max_steps is not None else '?'}",
        "-" if state.loss is None else f"{state.loss:.3f}",
        "-" if state.val_loss is None else f"{state.val_loss:.3f}",
        duration_text(time.time() - state.started_at),
    )
