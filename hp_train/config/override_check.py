"""Checks what was typed as `key=value` and `group=option` before Hydra composes it. No torch.

Every argument is parsed by Hydra's own grammar and held against the schema and the options that exist. Arguments at
fault are told and left out, so that the rest can still be composed and checked: all faults are told at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString, Transformer
from hydra.errors import HydraException

from hp_train.config.faults import EVERYTHING, Fault
from hp_train.config.key_check import a_key_of, check_value, is_interpolation
from hp_train.config.near_match import did_you_mean, nearest
from hp_train.config.schema_tree import GROUPS, LEAVES, OPTIONAL_SECTIONS, SECTIONS, spell
from hp_train.config.search_path import RECIPE_GROUP, SearchPath
from hp_train.config.yaml_check import FileCheck, check_files, unknown_option

_HYDRA_KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.verbose")


@dataclass(slots=True)
class Request:
    """What a command line asks for: the arguments that can be composed, and the faults of the others."""

    path: SearchPath
    overrides: list[str] = field(default_factory=list)  # as typed, without `+`
    choices: dict[str, str] = field(default_factory=dict)  # group -> option, as typed
    recipe: str | None = None
    faults: list[Fault] = field(default_factory=list)
    files: FileCheck = field(default_factory=FileCheck)

    @property
    def sections_touched(self) -> set[str]:
        """Return the groups that may be null of which a key is given: they must be there for Hydra to set it."""
        keys = [override.partition("=")[0] for override in self.overrides]
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
    kept: dict[str, str] = {}
    parser = OverridesParser.create()
    for argument in arguments:
        override = _parse(parser, argument, request)
        if override is None:
            continue
        found = list(_check(override, path, multirun))
        request.faults.extend(found)
        if found:
            continue
        key = override.key_or_group
        kept.pop(key, None)
        if key == RECIPE_GROUP and override.value() is None:
            request.choices.pop(RECIPE_GROUP, None)
            continue  # no recipe, as if none had been named
        kept[key] = argument.lstrip("+")
        if key in (*GROUPS, RECIPE_GROUP) and not override.is_sweep_override():
            request.choices[key] = override.value()
    request.overrides = list(kept.values())
    request.recipe = request.choices.pop(RECIPE_GROUP, None)
    request.files = check_files(request.recipe, request.choices, path)
    return request


def is_group_override(argument: str) -> bool:
    """Say whether an argument chooses an option of a group or a recipe, rather than the value of a key."""
    return argument.partition("=")[0].lstrip("+") in (*GROUPS, RECIPE_GROUP)


def _parse(parser: OverridesParser, argument: str, request: Request) -> Override | None:
    if argument.startswith("~"):
        request.faults.append(_deletion(argument))
        return None
    key, equals, value = argument.partition("=")
    if not equals:
        word = nearest(argument, (*GROUPS, *LEAVES))
        near = did_you_mean([f"{word}=..." if word else None])
        request.faults.append(Fault(f"argument {argument} is not key=value{near}"))
        return None
    if not key.strip("+ "):
        request.faults.append(Fault(f"argument {argument} has no key before the ="))
        return None
    try:
        override = parser.parse_override(argument)
    except HydraException:
        can_quote = key.lstrip("+") in (*LEAVES, *SECTIONS, RECIPE_GROUP) and not {"'", '"'} & set(value)
        hint = f"; quote the value: '{key}=\"{value}\"'" if can_quote else ""
        request.faults.append(Fault(f"argument {argument} cannot be read{hint}", (key.lstrip("+"),)))
        return None
    override.input_line = argument
    return override


def _deletion(argument: str) -> Fault:
    key = argument[1:].partition("=")[0]
    if key in SECTIONS or key == RECIPE_GROUP:
        text = f"{argument}: group {key} cannot be deleted; choose one of its options or set its keys"
        return Fault(text, (f"{key}.",))
    if key in LEAVES:
        return Fault(f"{argument}: a key cannot be deleted; give {key} a value", (key,))
    return Fault(f"{argument}: nothing can be deleted from the config, and it has no key {key}")


def _check(override: Override, path: SearchPath, multirun: bool) -> Iterator[Fault]:
    key = override.key_or_group
    if override.package is not None:
        yield Fault(f"{override.input_line}: a group has one place in the config; leave out @{override.package}")
        return
    if key == "hydra" or override.is_hydra_override():
        if override.input_line.startswith("+") or key not in _HYDRA_KEYS:
            yield Fault(f"{override.input_line}: of Hydra's own settings only {', '.join(_HYDRA_KEYS)} can be set")
        return
    if override.is_sweep_override():
        if multirun:
            yield from _first(_check_sweep(override, path))
        else:
            yield Fault(
                f"{override.input_line} gives several values; a list is {key}=[a,b], a text is quoted, "
                "and --multirun runs one job for each",
                (key,),
            )
        return
    yield from _check_single(key, override.value(), path)


def _first(faults: Iterable[Fault]) -> Iterator[Fault]:
    seen = set()
    for fault in faults:
        if fault not in seen:
            seen.add(fault)
            yield fault


def _check_sweep(override: Override, path: SearchPath) -> Iterator[Fault]:
    """Check every value of a sweep that can be counted; intervals are for sweepers that are not here."""
    if not override.is_discrete_sweep():
        yield Fault(f"{override.input_line}: give the values one by one, or a range", (override.key_or_group,))
        return
    if override.is_choice_sweep() and not hasattr(override.value(), "list"):
        return  # a glob over the options of a group
    for value in override.sweep_iterator(transformer=Transformer.identity):
        yield from _check_single(override.key_or_group, _plain(value), path)


def _plain(value: Any) -> Any:
    return value.text if isinstance(value, QuotedString) else value


def _check_single(key: str, value: Any, path: SearchPath) -> Iterator[Fault]:
    if key in GROUPS or key == RECIPE_GROUP:
        yield from _check_option(key, value, path)
    else:
        yield from check_value(key, value)


def _check_option(group: str, option: Any, path: SearchPath) -> Iterator[Fault]:
    if option is None and group == RECIPE_GROUP:
        return  # no recipe
    options = path.options_of(group)
    unknown = (EVERYTHING if group == RECIPE_GROUP else f"{group}.",)
    choices = f"; use {', '.join(options)}" if options else f"; set its keys, such as {a_key_of(group)}"
    text = spell(option)
    if option is None:
        yield Fault(f"{group}=null: a group cannot be null{choices}", unknown)
    elif isinstance(option, (list, dict, bool)):
        yield Fault(f"{group}={text} is not the name of an option{choices}", unknown)
    elif not text.strip():
        yield Fault(f"{group} is empty{choices}", unknown)
    elif is_interpolation(option):
        yield Fault(f"{group}={text}: an option is given by its name{choices}", unknown)
    elif "/" in text or "\\" in text or text.startswith("."):
        yield Fault(f"{group}={text} is a path; give a name{choices}", unknown)
    elif not options:
        yield Fault(f"{group}={text}: this group has no options{choices}", unknown)
    elif text not in options:
        yield unknown_option(group, text, path)
