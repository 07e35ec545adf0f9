"""One argument `key=value` of the command line: its values as the schema means them, and the form for Hydra. No torch.

Only several values for the jobs of --multirun keep Hydra's meaning: a comma outside brackets and quotes separates them,
and range(...), glob(...) and the like go to Hydra's own grammar. Everything else is a value as it was typed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hp_train.config.schema_tree import GROUPS, LEAVES, entry_of
from hp_train.config.search_path import RECIPE_GROUP
from hp_train.config.typed_value import key_of, quoted, read_value, split_top, text_of, unquoted

_SWEEP = re.compile(r"(choice|range|interval|glob|sort|shuffle|tag)\(.*\)", re.DOTALL)
_PAIR = re.compile(r"[^\s{}\[\],:'\"]+:[^,]*")


@dataclass(frozen=True, slots=True)
class Argument:
    """What one argument asks for."""

    typed: str  # without the `+` before it
    key: str
    values: tuple[Any, ...]  # one, or one for each job
    sweep: str = ""  # the text that Hydra counts values from, when it is not a list of them
    adds: bool = False  # an entry for a mapping, beside those it has

    @property
    def value(self) -> Any:
        """Return the one value."""
        assert not self.is_sweep, f"{self.typed} has several values"
        return self.values[0]

    @property
    def is_sweep(self) -> bool:
        """Say whether there are several values, one for each job."""
        return bool(self.sweep) or len(self.values) > 1

    def with_value(self, value: Any) -> Argument:
        """Return this argument for another value."""
        return Argument(self.typed, self.key, (value,), adds=self.adds)

    def for_hydra(self) -> str:
        """Return the override that Hydra reads as exactly these values."""
        if self.sweep:
            return f"{self.key}={self.sweep}"
        leaf = LEAVES.get(self.key)
        forced = "++" if leaf is not None and leaf.is_mapping else ""
        return f"{forced}{self.key}={','.join(map(quoted, self.values))}"


def read_argument(typed: str, *, multirun: bool = False) -> Argument:
    """Return what `typed`, a text with a key before its `=`, asks for.

    multirun: whether commas separate the values of several jobs. Raises Unreadable.
    """
    key, text = key_of(typed), typed.partition("=")[2]
    typed = f"{key}={text}"
    if key.startswith("hydra."):
        return Argument(typed, key, (text_of(text),))
    if (entry := entry_of(key)) is not None:
        return Argument(typed, entry[0].key, ({entry[1]: read_value(key, text)},), adds=True)
    leaf = LEAVES.get(key)
    if leaf is not None and leaf.is_mapping and _PAIR.fullmatch(text.strip()):
        name, _, item = text.strip().partition(":")  # what a shell makes of {a:1,b:2}: an argument for each
        return Argument(typed, leaf.key, ({name: read_value(f"{key}.{name}", item)},), adds=True)
    if may_sweep(key, text, multirun=multirun) and _SWEEP.fullmatch(text.strip()):
        return Argument(typed, key, (), sweep=text.strip())
    parts = split_top(text) if may_sweep(key, text, multirun=multirun) else [text]
    return Argument(typed, key, tuple(_read(key, part) for part in parts))


def may_sweep(key: str, text: str, *, multirun: bool) -> bool:
    """Say whether commas in `text` can separate values: in free text only where several jobs were asked for.

    Where they were not, the values of other fields are separated to be told that --multirun takes them.
    """
    leaf = LEAVES.get(key)
    if leaf is not None and leaf.is_text and not leaf.bounds.choices:
        return multirun and unquoted(text) is None
    return True


def _read(key: str, text: str) -> Any:
    if key in GROUPS or key == RECIPE_GROUP:
        return None if text.strip() == "null" else text_of(text)
    return read_value(key, text)

