"""Keeps an older attempt from writing into a run directory that a newer one has taken over. No torch.

Attempts are numbered, and a number is taken by making `logs/attempt_N`, which is atomic on network file systems too,
where locks are not to be trusted. Whoever is about to write looks whether a higher number has appeared: two stat calls
when nothing has changed.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from hp_train.errors import SupersededError

OWNER_FILE = "owner.json"
_ATTEMPT = re.compile(r"attempt_(\d+)")


def begun_attempts(run_dir: Path) -> list[int]:
    """Return the numbers of the attempts that have begun, in order."""
    try:
        found = map(_ATTEMPT.fullmatch, os.listdir(run_dir / "logs"))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(match[1]) for match in found if match)


def newest_attempt(run_dir: Path) -> int:
    """Return the highest attempt that has begun, 0 where none has."""
    return max(begun_attempts(run_dir), default=0)


class Fence:
    """One attempt's right to write into `run_dir`; `attempt` 0 stands for a run without attempts, which always may."""

    def __init__(self, run_dir: Path, attempt: int) -> None:
        self._run_dir = run_dir
        self.attempt = attempt
        self._watched = (os.fspath(run_dir / "logs"), os.fspath(run_dir / OWNER_FILE))
        self._seen: tuple = ()

    def check(self) -> None:
        """Raise SupersededError if a newer attempt has begun."""
        newer = self.newer_attempt()
        if newer is not None:
            raise SupersededError(
                f"attempt {newer} has taken over {self._run_dir}: attempt {self.attempt} stops without writing"
            )

    def newer_attempt(self) -> int | None:
        """Return the number of a newer attempt, None if there is none."""
        now = tuple(map(_stamp, self._watched))
        if now == self._seen or self.attempt == 0:
            return None
        newest = max(newest_attempt(self._run_dir), _owning_attempt(self._run_dir))
        if newest > self.attempt:
            return newest
        self._seen = now
        return None


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:  # gone, or out of reach for now: what was known stays true
        return None
    return status.st_ino, status.st_mtime_ns


def _owning_attempt(run_dir: Path) -> int:
    try:
        return int(json.loads((run_dir / OWNER_FILE).read_bytes()).get("attempt", 0))
    except (OSError, ValueError, AttributeError, TypeError):
        return 0
