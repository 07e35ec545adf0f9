"""What was found wrong with a config, and which of its keys can no longer be trusted. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

EVERYTHING = "*"


@dataclass(frozen=True, slots=True)
class Fault:
    """One line for the person, and what it leaves unknown: dotted keys, `section.` for all keys of a group, or `*`.

    A rule that reads an unknown key is not checked: its complaint would only echo this fault.
    """

    message: str
    unknown: tuple[str, ...] = ()


def is_unknown(key: str, unknown: Iterable[str]) -> bool:
    """Say whether the value of dotted `key` is unknown after faults that left `unknown`."""
    return any(
        item in (EVERYTHING, key) or (item.endswith(".") and key.startswith(item)) or item.startswith(key + ".")
        for item in unknown
    )
