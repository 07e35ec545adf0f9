"""Where every value of a config comes from: schema, option of a group, recipe, command line, as they apply in turn.

No torch, no Hydra: the files are walked here as Hydra merges them, and a test holds both equal for every recipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hp_train.config.override_check import Request, check_request
from hp_train.config.schema_tree import GROUPS, LEAVES, OPTIONAL_SECTIONS, SECTIONS, Leaf
from hp_train.config.search_path import CONFIGS, RECIPE_GROUP, SearchPath, shown
from hp_train.config.yaml_check import base_of, override_of
from hp_train.config.yaml_text import parse

PRIMARY = CONFIGS / "config.yaml"


@dataclass(frozen=True, slots=True)
class Setting:
    """One place that gives a key a value."""

    value: Any
    place: str  # `file:line`, `command line`, `schema`
    why: str = ""  # what brought that place in: which recipe, which option of a group
    recipe: str | None = None  # the recipe, when it is one that says so


@dataclass(slots=True)
class Trace:
    """What sets what. `settings` holds dotted keys in the order of application; the last of a key holds."""

    request: Request
    settings: list[tuple[str, Setting]] = field(default_factory=list)
    choices: dict[str, str] = field(default_factory=dict)  # group -> its option
    chosen_by: dict[str, list[Setting]] = field(default_factory=dict)  # group -> who named an option, the last holds

    def by_key(self) -> dict[str, list[Setting]]:
        """Return key -> its settings in the order of application, keys in the schema's order."""
        found: dict[str, list[Setting]] = {key: [] for key in LEAVES}
        for key, setting in self.settings:
            found.setdefault(key, []).append(setting)
        return {key: settings for key, settings in found.items() if settings}


def trace(overrides: Sequence[str], path: SearchPath) -> Trace:
    """Follow sound `overrides` through the files that they select."""
    found = Trace(check_request(overrides, path))
    for key, leaf in LEAVES.items():
        if leaf.section not in OPTIONAL_SECTIONS:
            found.settings.append((key, Setting(leaf.default, "schema", "the default")))
    recipes = list(_recipes(found.request, path))
    _choose(found, recipes)
    for group in found.choices:
        _apply_option(found, group, path)
    for file, name, why in _in_order(recipes):
        for key, value, line in _values(file, ""):
            found.settings.append((key, Setting(value, f"{shown(file)}:{line}", why, name)))
    for argument in found.request.arguments:
        if not argument.is_sweep:
            for key, value in _flat(argument.key, argument.value):
                found.settings.append((key, Setting(value, "command line", argument.typed)))
    return found


@dataclass(frozen=True, slots=True)
class _Recipe:
    file: Path
    why: str
    bases_before: tuple[_Recipe, ...]  # merged before its own keys
    bases_after: tuple[_Recipe, ...]  # after them: what follows `_self_`
    overrides: tuple[tuple[str, str, int], ...]  # group, option, line


def _recipes(request: Request, path: SearchPath) -> Iterator[_Recipe]:
    if request.recipe is not None:
        file = path.file_of(RECIPE_GROUP, request.recipe)
        assert file is not None, f"recipe {request.recipe} has been looked up before"
        yield _read_recipe(file, f"recipe {file.stem}", path)


def _read_recipe(file: Path, why: str, path: SearchPath) -> _Recipe:
    root, _ = parse(file.read_text(encoding="utf-8"))
    before: list[_Recipe] = []
    after: list[_Recipe] = []
    overrides = []
    bases = before
    for entry in _defaults(root):
        if isinstance(entry, yaml.ScalarNode):
            base = base_of(file, entry.value, path)
            if entry.value == "_self_":
                bases = after
            elif base is not None:
                bases.append(_read_recipe(base, f"recipe {base.stem}, which {file.stem} builds on", path))
        elif (words := override_of(entry)) is not None:
            overrides.append((*words, entry.start_mark.line + 1))
    return _Recipe(file, why, tuple(before), tuple(after), tuple(overrides))


def _defaults(root: yaml.Node | None) -> list[yaml.Node]:
    if not isinstance(root, yaml.MappingNode):
        return []
    return next((node.value for key, node in root.value if key.value == "defaults"), [])


def _in_order(recipes: Sequence[_Recipe]) -> Iterator[tuple[Path, str, str]]:
    for recipe in recipes:
        yield from _in_order(recipe.bases_before)
        yield recipe.file, recipe.file.stem, recipe.why
        yield from _in_order(recipe.bases_after)


def _choose(found: Trace, recipes: Sequence[_Recipe]) -> None:
    """Find each group's option: the command line beats recipes, a recipe those it builds on, all beat the primary."""
    root, _ = parse(PRIMARY.read_text(encoding="utf-8"))
    for entry in _defaults(root):
        if isinstance(entry, yaml.MappingNode):
            key, node = entry.value[0]
            if key.value in GROUPS and not node.tag.endswith("null"):
                place = f"{shown(PRIMARY)}:{entry.start_mark.line + 1}"
                found.chosen_by[key.value] = [Setting(node.value, place, "the default")]

    def add(recipe: _Recipe) -> None:
        for base in reversed((*recipe.bases_before, *recipe.bases_after)):
            add(base)
        for group, option, line in recipe.overrides:
            place = Setting(option, f"{shown(recipe.file)}:{line}", recipe.why, recipe.file.stem)
            found.chosen_by.setdefault(group, []).append(place)

    for recipe in recipes:
        add(recipe)
    for group, option in found.request.choices.items():
        found.chosen_by.setdefault(group, []).append(Setting(option, "command line", f"{group}={option}"))
    found.choices = {group: found.chosen_by[group][-1].value for group in GROUPS if group in found.chosen_by}


def _apply_option(found: Trace, group: str, path: SearchPath) -> None:
    option = found.choices[group]
    file = path.file_of(group, option)
    if file is None:
        return
    chosen = found.chosen_by[group][-1]
    why = f"{group}={option}, chosen by {chosen.place}"
    for key, value, line in _values(file, f"{group}."):
        found.settings.append((key, Setting(value, f"{shown(file)}:{line}", why)))


def _values(file: Path, prefix: str) -> Iterator[tuple[str, Any, int]]:
    """Yield dotted key, value and line of every setting in a file."""
    root, values = parse(file.read_text(encoding="utf-8"))
    if isinstance(root, yaml.MappingNode):
        yield from _below(root, values, prefix)


def _below(node: yaml.MappingNode, values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any, int]]:
    for key_node, value_node in node.value:
        name = str(key_node.value)
        key, value = prefix + name, values.get(name)
        if key == "defaults":
            continue
        if isinstance(value, dict) and key in SECTIONS:
            yield from _with_defaults(key, value_node.start_mark.line + 1, value)
            yield from _below(value_node, value, f"{key}.")
        else:
            yield key, value, key_node.start_mark.line + 1


def _with_defaults(section: str, line: int, given: dict[str, Any]) -> Iterator[tuple[str, Any, int]]:
    """Yield the defaults that a group that may be null brings with it when a file sets some of its keys."""
    if section in OPTIONAL_SECTIONS:
        for leaf in _leaves_of(section):
            if leaf.key.rpartition(".")[2] not in given:
                yield leaf.key, leaf.default, line


def _leaves_of(section: str) -> Iterator[Leaf]:
    return (leaf for leaf in LEAVES.values() if leaf.section == section)


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if key in LEAVES:
        yield key, value
    elif isinstance(value, dict) and key in SECTIONS:
        for name, item in value.items():
            yield from _flat(f"{key}.{name}", item)
