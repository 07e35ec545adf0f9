"""`hp-train report RUN_DIR`: write one web page on a run, which opens without a network. No torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from hp_train.commands.arguments import add_run_dir
from hp_train.errors import ConfigError
from hp_train.launch.files import write_text
from hp_train.launch.find_run import find_run

_NAME = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run_dir(parser, "the run to report on")
    parser.add_argument("--out", metavar="FILE", help=f"file to write; default: {_NAME} in the run directory")


def run(args: argparse.Namespace) -> int:
    """Write the page and print where. Raises ConfigError when it cannot be written."""
    from hp_train.reports.page import page_of

    run_dir = find_run(args.run_dir)
    path = run_dir / _NAME if args.out is None else Path(args.out).expanduser().absolute()
    if path.is_dir():
        path = path / _NAME
    try:
        write_text(path, page_of(run_dir))
    except OSError as error:
        raise ConfigError(f"report: {path} cannot be written: {error.strerror}") from error
    print(f"wrote {path}")
    return 0
