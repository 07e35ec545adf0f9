"""What checkpoints a run has and which of them hold, for the command line. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_train.checkpoint.layout import (
    COMMITTED,
    PROGRESS,
    REPLACED,
    bytes_in,
    candidates,
    file_fault,
    read_json,
    read_manifest,
    size_fault,
    step_folders,
)
from hp_train.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """One folder under checkpoints/, looked at."""

    path: Path
    step: int
    num_bytes: int
    saved_at: float | None  # seconds since the epoch; None for an unfinished one
    fault: str | None  # why nothing can go on from it; None if something can
    is_unfinished: bool = False
    mesh: str = ""  # that saved it
    attempt: int | None = None


def inspect(checkpoints_dir: Path, *, verify: bool) -> list[CheckpointRecord]:
    """Return all folders of steps, newest first; with `verify` every byte is held against its checksum.

    The run may go on meanwhile: a folder that it has taken away is left out.
    """
    found = [_inspect(folder.path, folder.step, folder.suffix, verify) for folder in step_folders(checkpoints_dir)]
    return [record for record in found if record.path.exists()]


def _inspect(path: Path, step: int, suffix: str, verify: bool) -> CheckpointRecord:
    num_bytes = bytes_in(path)
    if suffix not in ("", REPLACED):
        return CheckpointRecord(path, step, num_bytes, None, "was never finished", is_unfinished=True)
    fault = _fault(path, verify)
    try:
        saved_at = (path / COMMITTED).stat().st_mtime
        progress: Any = read_json(path, read_manifest(path), PROGRESS)
        mesh, attempt = progress.get("mesh", ""), progress.get("run", {}).get("attempt")
    except (CheckpointError, OSError, AttributeError):  # the fault has been told
        return CheckpointRecord(path, step, num_bytes, None, fault or "its progress.json makes no sense")
    return CheckpointRecord(path, step, num_bytes, saved_at, fault, mesh=mesh, attempt=attempt)


def _fault(path: Path, verify: bool) -> str | None:
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return str(error).partition(": ")[2] if ": " in str(error) else str(error)
    check = file_fault if verify else size_fault
    faults = (check(path, name, record) for name, record in sorted(manifest.files.items()))
    return next((fault for fault in faults if fault is not None), None)


def slowest_save_s(checkpoints_dir: Path) -> float:
    """Return how long the slowest of the checkpoints that are kept took to write, by their manifests; 0 for none."""
    slowest_s = 0.0
    for folder in candidates(checkpoints_dir):
        try:
            slowest_s = max(slowest_s, read_manifest(folder.path).write_s)
        except CheckpointError:  # damaged, or thinned out this very moment
            continue
    return slowest_s
