"""A file that grows by lines, none of which is lost or torn when the disk is full for a while. No torch.

A line that cannot be written stays in memory and goes with the next; what was written of it is taken back. So a run
outlives a full disk, a lost folder or a read-only file system, and its rows are whole when the disk is well again.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TextIO


class RowFile:
    """Appends lines to `path`, each in one write. Raises OSError only when the file cannot be opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._pending: list[bytes] = []
        self._has_warned = False

    def append(self, line: str) -> None:
        """Write `line`, or keep it until the file takes it; the first failure is warned of."""
        self._pending.append(f"{line}\n".encode())
        try:
            self._write_pending()
        except OSError as error:
            if not self._has_warned:
                warn(f"{self.path} cannot be written ({error.strerror}); training goes on, rows are kept in memory")
            self._has_warned = True

    def _write_pending(self) -> None:
        size = os.fstat(self._descriptor).st_size
        data = b"".join(self._pending)
        try:
            written = os.write(self._descriptor, data)
        except OSError:
            os.ftruncate(self._descriptor, size)
            raise
        if written < len(data):
            os.ftruncate(self._descriptor, size)
            raise OSError(28, "No space left on device", str(self.path))
        self._pending.clear()
        self._has_warned = False

    def sync(self) -> None:
        """Bring what is written to the disk, so that no checkpoint is newer than its row. Failures were warned of."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            if not self._has_warned:
                warn(f"{self.path} cannot be brought to the disk ({error.strerror})")
            self._has_warned = True

    def close(self) -> None:
        """Write what is pending and close; what cannot be written is told."""
        try:
            if self._pending:
                self._write_pending()
        except OSError as error:
            warn(f"{len(self._pending)} rows of {self.path} are lost ({error.strerror})")
        os.close(self._descriptor)


def warn(text: str) -> None:
    """Print a warning that a person cannot overlook."""
    say(f"WARNING: {text}", sys.stderr)


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line; a log on a disk that is full does not end the run."""
    try:
        print(text, file=stream, flush=True)
    except OSError:
        return  # there is nowhere to say it
