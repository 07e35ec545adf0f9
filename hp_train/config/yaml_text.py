"""Reads YAML as this project means it: no base-60 numbers, no yes/no, no dates, no key twice. No torch.

`max_steps: 1e5` is an integer, `time: 12:00:00` is text. Only plain values are made; a tag (`!!python/...`) is refused.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from hp_train.config.numbers import BOOLEAN, FLOAT, INTEGER, fraction

_Base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"


class _Loader(_Base):  # type: ignore[misc, valid-type]
    """PyYAML's safe loader with our words for numbers and truth."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                problem = f"found duplicate key {key.value}"
                raise yaml.constructor.ConstructorError(
                    "while constructing a mapping", node.start_mark, problem, key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _whole(pattern: re.Pattern[str]) -> re.Pattern[str]:
    return re.compile(f"(?:{pattern.pattern})$")


_NULL = re.compile(r"(?:~|null|Null|NULL|)$")
_Loader.yaml_implicit_resolvers = {}
for _kind, _pattern, _first in (
    ("bool", _whole(BOOLEAN), "tTfF"),
    ("int", _whole(INTEGER), "-+0123456789"),
    ("float", _whole(FLOAT), "-+.0123456789iInN"),
    ("null", _NULL, ["~", "n", "N", ""]),
    ("merge", re.compile(r"<<$"), "<"),
):
    _Loader.add_implicit_resolver(_TAG + _kind, _pattern, list(_first))
_Loader.add_constructor(_TAG + "int", lambda loader, node: int(loader.construct_scalar(node)))
_Loader.add_constructor(_TAG + "float", lambda loader, node: fraction(loader.construct_scalar(node)))


def parse(text: str) -> tuple[yaml.Node | None, Any]:
    """Return the root node, which knows lines and spelling, and the value; None and None for an empty text.

    Raises yaml.YAMLError, which has a place where the text cannot be read, or a key stands twice.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        return node, None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def read(text: str) -> Any:
    """Return the value of a YAML text. Raises yaml.YAMLError."""
    return parse(text)[1]
