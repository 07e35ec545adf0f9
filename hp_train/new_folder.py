"""A folder that appears under its name whole or not at all. Ground floor, no torch.

It is filled under a temporary name beside its place; at the end everything in it is synced to the disk and one rename
gives it its name. A process that dies in between leaves the temporary folder and never the other.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from hp_train.errors import ConfigError


class NewFolder:
    """Context manager: `path` is to be filled, `publish` gives it the name `target`. Without that, no trace stays.

    `option` is what the target was given by, for errors. Raises ConfigError when the target is taken or cannot be made.
    """

    path: Path

    def __init__(self, target: Path, option: str) -> None:
        self._target = target
        self._option = option

    def __enter__(self) -> Self:
        target, parent = self._target, self._target.parent
        refuse_taken(target, self._option)
        try:
            parent.mkdir(parents=True, exist_ok=True)
            self.path = Path(tempfile.mkdtemp(prefix=f"{target.name}.tmp-", dir=parent))
        except FileExistsError:
            raise ConfigError(f"{self._option} {target} cannot be made: {parent} is not a folder") from None
        except OSError as error:
            raise ConfigError(f"{self._option} {target} cannot be made ({error.strerror})") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)  # after `publish` it is gone already

    def publish(self) -> None:
        """Sync the folder, whose files are closed, and give it its name: the moment at which it exists.

        Raises OSError, and ConfigError when somebody else has taken the name meanwhile.
        """
        self.path.chmod(0o777 & ~_umask())  # mkdtemp makes it private
        for file in self.path.iterdir():
            sync(file)
        sync(self.path)
        try:
            self.path.rename(self._target)
        except OSError:
            refuse_taken(self._target, self._option)
            raise
        sync(self._target.parent)


def refuse_taken(target: Path, option: str) -> None:
    """Raise ConfigError if there is something at `target`, which `option` gives, other than an empty folder."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"{option} {target} exists already; choose another folder or remove it")


def sync(path: Path) -> None:
    """Bring a file to the disk; of a folder, the names inside it: new ones and renames then survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
