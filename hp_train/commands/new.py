"""`hp-train new NAME --from RECIPE`: writes a recipe of your own, each value with its meaning. No torch."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hp_train.config.near_match import did_you_mean, nearest
from hp_train.config.schema_tree import GROUPS
from hp_train.config.search_path import (
    RECIPE_GROUP,
    RECIPE_PACKAGE,
    SearchPath,
    description_of,
    search_path,
    ships,
)
from hp_train.errors import ConfigError

_NAME = re.compile(r"\w[\w.+-]*")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("name", metavar="NAME", help="name of the new recipe: it will be recipe=NAME")
    parser.add_argument("--from", dest="base", metavar="RECIPE", default="llama_single", help="what it builds on")
    parser.add_argument("--to", metavar="DIR", default="recipes", help="folder of the file; ./recipes unless given")


def run(args: argparse.Namespace) -> int:
    """Write the file and say how to go on. Raises ConfigError."""
    path = search_path()
    file = Path(args.to).expanduser() / f"{args.name}.yaml"
    found = [*_name_faults(args.name, file), *_base_faults(args.base, path)]
    if found:
        raise ConfigError(*found)
    text = "\n".join(_lines(args.name, args.base, path)) + "\n"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as target:
            target.write(text)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from error
    print(f"wrote {file}")
    shipped = path.options_of(RECIPE_GROUP).get(args.name)
    if shipped is not None and ships(shipped):
        print(f"  it hides the recipe {args.name} that ships with hp-train")
    option = "" if args.to == "recipes" else f" --config-dir {args.to}"
    print(f"  see what would run: hp-train{option} recipe={args.name} --cfg job")
    print(f"  train:              hp-train{option} recipe={args.name}")
    return 0


def _name_faults(name: str, file: Path) -> Iterator[str]:
    if not _NAME.fullmatch(name) or name.endswith((".yaml", ".yml")):
        yield f"NAME={name} is not a plain name: letters, digits, _, - and dots, without folder and ending"
    elif len(file.name.encode()) > 255:
        yield f"NAME={name} is too long: with its ending a file's name takes 255 bytes"
    elif name == "null":
        yield "NAME=null: recipe=null means no recipe; choose another name"
    elif file.exists():
        yield f"{file} exists already; choose another name, or edit it"


def _base_faults(base: str, path: SearchPath) -> Iterator[str]:
    from hp_train.config.override_check import check_request

    options = path.options_of(RECIPE_GROUP)
    if base not in options:
        yield f"--from {base} is no recipe{did_you_mean([nearest(base, options)])}; use {', '.join(options)}"
        return
    for fault in check_request([f"{RECIPE_GROUP}={base}"], path).all_faults:
        yield f"--from {base}: {fault.message}"


def _lines(name: str, base: str, path: SearchPath) -> Iterator[str]:
    from hp_train.config.help_text import field_documents
    from hp_train.config.provenance import trace

    yield f"# {RECIPE_PACKAGE}"
    yield f"# {name}: {description_of(path.options_of(RECIPE_GROUP)[base]) or f'{base} with changes.'}"
    yield "# Change, add or delete what you like; `hp-train help GROUP` tells every key of a group."
    yield "defaults:"
    yield f"  - {base}  # everything that is not set here"
    chosen = trace([f"{RECIPE_GROUP}={base}"], path).choices
    for group in GROUPS:
        others = [option for option in path.options_of(group) if option != chosen.get(group)]
        if group in chosen and others:
            yield f"  # - override /{group}: {others[0]}  # {chosen[group]} now; or {', '.join(others)}"
    yield "  - _self_  # the keys below beat the recipe above"
    documents = field_documents()
    section = ""
    for key, value in _set_by_recipes(base, path):
        if key.rpartition(".")[0] != section:
            section = key.rpartition(".")[0]
            yield ""
            yield from _headers(section)
        indent = "  " * key.count(".")
        yield from (f"{indent}# {line}" for line in textwrap.wrap(documents[key], 100))
        yield f"{indent}{key.rpartition('.')[2]}: {_spelled(value)}"


def _headers(section: str) -> Iterator[str]:
    for depth, name in enumerate(section.split(".")):
        yield f"{'  ' * depth}{name}:"


def _set_by_recipes(base: str, path: SearchPath) -> Iterator[tuple[str, Any]]:
    """Yield the keys that the recipe and those it builds on set, with the value that holds, in the schema's order."""
    from hp_train.config.provenance import trace

    for key, settings in trace([f"{RECIPE_GROUP}={base}"], path).by_key().items():
        last = settings[-1]
        if last.recipe is not None:
            yield key, last.value


def _spelled(value: Any) -> str:
    """Return a value on one line of YAML."""
    import yaml

    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")
