"""The texts of `hp-train --help` and `hp-train help GROUP`, made from the schema's own docstrings. No torch.

Everything fits 100 columns where the words allow it. The help of the whole command stays under 60 lines: keys are
shown a group at a time.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from pathlib import Path

from hp_train.config import schema
from hp_train.config.near_match import did_you_mean, nearest, nearest_key
from hp_train.config.schema_tree import GROUPS, LEAVES, OPTIONAL_SECTIONS, SECTIONS
from hp_train.config.search_path import RECIPE_GROUP, SearchPath, description_of, is_recipe
from hp_train.errors import ConfigError
from hp_train.verbs import VERB_GROUPS, VERBS

USAGE = "hp-train [VERB] [recipe=NAME] [group=option ...] [key=value ...]"
WIDTH = 100
_MOST_OPTIONS = 5  # options of a group that the overview names; `hp-train help GROUP` names all

_OPTIONS = {
    "--cfg job": "print the composed config instead of training (-p GROUP: one group of it)",
    "--multirun": "one run for each combination of values given as key=a,b",
    "--config-dir DIR": "a folder with recipes and options of your own",
    "--info searchpath": "where configs are looked for (or defaults-tree, config)",
    "--version": "print the version",
}
_EXAMPLES = {
    "hp-train recipe=llama_fsdp_pp": "train a small Llama, four processes",
    "hp-train resume last trainer.max_steps=1000": "go on, further than planned",
}
_EXIT_CODES = (
    "Exit codes: 0 done; 1 fault of the system; 2 fault in what was typed; 3 diverged;\n"
    "            75 stopped by a signal and saved; 130 stopped by Ctrl-C and saved."
)


def overview(path: SearchPath) -> str:
    """Return what `hp-train --help` prints; options of groups and recipes as they are found in `path`."""
    blocks = [f"Usage: {USAGE}\n       hp-train VERB --help"]
    width = max(map(len, (*VERBS, *_OPTIONS, *GROUPS)))
    for title, verbs in VERB_GROUPS.items():
        blocks.append("\n".join([f"{title}:", *_aligned(verbs, width)]))
    blocks.append("\n".join(["Options:", *_aligned(_OPTIONS, width)]))
    blocks.append("\n".join(["Groups (`hp-train help GROUP` tells the keys):", *_groups(path, width)]))
    blocks.append("\n".join(["Examples:", *_aligned(_EXAMPLES)]))
    blocks.append(_EXIT_CODES)
    return "\n".join(blocks)


def _groups(path: SearchPath, width: int) -> list[str]:
    lines = []
    for group in (RECIPE_GROUP, *GROUPS):
        options = _options_of(group, path)
        shown = options[:_MOST_OPTIONS] + (["..."] if len(options) > _MOST_OPTIONS else [])
        text = ", ".join(shown) if options else _sentence(SECTIONS[group].__doc__ or "")
        lines.append(f"  {group:<{width}}  {text}")
    return lines


def _options_of(group: str, path: SearchPath) -> list[str]:
    found = path.options_of(group)
    return [name for name, file in found.items() if group != RECIPE_GROUP or is_recipe(file)]


def _sentence(text: str) -> str:
    """Return a docstring on one line, without its stop."""
    return " ".join(text.split()).rstrip(".")


def _aligned(table: dict[str, str], width: int = 0) -> list[str]:
    width = max(width, *map(len, table))
    lines = []
    for name, text in table.items():
        first, *more = textwrap.wrap(text, max(40, WIDTH - width - 4)) or [""]
        lines += [f"  {name:<{width}}  {first}".rstrip(), *(f"  {'':<{width}}  {line}" for line in more)]
    return lines


def help_on(topic: str, path: SearchPath) -> str:
    """Return what `hp-train help TOPIC` prints for a group, a key, or `recipe`. Raises ConfigError for all else."""
    documents = field_documents()
    if topic == RECIPE_GROUP:
        return "\n".join(["recipe=NAME composes one of:", *_recipes(path)])
    if topic in SECTIONS:
        return _section_help(topic, path, documents)
    if topic in LEAVES:
        return _key_help(topic, documents)
    known = (*GROUPS, RECIPE_GROUP, *VERBS)
    near = did_you_mean([nearest(topic, known)] if "." not in topic else nearest_key(topic, LEAVES))
    if not near and "." not in topic:
        near = did_you_mean(nearest_key(topic, LEAVES))
    raise ConfigError(
        f"help: {topic} is no group, key or verb{near}; use one of {', '.join((RECIPE_GROUP, *GROUPS))}, a key such "
        "as trainer.max_steps, or a verb"
    )


def _recipes(path: SearchPath) -> list[str]:
    return _aligned({name: description_of(path.options_of(RECIPE_GROUP)[name])
                     for name in _options_of(RECIPE_GROUP, path)})  # fmt: skip


def _section_help(section: str, path: SearchPath, documents: dict[str, str]) -> str:
    document = SECTIONS[section].__doc__ or ""
    if document.startswith(f"{SECTIONS[section].__name__}("):  # what dataclasses make up where nothing is written
        document = "settings of a plugin"
    blocks = [f"{section}: {_sentence(document)}."]
    options = path.options_of(section) if section in GROUPS else {}
    if options:
        table = {f"{section}={name}": description_of(file) for name, file in options.items()}
        blocks.append("\n".join(["Options:", *_aligned(table)]))
    if section in OPTIONAL_SECTIONS:
        blocks.append(f"null unless one of its keys is given, or {section}={{}}.")
    keys = [key for key in documents if key.startswith(f"{section}.")]
    width = max(map(len, keys))
    blocks.append("\n".join(["Keys:", *(line for key in keys for line in _key_lines(key, documents, width))]))
    return "\n\n".join(blocks)


def _key_help(key: str, documents: dict[str, str]) -> str:
    group = key.rpartition(".")[0]
    return "\n".join([*_key_lines(key, documents), "", f"All keys of the group: hp-train help {group}"])


def _key_lines(key: str, documents: dict[str, str], width: int = 0) -> list[str]:
    """Return a key with what it takes on the first line (type, unit; default; bounds), its meaning below."""
    meaning, _, values = documents[key].rstrip(".").rpartition(". ")
    first = textwrap.wrap(values[:1].lower() + values[1:], WIDTH - 4 - max(width, len(key)))
    lines = [f"  {key:<{width}}  {first[0]}", *(f"  {'':<{width}}  {rest}" for rest in first[1:])]
    return lines + [f"      {line}" for line in textwrap.wrap(f"{meaning}.", WIDTH - 6)]


def field_documents() -> dict[str, str]:
    """Return dotted key -> the docstring under its field in the schema's source, or in a plugin's ("" without one)."""
    by_file: dict[str, dict[str, dict[str, str]]] = {}
    found = {}
    for key, leaf in LEAVES.items():
        owner = SECTIONS[leaf.section]
        file = _source_of(owner)
        if file not in by_file:
            tree = ast.parse(Path(file).read_text(encoding="utf-8"))
            by_file[file] = {node.name: _documents_of(node) for node in tree.body if isinstance(node, ast.ClassDef)}
        found[key] = by_file[file].get(owner.__name__, {}).get(key.rpartition(".")[2], "")
    return found


def _source_of(owner: type) -> str:
    """Return the file that declares a group of settings; our groups with a plugin's keys are made at run time."""
    if owner.__module__ == "types" or owner.__module__.startswith("hp_train."):
        return schema.__file__
    return sys.modules[owner.__module__].__file__ or schema.__file__


def _documents_of(node: ast.ClassDef) -> dict[str, str]:
    found = {}
    for field, document in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(document, ast.Expr):
            found[field.target.id] = " ".join(document.value.value.split())
    return found
