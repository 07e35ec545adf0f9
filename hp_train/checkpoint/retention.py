"""Which checkpoints stay. No torch.

Runs on rank 0 right after a save was committed. A folder is renamed before it is deleted, so that a crash half-way
never leaves something that looks like a checkpoint.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from hp_train.checkpoint.layout import DELETING, folder_name, is_committed, step_folders

_LOGGER = logging.getLogger(__name__)


def prune(checkpoints_dir: Path, *, saved_step: int, keep_last: int, keep_every: int | None = None) -> None:
    """Keep the checkpoint of `saved_step` and the newest complete ones before it, `keep_last` in all.

    Complete ones of steps that `keep_every` divides stay beyond that number. Left-overs of interrupted saves go, and so
    does everything beyond `saved_step`: such checkpoints were passed over when the run resumed from an earlier one, and
    describe steps that are being taken again. A folder that cannot be removed is a warning; the save itself has
    succeeded.
    """
    assert keep_last >= 1, f"keep_last={keep_last} would delete the checkpoint just written"
    if not is_committed(checkpoints_dir / folder_name(saved_step)):
        _LOGGER.warning("checkpoint of step %d is not where it was just written; nothing is deleted", saved_step)
        return
    for path in superfluous(checkpoints_dir, saved_step=saved_step, keep_last=keep_last, keep_every=keep_every):
        try:
            delete_folder(path)
        except OSError as error:
            _LOGGER.warning("old checkpoint %s could not be deleted: %s", path, error)


def superfluous(checkpoints_dir: Path, *, saved_step: int, keep_last: int, keep_every: int | None) -> list[Path]:
    """Return the folders that `prune` would delete."""
    kept = 0
    doomed = []
    for folder in step_folders(checkpoints_dir):
        is_whole = folder.suffix == "" and folder.step <= saved_step and is_committed(folder.path)
        if is_whole and kept < keep_last:
            kept += 1
        elif not (is_whole and keep_every is not None and folder.step % keep_every == 0):
            doomed.append(folder.path)
    return doomed


def delete_folder(path: Path) -> None:
    """Rename `path` to a name that no reader accepts, then delete it. Raises OSError."""
    if path.suffix != DELETING:
        doomed = path.with_suffix(DELETING)
        if doomed.exists():
            shutil.rmtree(doomed)
        path = path.rename(doomed)
    shutil.rmtree(path)
