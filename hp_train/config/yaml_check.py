"""Checks a person's YAML files before Hydra reads them, so that every fault is one line with file and line. No torch.

A recipe is followed through its `defaults` to the recipes it builds on and the group options it chooses. Files that
ship with the package are sound (a test sees to it) and are only followed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hp_train.config.faults import EVERYTHING, Fault
from hp_train.config.key_check import check_value
from hp_train.config.near_match import did_you_mean, nearest
from hp_train.config.schema_tree import GROUPS, SECTIONS
from hp_train.config.search_path import CONFIGS, RECIPE_GROUP, RECIPE_PACKAGE, RECIPES, SearchPath, is_recipe, shown
from hp_train.config.yaml_text import parse

_DEFAULTS_FORMS = "a recipe's name, _self_, or `override /GROUP: OPTION`"


@dataclass
class FileCheck:
    """What following a recipe found: faults, the group options chosen, and the keys that must not be used."""

    faults: list[Fault] = field(default_factory=list)
    choices: dict[str, str] = field(default_factory=dict)
    unusable: dict[Path, set[str]] = field(default_factory=dict)  # file -> dotted keys in it
    readable: bool = True  # whether Hydra can compose from these files at all


def check_files(recipe: str | None, choices: dict[str, str], path: SearchPath) -> FileCheck:
    """Check `recipe` and the group options that it and the command line (`choices`) select."""
    check = FileCheck()
    if recipe is not None:
        _follow_recipe(recipe, path, check, ())
    check.choices.update(choices)
    for group, option in check.choices.items():
        file = path.options_of(group).get(option)
        if file is not None and not _ships(file):
            _check_group_file(group, file, check)
    return check


def unknown_option(group: str, option: str, path: SearchPath, place: str = "") -> Fault:
    """Return the fault of an option that a group does not have."""
    options = list(path.options_of(group))
    kind = "recipe" if group == RECIPE_GROUP else "option"
    near = did_you_mean([nearest(option, options)])
    unknown = EVERYTHING if group == RECIPE_GROUP else f"{group}."
    return Fault(f"{place}{group}={option} is no {kind}{near}; use {', '.join(options)}", (unknown,))


def _ships(file: Path) -> bool:
    return any(file.resolve().is_relative_to(folder.resolve()) for folder in (CONFIGS, RECIPES))


def _follow_recipe(name: str, path: SearchPath, check: FileCheck, followed: tuple[str, ...]) -> None:
    file = path.options_of(RECIPE_GROUP)[name]
    if name in followed:
        _stop(check, f"{shown(file)}: recipe {name} builds on itself ({' -> '.join((*followed, name))})")
        return
    document = _parse(file, check)
    if document is None:
        if check.readable and not is_recipe(file):
            _stop(check, f"{shown(file)} is empty; a recipe starts with the line `# {RECIPE_PACKAGE}`, its keys follow")
        return
    root, values = document
    if not is_recipe(file):
        _stop(check, f"{shown(file)}:1: a recipe starts with the line `# {RECIPE_PACKAGE}`")
        return
    for key, node in _entries(root):
        if key == "defaults":
            _check_defaults(file, node, path, check, (*followed, name))
    if not _ships(file):
        _check_keys(file, root, values, "", "", check)


def _check_defaults(
    file: Path, node: yaml.Node, path: SearchPath, check: FileCheck, followed: tuple[str, ...]
) -> None:
    place = f"{shown(file)}:{node.start_mark.line + 1}: "
    if not isinstance(node, yaml.SequenceNode):
        _stop(check, f"{place}defaults is not a list; its entries are {_DEFAULTS_FORMS}")
        return
    for entry in node.value:
        place = f"{shown(file)}:{entry.start_mark.line + 1}: "
        if isinstance(entry, yaml.ScalarNode):
            if entry.value == "_self_":
                continue
            if entry.value in path.options_of(RECIPE_GROUP):
                _follow_recipe(entry.value, path, check, followed)
            else:
                check.faults.append(unknown_option(RECIPE_GROUP, entry.value, path, place))
                check.readable = False
            continue
        words = _override_of(entry)
        if words is None:
            _stop(check, f"{place}this entry of defaults is not {_DEFAULTS_FORMS}")
        elif words[0] not in GROUPS:
            near = did_you_mean([nearest(words[0], GROUPS)])
            _stop(check, f"{place}override /{words[0]}: no such group{near}; use {', '.join(GROUPS)}")
        elif words[1] not in path.options_of(words[0]):
            check.faults.append(unknown_option(words[0], words[1], path, place))
            check.readable = False
        else:
            check.choices[words[0]] = words[1]


def _override_of(entry: yaml.Node) -> tuple[str, str] | None:
    """Return group and option of an entry `override /GROUP: OPTION`."""
    if not isinstance(entry, yaml.MappingNode) or len(entry.value) != 1:
        return None
    key, value = entry.value[0]
    words = str(key.value).split()
    if len(words) != 2 or words[0] != "override" or not words[1].startswith("/"):
        return None
    return (words[1][1:], value.value) if isinstance(value, yaml.ScalarNode) else None


def _check_group_file(group: str, file: Path, check: FileCheck) -> None:
    document = _parse(file, check)
    if document is None:
        return
    root, values = document
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.lstrip("# ").startswith("@package"):
            _stop(check, f"{shown(file)}: an option of a group takes no @package header; its keys are those of {group}")
            return
    for key, node in _entries(root):
        if key == "defaults":
            _stop(check, f"{shown(file)}:{node.start_mark.line + 1}: an option of a group takes no defaults list")
            return
    _check_keys(file, root, values, f"{group}.", "", check)


def _parse(file: Path, check: FileCheck) -> tuple[yaml.MappingNode, dict[str, Any]] | None:
    """Return the root node (for lines and spelling) and the values as `yaml_text` reads them.

    None, and a fault unless the file is empty, where there is no mapping.
    """
    try:
        root, values = parse(file.read_text(encoding="utf-8"))
        OmegaConf.create(values)  # refuses interpolations that cannot be read
    except (OSError, UnicodeDecodeError) as error:
        _stop(check, f"{shown(file)} cannot be read: {error}")
        return None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        problem = " ".join(filter(None, (error.context, error.problem)))
        _stop(check, f"{shown(file)}{line}: not YAML: {problem}")
        return None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        _stop(check, f"{shown(file)}: {str(error).splitlines()[0]}")
        return None
    if root is None:
        return None
    if not isinstance(root, yaml.MappingNode):
        _stop(check, f"{shown(file)}:1: not a mapping of keys to values")
        return None
    return root, values


def _check_keys(
    file: Path, node: yaml.MappingNode, values: dict[str, Any], prefix: str, inside: str, check: FileCheck
) -> None:
    """Check every key of a mapping; those at fault are left out of the composition.

    prefix: what stands before the keys in the schema; inside: what stands before them in the file.
    """
    by_name = {str(name): value for name, value in values.items()}
    for name, value_node in _entries(node):
        if not prefix and name == "defaults":
            continue
        key, value = prefix + name, by_name[name]
        place = f"{shown(file)}:{value_node.start_mark.line + 1}: "
        if isinstance(value, dict) and key in SECTIONS:
            _check_keys(file, value_node, value, key + ".", f"{inside}{name}.", check)
            continue
        found = list(check_value(key, value, place))
        if found:
            check.faults.extend(found)
            check.unusable.setdefault(file, set()).add(inside + name)


def _entries(node: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node]]:
    for key, value in node.value:
        yield str(key.value), value


def _stop(check: FileCheck, message: str) -> None:
    check.faults.append(Fault(message, (EVERYTHING,)))
    check.readable = False
