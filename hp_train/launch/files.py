"""Files of a run directory, written so that a reader or a crash never meets half of one. No torch."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from hp_train.errors import ConfigError


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step; a crash leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as indented JSON in one step."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in `path`, or None if there is no such file. Raises ConfigError where it holds none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:  # no JSON, or no text
        raise damaged(path, str(error)) from None
    if not isinstance(found, dict):
        raise damaged(path, f"it holds a {type(found).__name__}, no object")
    return found


def damaged(path: Path, why: str) -> ConfigError:
    """Return the error to raise for a file of ours that somebody else, or a broken disk, has changed."""
    return ConfigError(f"{path} is damaged: {' '.join(why.split())}; restore or remove it")
