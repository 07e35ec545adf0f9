"""The schema as a flat table: dotted key -> what values its field takes. No torch.

`LEAVES` holds every setting, `SECTIONS` every group of settings (nested ones too). `misfit` is the one place that says
whether a value has the type of a field; it is stricter than OmegaConf, which takes `yes` and 1 for true.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any

from hp_train import registry
from hp_train.config.fields import Bounds, bounds_of, is_path
from hp_train.config.schema import TrainerConfig
from hp_train.errors import ConfigError

_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
_PLURALS = {int: "integers", float: "numbers", bool: "booleans", str: "texts"}


@dataclass(frozen=True, slots=True)
class Leaf:
    """One setting: its dotted key, the types and bounds of its value, its default."""

    key: str
    kinds: tuple[type, ...]
    item: type | None  # type of the items when it is a list or a mapping
    optional: bool  # whether null is a value
    bounds: Bounds
    default: Any
    is_mapping: bool = False  # whether it maps names, any names, to items
    is_path: bool = False  # whether its text names a file or folder

    @property
    def section(self) -> str:
        """Return the key of the group that holds it."""
        return self.key.rpartition(".")[0]

    @property
    def is_text(self) -> bool:
        """Say whether it takes text alone, so that nothing in what is typed can have another meaning."""
        return self.kinds == (str,)

    def expects(self) -> str:
        """Return in words what type of value it takes: `an integer`, `a list of numbers`."""
        if self.is_mapping:
            return f"a mapping of names to {_PLURALS[self.item]}"
        if self.item is not None:
            return f"a list of {_PLURALS[self.item]}"
        kinds = [kind for kind in self.kinds if not (kind is str and len(self.kinds) > 1)]
        return " or ".join([*(_WORDS[kind] for kind in kinds), *self._texts()])

    def _texts(self) -> list[str]:
        """Return the texts that are valid beside numbers."""
        return [word for word in self.bounds.also if isinstance(word, str)] if len(self.kinds) > 1 else []

    def is_no_text_of_these(self, value: Any) -> bool:
        """Say whether `value` is a text where only some texts are valid, beside numbers, and is none of them."""
        return isinstance(value, str) and bool(self._texts()) and value not in self._texts()

    def choices(self) -> str:
        """Return the valid values in words, e.g. `; use 1 to 4096 or auto`; nothing where there is no bound."""
        described = self.bounds.describe()
        return f"; use {described}" if described else ""


def misfit(leaf: Leaf, value: Any) -> str | None:
    """Say in words why `value` has not the type of `leaf` (bounds aside); None when it has."""
    if value is None:
        return None if leaf.optional else "is empty"
    if isinstance(value, str) and not value.strip():
        return "is empty"
    if leaf.is_mapping:
        if isinstance(value, dict) and all(isinstance(k, str) and _is_a(v, leaf.item) for k, v in value.items()):
            return None
        return f"is not {leaf.expects()}"
    if leaf.item is not None:
        if isinstance(value, list) and all(_is_a(item, leaf.item) for item in value):
            return None
        return f"is not {leaf.expects()}"
    if leaf.bounds.choices and any(value == choice and type(value) is type(choice) for choice in leaf.bounds.choices):
        return None
    if any(_is_a(value, kind) for kind in leaf.kinds) and not leaf.is_no_text_of_these(value):
        return None
    if leaf.kinds == (str,) and not leaf.bounds.choices and type(value) in (int, float):
        return None  # a name that looks like a number
    return f"is not {leaf.expects()}"


def _is_a(value: Any, kind: type) -> bool:
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind


def value_at(config: Any, key: str) -> Any:
    """Return the value of dotted `key` in a config object; None below a group that is null."""
    for name in key.split("."):
        config = None if config is None else getattr(config, name)
    return config


def _build(root: type) -> tuple[dict[str, Leaf], dict[str, type], set[str]]:
    leaves: dict[str, Leaf] = {}
    sections: dict[str, type] = {}
    may_be_null: set[str] = set()

    def add(owner: type, prefix: str) -> None:
        hints = typing.get_type_hints(owner)
        for field in dataclasses.fields(owner):
            key = prefix + field.name
            arms, optional = _arms(hints[field.name])
            if dataclasses.is_dataclass(arms[0]):
                sections[key] = arms[0]
                if optional:
                    may_be_null.add(key)
                add(arms[0], key + ".")
            else:
                leaves[key] = _leaf(key, arms, optional, field)

    add(root, "")
    return leaves, sections, may_be_null


def _arms(hint: Any) -> tuple[tuple[Any, ...], bool]:
    """Split a union into its types and whether None is one of them."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        arms = typing.get_args(hint)
        return tuple(arm for arm in arms if arm is not types.NoneType), types.NoneType in arms
    return (hint,), False


def _leaf(key: str, arms: tuple[Any, ...], optional: bool, field: dataclasses.Field) -> Leaf:
    origin = typing.get_origin(arms[0])
    item = typing.get_args(arms[0])[-1] if origin in (list, dict) else None
    default = field.default_factory() if field.default is dataclasses.MISSING else field.default
    kinds = () if item else arms
    bounds = bounds_of(field)
    added = [c.name for c in registry.components() if registry.NAME_KEYS[c.kind] == key]
    if added and bounds.choices:  # else a rule knows the names
        bounds = dataclasses.replace(bounds, choices=tuple(dict.fromkeys((*bounds.choices, *added))))
    return Leaf(key, kinds, item, optional, bounds, default, origin is dict, is_path(field))


def entry_of(key: str) -> tuple[Leaf, str] | None:
    """Return mapping and name where `key` names an entry of a mapping, new ones included: `data.mix.mine`."""
    owner, _, name = key.rpartition(".")
    leaf = LEAVES.get(owner)
    return (leaf, name) if leaf is not None and leaf.is_mapping and name else None


LEAVES, SECTIONS, OPTIONAL_SECTIONS = _build(TrainerConfig)
_root: type[TrainerConfig] = TrainerConfig
_extended_for: tuple[registry.Component, ...] = ()
GROUPS = tuple(key for key in SECTIONS if "." not in key)


def config_class() -> type[TrainerConfig]:
    """Return the class of a whole config: TrainerConfig, or the one with the settings of plugins too."""
    return _root


def extend() -> None:
    """Make what plugins have registered part of the schema: names that can be chosen, and their settings."""
    global _root, _extended_for
    if _extended_for == (found := tuple(registry.components())):
        return  # two classes for one config would make equal configs unequal
    _refuse_names_of_ours()
    _extended_for = found
    groups: dict[str, list[tuple[str, type, typing.Any]]] = {}
    for component in registry.components():
        if component.config is not None:
            group, _, name = str(component.section).partition(".")
            field = dataclasses.field(default_factory=component.config)
            groups.setdefault(group, []).append((name, component.config, field))
    sections = []
    for group, fields in groups.items():
        owner = typing.get_type_hints(TrainerConfig)[group]
        taken = [name for name, _, _ in fields if name in {field.name for field in dataclasses.fields(owner)}]
        if taken:
            raise ConfigError(*(f"plugin: {group}.{name} is a key of hp-train; take another name" for name in taken))
        words = {"__doc__": owner.__doc__}
        extended = dataclasses.make_dataclass(owner.__name__, fields, bases=(owner,), namespace=words)
        sections.append((group, extended, dataclasses.field(default_factory=extended)))
    _root = dataclasses.make_dataclass("TrainerConfig", sections, bases=(TrainerConfig,))
    for table, built in zip((LEAVES, SECTIONS, OPTIONAL_SECTIONS), _build(_root), strict=True):
        table.clear()
        table.update(built)


def _refuse_names_of_ours() -> None:
    """Raise ConfigError where a plugin gives a name that is built in to something else."""
    from hp_train.schedule.registry import is_built_in

    chosen = {component: registry.NAME_KEYS[component.kind] for component in registry.components()}
    taken = [
        f"{key}={component.name}"
        for component, key in chosen.items()
        if (is_built_in(component.name) if key == "pp.schedule" else component.name in _built_in_choices(key))
    ]
    if taken:
        raise ConfigError(*(f"plugin: {choice} is built into hp-train; take another name" for choice in taken))


def _built_in_choices(key: str) -> tuple[Any, ...]:
    group, _, name = key.partition(".")
    owner = typing.get_type_hints(TrainerConfig)[group]
    return next(bounds_of(field).choices for field in dataclasses.fields(owner) if field.name == name)
