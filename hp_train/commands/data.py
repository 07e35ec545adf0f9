"""`hp-train data prepare INPUT...`: text files to a folder of memory-mapped tokens.

Argument parsing and what is printed. May import errors and `data`; never torch. The work is `hp_train.data.prepare`.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hp_train.errors import ConfigError, ExitCode

if TYPE_CHECKING:  # it imports numpy
    from hp_train.data.prepare import Progress

MAX_WORKERS = 1024
PLAIN_REPORT_EVERY_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verbs and options of `hp-train data`."""
    actions = parser.add_subparsers(dest="action", metavar="prepare", required=True)
    prepare = actions.add_parser(
        "prepare", help="turn text into memory-mapped tokens", description=__doc__.splitlines()[0]
    )
    prepare.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help=".txt (a document each, or see --separator), .jsonl (a document a line), these .gz, .parquet (a document "
        "a row), a folder of them, or hf:NAME, a Hugging Face dataset of the hub or of a folder",
    )
    prepare.add_argument(
        "--tokenizer",
        required=True,
        metavar="byte|FILE.json",
        help="bytes, or a tokenizer.json of the tokenizers library",
    )
    prepare.add_argument("--out", required=True, metavar="DIR", help="folder to make; must not exist yet")
    prepare.add_argument(
        "--field", default="text", metavar="NAME", help="field of a line or row that holds the text (text)"
    )
    prepare.add_argument("--separator", metavar="LINE", help="a line that ends a document in .txt files")
    prepare.add_argument("--split", default="train", metavar="NAME", help="split of a Hugging Face dataset (train)")
    prepare.add_argument("--subset", metavar="NAME", help="subset (configuration) of a Hugging Face dataset")
    prepare.add_argument(
        "--eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="put an end-of-document token after each document",
    )
    prepare.add_argument(
        "--eos-token", metavar="TOKEN", help="the end-of-document token, if the tokenizer's is not recognised"
    )
    prepare.add_argument(
        "--workers", default="1", metavar="N", help="processes that encode (1); the result is the same for any"
    )


def run(args: argparse.Namespace) -> int:
    """Do what the parsed `args` ask and print a summary. Raises ConfigError, one line for each fault."""
    from hp_train.data.prepare import check_arguments, prepare  # numpy: not needed to print the help

    faults, out = _option_faults(args), Path(args.out)
    if faults:
        try:
            check_arguments(
                args.inputs, out, args.tokenizer, eos=args.eos, eos_token=args.eos_token, split=args.split,
                subset=args.subset,
            )  # fmt: skip
        except ConfigError as error:
            faults.extend(message for message in error.messages if not message.startswith("--out") or out.name)
        raise ConfigError(*faults)
    started = time.monotonic()
    with _progress() as report:
        prepared = prepare(
            args.inputs,
            out,
            args.tokenizer,
            field=args.field,
            separator=args.separator,
            eos=args.eos,
            eos_token=args.eos_token,
            split=args.split,
            subset=args.subset,
            num_workers=int(args.workers),
            report=report,
        )
    index = prepared.index
    left_out = f" ({prepared.num_empty_documents:,} without text left out)" if prepared.num_empty_documents else ""
    print(
        f"{out}: {index.num_documents:,} documents{left_out}, {index.num_tokens:,} tokens as {index.dtype}, "
        f"vocabulary {index.vocabulary.size:,} ({index.vocabulary.tokenizer}), {time.monotonic() - started:.1f} s"
    )
    print(
        f"train on it: hp-train recipe=llama_fsdp_pp data=tokens data.path={shlex.quote(str(out))} "
        f"model.vocab_size={index.vocabulary.size}"
    )
    return ExitCode.DONE


def _option_faults(args: argparse.Namespace) -> list[str]:
    faults = []
    if not (args.workers.isascii() and args.workers.isdigit() and 1 <= int(args.workers) <= MAX_WORKERS):
        faults.append(f"--workers {args.workers} is not a number of processes; use 1 to {MAX_WORKERS}")
    if args.separator is not None and (args.separator == "" or "\n" in args.separator):
        faults.append("--separator must be the text of one line")
    if args.eos_token is not None and not args.eos:
        faults.append(f"--eos-token {args.eos_token} has no effect with --no-eos; leave one of them out")
    if not args.split:
        faults.append("--split is empty; name a split")
    if not args.field:
        faults.append("--field is empty; name the field that holds the text")
    if not args.out:
        faults.append("--out is empty; name a new folder")
    elif not Path(args.out).name:
        faults.append(f"--out {args.out} is not the name of a new folder")
    return faults


@contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    """Yield what is called with each `Progress`: it draws a bar on a terminal, else prints a line now and then."""
    if not sys.stderr.isatty():
        yield _PlainReport()
        return
    from rich.console import Console
    from rich import progress as bars

    columns = (
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
        bars.TextColumn("{task.description}"),
    )
    with bars.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None)
        yield lambda progress: bar.update(
            task, completed=progress.read_bytes, total=progress.total_bytes, description=_counts(progress)
        )


class _PlainReport:
    """Prints how far the preparation is, at most every PLAIN_REPORT_EVERY_S seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._last < PLAIN_REPORT_EVERY_S:
            return
        self._last = now
        percent = 100 * progress.read_bytes / max(progress.total_bytes, 1)
        print(
            f"read {progress.read_bytes / 1e6:,.0f} of {progress.total_bytes / 1e6:,.0f} MB ({percent:.0f}%), "
            f"{_counts(progress)}",
            file=sys.stderr,
            flush=True,
        )


def _counts(progress: Progress) -> str:
    return f"{progress.num_documents:,} documents, {progress.num_tokens:,} tokens"
