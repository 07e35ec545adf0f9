"""Bounds of config fields: declared beside the field, checked by `config.validate`, shown in the help. No torch.

`number(1.0, low=0, above=True)` makes a dataclass field that carries its bounds in `metadata`, `choice("a", "a", "b")`
one that carries its valid values, and `file_path()` one that names a file or folder. The dataclass tree itself stays
plain, so that OmegaConf reads it unchanged.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from hp_train.config.numbers import spell


@dataclass(frozen=True, slots=True)
class Bounds:
    """Valid values of one field: a closed or half-open interval, or a list of names, plus exceptions to it."""

    low: float | None = None
    high: float | None = None
    low_open: bool = False
    high_open: bool = False
    also: tuple[Any, ...] = ()
    choices: tuple[Any, ...] = ()

    def describe(self) -> str:
        """Return the bounds in words, as error lines and the help print them."""
        words = []
        if self.choices:
            words.append(", ".join(spell(choice) for choice in self.choices))
        elif self.low is not None and self.high is not None:
            low = f"above {self.low:g}" if self.low_open else f"{self.low:g}"
            high = f"below {self.high:g}" if self.high_open else f"{self.high:g}"
            words.append(f"{low} to {high}")
        words.extend(spell(value) for value in self.also)
        return " or ".join(words)

    def contain(self, value: Any) -> bool:
        """Say whether `value` (a number, a name, or None) is valid. Lists are checked item by item by the caller."""
        if any(value == item and type(value) is type(item) for item in (*self.also, *self.choices)):
            return True
        if self.choices or isinstance(value, (bool, str)) or value is None:
            return not self.choices and self.low is None
        if self.low is None or self.high is None:
            return True
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below  # nan compares false, infinity is above every `high`


def number(
    default: Any,
    low: float,
    high: float,
    *,
    low_open: bool = False,
    high_open: bool = False,
    also: tuple[Any, ...] = (),
) -> Any:
    """Declare a numeric field with bounds; `also` lists valid values outside the interval (None, -1, "auto")."""
    bounds = Bounds(low, high, low_open, high_open, also)
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata={"bounds": bounds})
    return dataclasses.field(default=default, metadata={"bounds": bounds})


def choice(default: Any, *choices: Any) -> Any:
    """Declare a field that takes one of `choices`."""
    return dataclasses.field(default=default, metadata={"bounds": Bounds(choices=choices)})


def file_path(default: str | dict[str, str] | None = None) -> Any:
    """Declare a field that names a file or folder, or maps names to some: a run keeps them as absolute paths.

    `~` is the home folder.
    """
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata={"path": True})
    return dataclasses.field(default=default, metadata={"path": True})


def is_path(field: dataclasses.Field) -> bool:
    """Say whether a field was declared by `file_path`."""
    return bool(field.metadata.get("path"))


def bounds_of(field: dataclasses.Field) -> Bounds:
    """Return the bounds a field was declared with; unlimited ones if none were."""
    return field.metadata.get("bounds", Bounds())
