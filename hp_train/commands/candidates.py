"""What may stand where the cursor is: the words that tab completion offers, and what they mean. No torch, no Hydra.

The shells hand over the words before the cursor; what an argument of a verb takes is read off the verb's own parser, so
that completion knows every verb and option there is. Answers must come within a blink: nothing is composed or checked.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hp_train.commands.verb_parser import parser_of, train_parser
from hp_train.config.numbers import spell
from hp_train.config.schema_tree import GROUPS, LEAVES, SECTIONS
from hp_train.config.search_path import RECIPE_GROUP, SearchPath, description_of, search_path
from hp_train.errors import ConfigError
from hp_train.launch.find_run import LAST, folder_of_runs, list_runs, started_at
from hp_train.verbs import VERBS

Candidate = tuple[str, str]  # what is inserted, and what it means
_MOST_RUNS = 30
_CONFIG_DIR = ("--config-dir", "-cd")


def candidates(words: Sequence[str]) -> list[Candidate]:
    """Return what may stand in place of the last of `words`, which follow `hp-train` and may be empty."""
    *before, current = words or [""]
    path = _search_path(before)
    if not before:
        found = [*VERBS.items(), *_from_parser(train_parser(), before, current, path)]
    elif before[0] in VERBS and before[0] != "train":
        found = _from_parser(parser_of(before[0]), before[1:], current, path)
    else:
        typed = before[1:] if before[0] == "train" else before
        found = _from_parser(train_parser(), typed, current, path)
    return sorted({text: meaning for text, meaning in found if text.startswith(current)}.items())


def _search_path(before: Sequence[str]) -> SearchPath:
    words = [part for word in before for part in (word.split("=", 1) if word.startswith("--config-dir=") else [word])]
    folder = next((after for word, after in zip(words, words[1:], strict=False) if word in _CONFIG_DIR), None)
    try:
        return search_path(folder)
    except ConfigError:
        return search_path()  # a folder that is not there is told when the command is run


def _from_parser(
    parser: argparse.ArgumentParser, before: Sequence[str], current: str, path: SearchPath
) -> Iterator[Candidate]:
    """Yield what `parser` takes after the words `before`."""
    positionals = [action for action in parser._actions if not action.option_strings]
    waiting: argparse.Action | None = None  # an option whose value comes next
    place = 0
    for number, word in enumerate(before):
        if waiting is not None:
            waiting = None
        elif word in parser._option_string_actions:
            option = parser._option_string_actions[word]
            waiting = None if option.nargs == 0 else option
        elif not word.startswith("-") and place < len(positionals):
            action = positionals[place]
            if isinstance(action, argparse._SubParsersAction) and word in action.choices:
                yield from _from_parser(action.choices[word], before[number + 1 :], current, path)
                return
            place += action.nargs not in ("*", "+")
    if waiting is not None:
        yield from _values(waiting, current, path)
    elif current.startswith("-"):
        yield from ((flag, a.help or "") for a in parser._actions for flag in a.option_strings if flag[:2] == "--")
    elif place < len(positionals):
        yield from _values(positionals[place], current, path)


def _values(action: argparse.Action, current: str, path: SearchPath) -> Iterator[Candidate]:
    """Yield the values of one argument, by its choices or by what its metavar names."""
    names = str(action.metavar or action.dest).upper()
    if isinstance(action, argparse._SubParsersAction):
        yield from ((choice.dest, choice.help or "") for choice in action._choices_actions)
    elif action.choices:
        yield from ((str(choice), "") for choice in action.choices)
    elif "|" in str(action.metavar):  # `bash|zsh|fish`, `byte|FILE.json`: words in lower case stand for themselves
        yield from ((word, "") for word in str(action.metavar).split("|") if word.isalpha() and word.islower())
    if "RUN" in names:
        yield from _runs(current)
    if "RECIPE" in names:
        yield from _options(RECIPE_GROUP, path)
    if "SECTION" in names or "GROUP" in names:
        yield from ((section, _line(SECTIONS[section].__doc__)) for section in SECTIONS)
    if "VERB" in names:
        yield from VERBS.items()
    if "KEY" in names.split("|"):
        yield from ((key, "") for key in LEAVES)
    if action.dest == "overrides" or "KEY=VALUE" in names:
        yield from _overrides(current, path)
    if "BUILDER" in names:
        yield from _schedules()
    if any(word in names for word in ("DIR", "PATH", "FILE", "INPUT")):
        yield from _files(current, folders_only=names.endswith("DIR"))


def _overrides(current: str, path: SearchPath) -> Iterator[Candidate]:
    """Yield `recipe=`, `group=`, `group.`; after a group its keys; after the = the values."""
    key, equals, value = current.partition("=")
    if equals:
        yield from ((f"{key}={text}", meaning) for text, meaning in _values_of_key(key, value, path))
    elif "." in current:
        yield from ((f"{name}=", _values_text(name)) for name in LEAVES if name.startswith(current))
    else:
        yield (f"{RECIPE_GROUP}=", "a whole run, ready to train")
        for group in GROUPS:
            if path.options_of(group):
                yield f"{group}=", _line(SECTIONS[group].__doc__)
            yield f"{group}.", "keys of the group"


def _values_text(key: str) -> str:
    leaf = LEAVES[key]
    return leaf.bounds.describe() or leaf.expects()


def _values_of_key(key: str, value: str, path: SearchPath) -> Iterator[Candidate]:
    if key in (*GROUPS, RECIPE_GROUP):
        yield from _options(key, path)
    elif key == "pp.schedule":
        yield from _schedules()
    elif key in LEAVES:
        leaf = LEAVES[key]
        default = spell(leaf.default)
        words = [spell(choice) for choice in (*leaf.bounds.choices, *leaf.bounds.also)]
        words += ["true", "false"] if bool in leaf.kinds else []
        yield from ((word, "the default" if word == default else "") for word in dict.fromkeys(words))
        if leaf.is_path:
            yield from _files(value, folders_only=False)


def _options(group: str, path: SearchPath) -> Iterator[Candidate]:
    yield from ((name, description_of(file)) for name, file in path.options_of(group).items())


def _schedules() -> Iterator[Candidate]:
    from hp_train.schedule.registry import schedule_names

    yield from ((name, "") for name in schedule_names())


def _runs(current: str) -> Iterator[Candidate]:
    """Yield `last`, the ids of the newest runs, and folders on the way to a run."""
    root = folder_of_runs()
    newest = sorted(list_runs(root), key=started_at, reverse=True)
    if newest:
        yield LAST, str(newest[0].relative_to(root))
    for run in newest[: _MOST_RUNS if not current else None]:
        yield run.name, str(run.relative_to(root).parent)
    yield from _files(current, folders_only=True)


def _files(current: str, *, folders_only: bool) -> Iterator[Candidate]:
    """Yield what lies in the folder that `current` names so far; folders end in `/`."""
    typed_folder = current[: current.rfind("/") + 1]
    try:
        with os.scandir(Path(typed_folder or ".").expanduser()) as entries:
            for entry in entries:
                if entry.name.startswith(".") and not current.removeprefix(typed_folder).startswith("."):
                    continue
                if entry.is_dir():
                    yield f"{typed_folder}{entry.name}/", ""
                elif not folders_only:
                    yield f"{typed_folder}{entry.name}", ""
    except OSError:
        return


def _line(text: str | None) -> str:
    return " ".join((text or "").split())


def lines(found: Iterable[Candidate]) -> str:
    """Return candidates as the shells' scripts read them: one a line, `text<TAB>meaning`."""
    return "".join(f"{text}\t{' '.join(meaning.split())}\n" for text, meaning in found)
