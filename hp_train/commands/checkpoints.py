"""`hp-train checkpoints RUN_DIR [--verify] [--prune]`: list, check and thin out the checkpoints of a run. No torch."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

from hp_train.checkpoint.inspection import CheckpointRecord, inspect
from hp_train.checkpoint.layout import LATEST, write_durably
from hp_train.checkpoint.retention import delete_folder
from hp_train.checkpoint.size import size_text
from hp_train.commands.arguments import add_run_dir
from hp_train.config.schema import CheckpointSection
from hp_train.errors import ConfigError, ExitCode
from hp_train.launch.find_run import find_run
from hp_train.launch.owner import living_owner
from hp_train.launch.units import duration_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run_dir(parser)
    parser.add_argument("--verify", action="store_true", help="read every file and hold it against its checksum")
    parser.add_argument(
        "--prune",
        action="store_true",
        help="delete what is unfinished, damaged, or beyond checkpoint.keep_last and keep_every; verifies first",
    )


def run(args: argparse.Namespace) -> int:
    """Print one line a checkpoint; exit code 1 when one of them is damaged and stays."""
    run_dir = find_run(args.run_dir)
    if args.prune:
        owner = living_owner(run_dir)
        if owner is not None:
            raise ConfigError(f"run directory {run_dir} is in use by {owner.describe()}: it prunes as it saves")
    folder = run_dir / "checkpoints"
    records = inspect(folder, verify=args.verify or args.prune)
    if not records:
        print(f"no checkpoints in {folder}")
        return int(ExitCode.DONE)
    _print_table(records, args.verify or args.prune)
    if args.prune and any(record.fault is None for record in records):
        _prune(folder, records, _settings(run_dir))
        return int(ExitCode.DONE)
    if args.prune:
        print("none of them holds: nothing is deleted, for one may still be mended by hand")
    damaged = [record for record in records if record.fault is not None and not record.is_unfinished]
    return int(ExitCode.FAILED if damaged else ExitCode.DONE)


def _print_table(records: list[CheckpointRecord], verified: bool) -> None:
    resumes_from = next((record for record in records if record.fault is None), None)
    rows = [_cells(record, verified, record is resumes_from) for record in records]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _cells(record: CheckpointRecord, verified: bool, is_resumed_from: bool) -> tuple[str, ...]:
    age = "" if record.saved_at is None else f"{duration_text(max(0.0, time.time() - record.saved_at))} ago"
    who = record.mesh + (f", attempt {record.attempt}" if record.attempt is not None else "")
    if record.fault is not None:
        state = f"unfinished: {record.path.name}" if record.is_unfinished else f"damaged: {record.fault}"
    else:
        state = "every checksum holds" if verified else "complete"
    if is_resumed_from:
        state += "; resume goes on from here"
    return f"step {record.step}", size_text(record.num_bytes), age, who, state


def _prune(folder: Path, records: list[CheckpointRecord], settings: CheckpointSection) -> None:
    doomed = list(_superfluous(records, settings))
    for record, why in doomed:
        delete_folder(record.path)
        print(f"deleted {record.path.name}: {why}")
    if not doomed:
        print("nothing to delete")
    left = next((record for record in records if record.fault is None), None)
    if left is not None:
        write_durably(folder / LATEST, f"{left.path.name}\n".encode())


def _superfluous(
    records: list[CheckpointRecord], settings: CheckpointSection
) -> Iterator[tuple[CheckpointRecord, str]]:
    """Yield what goes and why."""
    kept = 0
    for record in records:
        if record.is_unfinished:
            yield record, "unfinished"
        elif record.fault is not None:
            yield record, "damaged"
        elif kept < settings.keep_last:
            kept += 1
        elif settings.keep_every is None or record.step % settings.keep_every:
            yield record, f"beyond the last {settings.keep_last}"


def _settings(run_dir: Path) -> CheckpointSection:
    """Return what the run's config says of keeping; its defaults where it says nothing."""
    try:
        given = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))["checkpoint"]
        return CheckpointSection(keep_last=int(given["keep_last"]), keep_every=given.get("keep_every"))
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"{run_dir / 'config.yaml'} does not say what to keep: {why}") from None
