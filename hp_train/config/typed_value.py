"""What a person means by the text after `key=`, and how Hydra is told. No torch.

The field decides how its text is read. Text and paths are taken as they are, whatever characters they hold; one pair of
quotes around the whole is taken off. Numbers are `numbers.scalar`; lists are `[8,8]`, or `8-8`, which no shell touches;
mappings are `{name: value}`. `quoted` writes a value so that Hydra's own grammar reads exactly that value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hp_train.config.numbers import scalar, spell
from hp_train.config.schema_tree import LEAVES, SECTIONS, Leaf, entry_of

_DASHED = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)(?:-[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)*")
_OPEN, _CLOSE = "[{(", "]})"


class Unreadable(ValueError):
    """A text that is no value of any kind; it says why."""

    def __init__(self, why: str = "a bracket or a quote does not close") -> None:
        super().__init__(why)


def key_of(override: str) -> str:
    """Return the key of an override `key=value`, without the `+` that Hydra knows new keys by."""
    return override.partition("=")[0].strip().lstrip("+").strip()


def read_value(key: str, text: str) -> Any:
    """Return the value of `text` for the field, group of settings or mapping that `key` names.

    Raises Unreadable. The value need not fit the field: `key_check.check_value` says whether it does.
    """
    entry = entry_of(key)
    if entry is not None and entry[0].item is str:
        return _as_typed(text)
    leaf = LEAVES.get(key)
    if leaf is None:
        return _read_mapping(key, text) if key in SECTIONS and text.lstrip().startswith("{") else _plain(text)
    if leaf.is_text:
        return _as_typed(text)
    if is_interpolation(text):
        return text
    if leaf.is_mapping and text.lstrip().startswith("{"):
        return _read_mapping(key, text)
    if leaf.item is not None and not leaf.is_mapping:
        return _read_list(leaf, text)
    return _plain(text)


def is_interpolation(value: Any) -> bool:
    """Say whether OmegaConf will replace this value, or an item of it, by another."""
    if isinstance(value, list):
        return any(map(is_interpolation, value))
    return isinstance(value, str) and "${" in value


def unquoted(text: str) -> str | None:
    """Return what stands between the quotes of a text that is one quoted text; None for any other.

    Inside, a backslash before the quote, or before the end, is written twice and the quote after a backslash.
    """
    quote = text[:1]
    if len(text) < 2 or quote not in ("'", '"') or text[-1] != quote:
        return None
    inside = text[1:-1]
    for run in re.finditer(r"(\\*)(" + quote + r"|$)", inside):
        escapes = len(run[1]) % 2 == 1
        if escapes != (run[2] == quote):
            return None
    return re.sub(r"(\\+)(" + quote + r"|$)", lambda run: run[1][: len(run[1]) // 2] + run[2], inside)


def text_of(word: str) -> str:
    """Return a text without the blanks around it, or what stands between its quotes."""
    inside = unquoted(word.strip())
    return word.strip() if inside is None else inside


def quoted(value: Any) -> str:
    """Return `value` as Hydra's grammar reads it back."""
    return spell(value, _in_quotes)


def _in_quotes(text: str) -> str:
    inside = re.sub(r"(\\*)('|$)", lambda run: run[1] * 2 + run[2].replace("'", r"\'"), text)
    return f"'{inside}'"


def typed_text(text: str) -> str:
    """Return what is typed after `key=` to give a field exactly `text`: in quotes where it would lose its own."""
    return quoted(text) if text == "null" or unquoted(text) is not None else text


def split_top(text: str, separator: str = ",", *, opening: str = "") -> list[str]:
    """Return the parts of `text` between separators that no bracket and no quoted part encloses. Raises Unreadable.

    opening: the bracket that `text` was taken out of; within braces a quoted part may follow a colon too.
    """
    parts, start, depth, quote = [], 0, [], ""
    for place, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"" and _begins_item(text[start:place], depth[-1] if depth else opening):
            quote = character
        elif character in _OPEN:
            depth.append(character)
        elif character in _CLOSE and (not depth or _OPEN.index(depth.pop()) != _CLOSE.index(character)):
            raise Unreadable
        elif character == separator and not depth:
            parts.append(text[start:place])
            start = place + 1
    if depth or quote:
        raise Unreadable
    return [*parts, text[start:]]


def _begins_item(before: str, bracket: str) -> bool:
    """Say whether an item begins after `before`, within `bracket` (empty for none)."""
    last = before.rstrip()[-1:]
    return not last or last in _OPEN or (last == "," and bracket != "") or (last == ":" and bracket == "{")


def _as_typed(text: str) -> str | None:
    inside = unquoted(text)
    if inside is not None:
        return inside
    return None if text == "null" else text


def _plain(text: str) -> Any:
    """Return the number, list or mapping that a text spells where no field says what it is, else the text."""
    word = text.strip()
    if word[:1] == "[":
        return [_plain(item) for item in _items(word, "]")]
    if word[:1] == "{":
        return dict(_entries(word))
    inside = unquoted(word)
    return scalar(word) if inside is None else inside


def _read_list(leaf: Leaf, text: str) -> Any:
    word = text.strip()
    if word.startswith("["):
        read = text_of if leaf.item is str else _plain
        return [read(item) for item in _items(word, "]")]
    if leaf.item in (int, float) and _DASHED.fullmatch(word):
        return [scalar(number) for number in re.split(r"(?<![eE])-", word)]
    return _plain(word)


def _read_mapping(key: str, text: str) -> dict[str, Any]:
    return {name: read_value(f"{key}.{name}", item) for name, item in _raw_entries(text.strip())}


def _entries(word: str) -> Iterator[tuple[str, Any]]:
    return ((name, _plain(item)) for name, item in _raw_entries(word))


def _raw_entries(word: str) -> Iterator[tuple[str, str]]:
    for item in _items(word, "}"):
        name, *rest = split_top(item, ":", opening="{")
        if not rest or not name.strip():
            raise Unreadable("an entry of a mapping is name: value")
        yield text_of(name), ":".join(rest).strip()


def _items(word: str, end: str) -> list[str]:
    if len(word) < 2 or word[-1] != end:
        raise Unreadable
    inside = word[1:-1]
    return split_top(inside, opening=_OPEN[_CLOSE.index(end)]) if inside.strip() else []
