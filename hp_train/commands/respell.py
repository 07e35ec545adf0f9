"""What a person meant who typed a command line of another tool's habit. No torch; imported when something is wrong.

`hp-train llama_pp`, `recipe llama_pp`, `--trainer.max_steps 10` and `--trainer.max_steps=10` each have one right
spelling, which is told in full so that it can be copied.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from hp_train.config.key_check import a_key_of
from hp_train.config.near_match import did_you_mean, nearest, nearest_key
from hp_train.config.schema_tree import GROUPS, LEAVES
from hp_train.config.search_path import RECIPE_GROUP, search_path
from hp_train.verbs import VERBS


def wrong_verb(arguments: Sequence[str]) -> str:
    """Return the one line about a first word that is neither a verb nor an override."""
    word = arguments[0]
    shown = word if word.strip() else repr(word)
    path = search_path()
    if word in path.options_of(RECIPE_GROUP):
        return f"{shown} is a recipe: type {_command(f'{RECIPE_GROUP}={word}', *arguments[1:])}"
    if word in (RECIPE_GROUP, *GROUPS, *LEAVES) and len(arguments) > 1 and "=" not in arguments[1]:
        return f"{shown} {arguments[1]} lacks the =: type {_command(f'{word}={arguments[1]}', *arguments[2:])}"
    if word in (RECIPE_GROUP, *GROUPS):
        options = ", ".join(path.options_of(word)) or f"a key, such as {a_key_of(word)}=..."
        return f"{shown} needs a value, {word}=...: {options}; hp-train help {word} tells more"
    near = did_you_mean([nearest(word, VERBS)])
    if not near:
        recipe = nearest(word, path.options_of(RECIPE_GROUP))
        near = did_you_mean([f"{RECIPE_GROUP}={recipe}" if recipe else None])
    return f"{shown} is no verb{near}; use {', '.join(VERBS)}, recipe=NAME or key=value"


def unknown_option(unknown: Sequence[str], arguments: Sequence[str], known: Sequence[str]) -> str:
    """Return the one line about the first of the options that are not known.

    unknown: what the parser did not know. arguments: the whole line. known: options there are.
    """
    option = unknown[0]
    name, equals, value = option.lstrip("-").partition("=")
    if name in (RECIPE_GROUP, *GROUPS, *LEAVES):
        key: str | None = name
    else:
        key = next(iter(nearest_key(name, LEAVES)), None) if "." in name or name in _ENDS else None
    if key is None:
        return (
            f"unknown option {option}{did_you_mean([nearest(option.partition('=')[0], known)])}; use {', '.join(known)}"
        )
    place = list(arguments).index(option)
    rest = list(arguments[place + 1 :])
    if not equals:
        value = rest.pop(0) if rest and not rest[0].startswith("-") and "=" not in rest[0] else "..."
    written = f"{key}={value}"
    return f"{option} is written without dashes and with =: type {_command(*arguments[:place], written, *rest)}"


_ENDS = {key.rpartition(".")[2] for key in LEAVES}


def _command(*words: str) -> str:
    return " ".join(["hp-train", *(word if word.endswith("=...") else shlex.quote(word) for word in words)])
