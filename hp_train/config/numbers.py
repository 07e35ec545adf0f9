"""Numbers, truth and null as a person writes them, on the command line and in YAML files alike. No torch.

One spelling for both: decimal integers, also with an exponent (1e5) or underscores; fractions; true, false; null.
There are no base-60 numbers (1:30 is text), no octal ones and no other words for true. `spell` is the way back, for
lists and mappings of values too. Imports nothing of ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)")
FLOAT = re.compile(
    r"[-+]?(?:[0-9]+(?:_[0-9]+)*\.[0-9]*(?:[eE][-+]?[0-9]+)?|[0-9]+(?:_[0-9]+)*[eE][-+]?[0-9]+"
    r"|\.[0-9]+(?:[eE][-+]?[0-9]+)?|\.?(?:inf|Inf|INF))|\.?(?:nan|NaN|NAN)"
)
BOOLEAN = re.compile(r"true|True|TRUE|false|False|FALSE")
NULL = re.compile(r"null|Null|NULL")
_LONGEST = 40  # digits of an integer; a longer one is out of all bounds, as its float is
_EXACT = 1e22  # the last power of ten that a float holds exactly


def scalar(text: str) -> Any:
    """Return the number, truth value or None that `text` spells, else the text itself."""
    word = text.strip()
    if INTEGER.fullmatch(word):
        return int(word) if len(word) <= _LONGEST else float(word)
    if FLOAT.fullmatch(word):
        return fraction(word)
    if BOOLEAN.fullmatch(word):
        return word.lower() == "true"
    return None if NULL.fullmatch(word) else text


def fraction(word: str) -> int | float:
    """Return the value of a word that FLOAT matches: an integer where an exponent makes it one, as in 1e5."""
    plain = word.lower()
    value = float(plain.replace(".", "") if plain.endswith(("inf", "nan")) else plain)
    is_whole = "e" in plain and value.is_integer() and abs(value) <= _EXACT
    return int(value) if is_whole else value


def spell(value: Any, text: Callable[[str], str] = str) -> str:
    """Return a value as it is typed on the command line, the texts in it as `text` writes them."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, list):
        return f"[{','.join(spell(item, text) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{spell(item, text)}" for name, item in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
