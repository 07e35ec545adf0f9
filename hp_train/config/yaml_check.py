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
from hp_train.config.search_path import (
    RECIPE_GROUP,
    RECIPE_PACKAGE,
    SearchPath,
    package_of,
    ships,
    shown,
)
from hp_train.config.yaml_text import parse

_DEFAULTS_FORMS = "a recipe's name, _self_, or `override /GROUP: OPTION`"


@dataclass
class FileCheck:
    """What following a recipe found: faults, the group options chosen, and the keys that must not be used."""

    faults: list[Fault] = field(default_factory=list)
    choices: dict[str, str] = field(default_factory=dict)
    unusable: dict[Path, set[str]] = field(default_factory=dict)  # file -> dotted keys in it
    bases: dict[Path, dict[str, str]] = field(default_factory=dict)  # file -> base as written -> its alias
    notes: list[str] = field(default_factory=list)  # what is likely meant, and yet worth a word
    readable: bool = True  # whether Hydra can compose from these files at all

    def add(self, other: FileCheck) -> None:
        """Take in what was found for another recipe."""
        self.faults.extend(fault for fault in other.faults if fault not in self.faults)
        self.notes.extend(note for note in other.notes if note not in self.notes)
        self.choices.update(other.choices)
        self.unusable.update(other.unusable)
        self.bases.update(other.bases)
        self.readable = self.readable and other.readable


def check_files(recipe: str | None, choices: dict[str, str], path: SearchPath) -> FileCheck:
    """Check `recipe` and the group options that it and the command line (`choices`) select."""
    check = FileCheck()
    if recipe is not None:
        file = path.file_of(RECIPE_GROUP, recipe)
        assert file is not None, f"recipe {recipe} has been looked up before"
        _follow_recipe(file, path, check, ())
    check.choices.update(choices)
    for group, option in check.choices.items():
        file = path.options_of(group).get(option)
        if file is not None and not ships(file):
            _note_if_hiding(group, file, path, check)
            _check_group_file(group, file, check)
    return check


def unknown_option(group: str, option: str, path: SearchPath, place: str = "") -> Fault:
    """Return the fault of an option that a group does not have."""
    options = list(path.options_of(group))
    kind = "recipe" if group == RECIPE_GROUP else "option"
    near = did_you_mean([nearest(option, options)])
    unknown = EVERYTHING if group == RECIPE_GROUP else f"{group}."
    return Fault(f"{place}{group}={option} is no {kind}{near}; use {', '.join(options)}", (unknown,))


def _note_if_hiding(group: str, file: Path, path: SearchPath, check: FileCheck) -> None:
    hidden = path.hidden_by(group, file)
    if hidden is not None and ships(hidden) and path.file_of(group, file.stem) == file:
        check.notes.append(f"{group}={file.stem} is {shown(file)}, not the one that ships with hp-train")


def _follow_recipe(file: Path, path: SearchPath, check: FileCheck, followed: tuple[Path, ...]) -> None:
    if file in followed:
        circle = " -> ".join(other.stem for other in (*followed, file))
        _stop(check, f"{shown(file)}: recipe {file.stem} builds on itself ({circle})")
        return
    if not ships(file):
        _note_if_hiding(RECIPE_GROUP, file, path, check)
    document = _parse(file, check)
    if document is None:
        if check.readable:
            _stop(check, f"{shown(file)} is empty; a recipe sets keys, or names what it builds on under defaults")
        return
    root, values = document
    package = package_of(file)
    if package not in (None, RECIPE_PACKAGE):
        _stop(check, f"{shown(file)}: `# {package}` has no effect in a recipe; write `# {RECIPE_PACKAGE}`, or nothing")
        return
    for key, node in _entries(root):
        if key == "defaults":
            _check_defaults(file, node, path, check, (*followed, file))
    if not ships(file):
        _check_keys(file, root, values, "", "", check)


def _check_defaults(
    file: Path, node: yaml.Node, path: SearchPath, check: FileCheck, followed: tuple[Path, ...]
) -> None:
    place = f"{shown(file)}:{node.start_mark.line + 1}: "
    if not isinstance(node, yaml.SequenceNode):
        _stop(check, f"{place}defaults is not a list; its entries are {_DEFAULTS_FORMS}")
        return
    bases = []
    for entry in node.value:
        place = f"{shown(file)}:{entry.start_mark.line + 1}: "
        if not isinstance(entry, yaml.ScalarNode):
            _check_override(entry, place, path, check)
        elif entry.value != "_self_":
            bases.append(entry)
    for entry in bases:  # after what this file chooses, which beats what they choose
        base = base_of(file, entry.value, path)
        if base is None:
            place = f"{shown(file)}:{entry.start_mark.line + 1}: "
            check.faults.append(unknown_option(RECIPE_GROUP, entry.value, path, place))
            check.readable = False
            continue
        if base != path.options_of(RECIPE_GROUP).get(entry.value):
            check.bases.setdefault(file, {})[entry.value] = path.alias_of(base)
        _follow_recipe(base, path, check, followed)


def _check_override(entry: yaml.Node, place: str, path: SearchPath, check: FileCheck) -> None:
    """Check an entry of defaults that chooses an option of a group, and note the choice."""
    words = override_of(entry)
    if words is None:
        _stop(check, f"{place}this entry of defaults is not {_DEFAULTS_FORMS}")
    elif words[0] not in GROUPS:
        near = did_you_mean([nearest(words[0], GROUPS)])
        _stop(check, f"{place}override /{words[0]}: no such group{near}; use {', '.join(GROUPS)}")
    elif words[1] not in path.options_of(words[0]):
        check.faults.append(unknown_option(words[0], words[1], path, place))
        check.readable = False
    else:
        check.choices.setdefault(words[0], words[1])


def base_of(file: Path, name: str, path: SearchPath) -> Path | None:
    """Return the recipe that `name` in the defaults of `file` means: one beside a file that was given by its path, too.

    Under its own name a recipe means the one that it hides.
    """
    if name == file.stem:
        return path.hidden_by(RECIPE_GROUP, file) or file
    found = path.options_of(RECIPE_GROUP).get(name)
    beside = file.parent / f"{name}.yaml"
    if found is None and name == Path(name).name and beside.is_file() and not ships(file):
        return beside
    return found


def override_of(entry: yaml.Node) -> tuple[str, str] | None:
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
