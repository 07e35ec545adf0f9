"""Is this key in the schema, has this value its type? For one `key = value`, from wherever it comes. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hp_train.config.faults import Fault
from hp_train.config.near_match import did_you_mean, nearest_key
from hp_train.config.numbers import scalar, spell
from hp_train.config.schema_tree import GROUPS, LEAVES, OPTIONAL_SECTIONS, SECTIONS, misfit
from hp_train.config.typed_value import is_interpolation


def check_value(key: str, value: Any, place: str = "") -> Iterator[Fault]:
    """Yield what is wrong with `value` for `key`, or with what it holds when it is a mapping.

    place: `file:line: ` before the message; nothing for the command line.
    """
    if key in LEAVES:
        yield from _check_leaf(key, value, place)
    elif key in SECTIONS:
        yield from _check_section(key, value, place)
    else:
        yield unknown_key(key, place)


def unknown_key(key: str, place: str = "") -> Fault:
    """Return the fault of a key outside the schema, with the nearest that is in it."""
    owner, _, _ = key.rpartition(".")
    if owner.rstrip("0123456789.") in LEAVES or owner in LEAVES:
        leaf = LEAVES[owner] if owner in LEAVES else LEAVES[owner.rstrip("0123456789.")]
        return Fault(f"{place}{key}: {leaf.key} takes {leaf.expects()}, given whole", (leaf.key,))
    near = nearest_key(key, LEAVES if "." in key else (*GROUPS, *LEAVES))
    hint = did_you_mean(near)
    if not hint:
        section = owner if owner in SECTIONS else ""
        names = [name.rpartition(".")[2] for name in LEAVES if name.rpartition(".")[0] == section] or list(GROUPS)
        hint = f"; {section or 'the groups are'}{' takes' if section else ''} {', '.join(names)}"
    return Fault(f"{place}unknown key {key}{hint}", tuple(near))


def _check_leaf(key: str, value: Any, place: str) -> Iterator[Fault]:
    leaf = LEAVES[key]
    if is_interpolation(value):  # its value is looked at once the whole config is there
        if not _can_be_resolved(value):
            yield Fault(
                f"{place}{key}={spell(value)} cannot be read: ${{GROUP.KEY}} is the value of another key", (key,)
            )
        return
    if value == "???":
        yield Fault(f"{place}{key} has no value (???); it takes {leaf.expects()}{leaf.choices()}", (key,))
        return
    fault = misfit(leaf, value)
    if fault is not None:
        is_quoted = isinstance(value, str) and scalar(value) != value  # a text of digits must not look like the number
        shown = "" if fault == "is empty" else f"='{value}'" if is_quoted else f"={spell(value)}"
        needs = f"; it takes {leaf.expects()}" if fault == "is empty" else ""
        yield Fault(f"{place}{key}{shown} {fault}{needs}{leaf.choices()}", (key,))


def _check_section(key: str, value: Any, place: str) -> Iterator[Fault]:
    if value is None and key in OPTIONAL_SECTIONS:
        return
    if isinstance(value, dict):
        for name, item in value.items():
            yield from check_value(f"{key}.{name}", item, place)
        return
    what = " is a group and cannot be null" if value is None else f"={spell(value)} is not a group of settings"
    yield Fault(f"{place}{key}{what}; set its keys, such as {a_key_of(key)}", (f"{key}.",))


def a_key_of(section: str) -> str:
    """Return some key of a group, as an example."""
    return next(key for key in LEAVES if key.startswith(section + "."))


def _can_be_resolved(value: Any) -> bool:
    """Say whether OmegaConf's grammar reads the references in a value."""
    from omegaconf import OmegaConf  # slow to import, and seldom needed
    from omegaconf.errors import GrammarParseError

    try:
        OmegaConf.create([value])
    except GrammarParseError:
        return False
    return True
