"""Checks what was typed as `key=value` and `group=option` before Hydra composes it. No torch.

Every argument is read as its key means it (`argument`) and held against the schema and the options that exist. Those at
fault are told and left out, so that the rest can still be composed and checked: all faults are told at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hp_train.config.argument import Argument, read_argument
from hp_train.config.faults import EVERYTHING, Fault
from hp_train.config.key_check import a_key_of, check_value
from hp_train.config.near_match import did_you_mean, nearest
from hp_train.config.numbers import scalar, spell
from hp_train.config.schema_tree import GROUPS, LEAVES, OPTIONAL_SECTIONS, SECTIONS, entry_of
from hp_train.config.search_path import RECIPE_GROUP, SearchPath, is_path
from hp_train.config.typed_value import Unreadable, is_interpolation, key_of, unquoted
from hp_train.config.yaml_check import FileCheck, check_files, unknown_option

_NAME = re.compile(r"[A-Za-z0-9_/.+@-]+(?: +[A-Za-z0-9_/.+@-]+)*")
_HYDRA_KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.verbose")


@dataclass(slots=True)
class Request:
    """What a command line asks for: the arguments that can be composed, and the faults of the others."""

    path: SearchPath
    arguments: list[Argument] = field(default_factory=list)  # the sound ones, each key once
    choices: dict[str, str] = field(default_factory=dict)  # group -> option, as typed
    recipe: str | None = None
    faults: list[Fault] = field(default_factory=list)
    files: FileCheck = field(default_factory=FileCheck)

    @property
    def overrides(self) -> list[str]:
        """Return the arguments as typed, without `+`."""
        return [argument.typed for argument in self.arguments]

    def typed_again(self, override: str) -> str:
        """Return an override of one job, in Hydra's grammar, with a recipe's path in the place of its alias."""
        key, _, value = override.partition("=")
        if key != RECIPE_GROUP:
            return override
        return f"{key}={self.path.typed_for(unquoted(value) or value)}"

    @property
    def for_hydra(self) -> list[str]:
        """Return the arguments in Hydra's grammar."""
        return [argument.for_hydra() for argument in self.arguments]

    @property
    def mappings_given(self) -> set[str]:
        """Return the mappings that are given whole: what files say of them does not count."""
        return {
            argument.key
            for argument in self.arguments
            if argument.key in LEAVES and LEAVES[argument.key].is_mapping and not argument.adds
        }

    @property
    def sections_touched(self) -> set[str]:
        """Return the groups that may be null of which a key is given: they must be there for Hydra to set it."""
        keys = [argument.key for argument in self.arguments]
        return OPTIONAL_SECTIONS.intersection([*keys, *(key.rpartition(".")[0] for key in keys)])

    @property
    def all_faults(self) -> list[Fault]:
        """Return what is wrong with the arguments, then with the files they select."""
        return [*self.faults, *self.files.faults]


def check_request(arguments: Sequence[str], path: SearchPath, *, multirun: bool = False) -> Request:
    """Check `arguments` and the files they select. Of arguments for the same key the last one counts.

    multirun: whether an argument may give several values, one for each job.
    """
    request = Request(path)
    kept: dict[tuple[str, ...], Argument] = {}
    for typed in arguments:
        argument = _read(typed, request, multirun)
        if argument is None:
            continue
        found = list(_check(argument, path, multirun))
        request.faults.extend(found)
        if not found:
            _keep(_with_files(argument, path), kept)
    request.arguments = list(kept.values())
    options = {argument.key: argument for argument in request.arguments if argument.key in (*GROUPS, RECIPE_GROUP)}
    request.choices = {key: argument.value for key, argument in options.items() if not argument.is_sweep}
    request.recipe = request.choices.pop(RECIPE_GROUP, None)
    recipes = options[RECIPE_GROUP].values if RECIPE_GROUP in options else (None,)
    for recipe in recipes:
        request.files.add(check_files(recipe, request.choices, path))
    return request


def _with_files(argument: Argument, path: SearchPath) -> Argument:
    """Return an argument `recipe=PATH` with the file's alias, typed so that it means this file from any folder."""
    if argument.key != RECIPE_GROUP or not any(isinstance(value, str) and is_path(value) for value in argument.values):
        return argument
    values = [
        path.alias_of(Path(value).expanduser().absolute()) if is_path(value) else value for value in argument.values
    ]
    return Argument(f"{RECIPE_GROUP}={','.join(map(path.typed_for, values))}", RECIPE_GROUP, tuple(values))


def _keep(argument: Argument, kept: dict[tuple[str, ...], Argument]) -> None:
    """Put an argument in the place of those for the same key; entries of a mapping add up until it is given whole."""
    place = (argument.key, *argument.value) if argument.adds else (argument.key,)
    for other in [other for other in kept if other[: len(place)] == place]:
        del kept[other]
    kept[place] = argument


def is_group_override(argument: str) -> bool:
    """Say whether an argument chooses an option of a group or a recipe, rather than the value of a key."""
    return key_of(argument) in (*GROUPS, RECIPE_GROUP)


def _read(typed: str, request: Request, multirun: bool) -> Argument | None:
    if typed.startswith("~"):
        request.faults.append(_deletion(typed))
        return None
    key, equals, _ = typed.partition("=")
    if not equals:
        word = nearest(typed, (*GROUPS, *LEAVES))
        near = did_you_mean([f"{word}=..." if word else None])
        request.faults.append(Fault(f"argument {typed} is not key=value{near}"))
        return None
    if not key.strip("+ "):
        request.faults.append(Fault(f"argument {typed} has no key before the ="))
        return None
    try:
        return read_argument(typed, multirun=multirun)
    except Unreadable as error:
        text = f"argument {typed} cannot be read: {error}"
        request.faults.append(Fault(text, (key.strip("+ "),)))
        return None


def _deletion(argument: str) -> Fault:
    key = argument[1:].partition("=")[0]
    if key in SECTIONS or key == RECIPE_GROUP:
        text = f"{argument}: group {key} cannot be deleted; choose one of its options or set its keys"
        return Fault(text, (f"{key}.",))
    if (entry := entry_of(key)) is not None:
        return Fault(f"{argument}: an entry cannot be deleted; give {entry[0].key} whole", (entry[0].key,))
    if key in LEAVES:
        return Fault(f"{argument}: a key cannot be deleted; give {key} a value", (key,))
    return Fault(f"{argument}: nothing can be deleted from the config, and it has no key {key}")


def _check(argument: Argument, path: SearchPath, multirun: bool) -> Iterator[Fault]:
    key, typed = argument.key, argument.typed
    group, at, package = key.partition("@")
    if at:
        yield Fault(f"{typed}: a group has one place in the config; leave out @{package}", (f"{group}.",))
        return
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        if key not in _HYDRA_KEYS:
            yield Fault(f"{typed}: of Hydra's own settings only {', '.join(_HYDRA_KEYS)} can be set")
        return
    if argument.is_sweep and not multirun and (key in LEAVES or key in (*GROUPS, RECIPE_GROUP)):
        text = f"{typed} gives several values; a list is {key}=[a,b], and --multirun runs one job for each"
        yield Fault(text, (key,))
    elif argument.sweep:
        yield from dict.fromkeys(_check_sweep(argument, path))
    else:
        yield from dict.fromkeys(fault for value in argument.values for fault in _check_single(key, value, path))
        if key in LEAVES and LEAVES[key].is_mapping:
            yield from _check_names(argument)


def _check_names(argument: Argument) -> Iterator[Fault]:
    """Refuse names of a mapping that Hydra's grammar takes for something else, or for nothing."""
    for value in argument.values:
        for name in value if isinstance(value, dict) else ():
            if not _NAME.fullmatch(name) or not isinstance(scalar(name.lower()), str):
                what = "is made of a-z, A-Z, 0-9, _ - + . / @ and spaces inside, and is no number, truth value or null"
                yield Fault(f"{argument.typed}: a name typed in {argument.key} {what}, unlike {name}", (argument.key,))


def _check_sweep(argument: Argument, path: SearchPath) -> Iterator[Fault]:
    """Check every value of a sweep that Hydra counts; intervals are for sweepers that are not here."""
    from hydra.core.override_parser.overrides_parser import OverridesParser  # slow to import, and seldom needed
    from hydra.core.override_parser.types import QuotedString, Transformer
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(argument.typed)
    except HydraException:
        yield Fault(f"argument {argument.typed} cannot be read", (argument.key,))
        return
    if not override.is_discrete_sweep():
        yield Fault(f"{argument.typed}: give the values one by one, or a range", (argument.key,))
        return
    if override.is_choice_sweep() and not hasattr(override.value(), "list"):
        return  # a glob over the options of a group
    for value in override.sweep_iterator(transformer=Transformer.identity):
        yield from _check_single(argument.key, value.text if isinstance(value, QuotedString) else value, path)


def _check_single(key: str, value: Any, path: SearchPath) -> Iterator[Fault]:
    if key in GROUPS or key == RECIPE_GROUP:
        yield from _check_option(key, value, path)
    else:
        yield from check_value(key, value)


def _check_option(group: str, option: Any, path: SearchPath) -> Iterator[Fault]:
    options = path.options_of(group)
    unknown = (EVERYTHING if group == RECIPE_GROUP else f"{group}.",)
    choices = f"; use {', '.join(options)}" if options else f"; set its keys, such as {a_key_of(group)}"
    text = spell(option)
    if option is None and group == RECIPE_GROUP:
        yield Fault(f"recipe=null names no recipe; leave it out, or use {', '.join(options)}", unknown)
    elif option is None:
        yield Fault(f"{group}=null: a group cannot be null{choices}", unknown)
    elif text[:1] in ("[", "{"):
        yield Fault(f"{group}={text} is not the name of an option{choices}", unknown)
    elif not text.strip():
        yield Fault(f"{group} is empty{choices}", unknown)
    elif is_interpolation(option):
        yield Fault(f"{group}={text}: an option is given by its name{choices}", unknown)
    elif group == RECIPE_GROUP and is_path(text):
        if not Path(text).expanduser().is_file():
            here = [] if set(text) & set("/~") else [nearest(text.rpartition(".")[0], options)]
            yield Fault(f"{group}={text}: there is no such file{did_you_mean(here)}", unknown)
    elif "/" in text or "\\" in text or text.startswith((".", "~")):
        form = ", or the path of a .yaml file" if group == RECIPE_GROUP else ""
        yield Fault(f"{group}={text} is a path; give a name{form}{choices}", unknown)
    elif not options:
        yield Fault(f"{group}={text}: this group has no options{choices}", unknown)
    elif text not in options:
        yield unknown_option(group, text, path)
