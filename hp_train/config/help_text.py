"""The words of `hp-train --help` around what Hydra prints: usage above, every key with its meaning below. No torch."""

from __future__ import annotations

import ast
from pathlib import Path

from hp_train.config import schema
from hp_train.config.schema_tree import GROUPS, LEAVES, SECTIONS

VERBS = {
    "train": "compose a config and train (the verb may be left out)",
    "resume": "go on with a run: hp-train resume RUN_DIR [key=value ...]",
    "recipes": "list the recipes with their size and the processes they need",
    "schedule": "list, show, draw and prove pipeline schedules",
    "data": "prepare text for training: hp-train data prepare INPUT... --out DIR",
}
"""Verb -> one line."""

USAGE = "hp-train [VERB] [recipe=NAME] [group=option ...] [key=value ...]"

_OPTIONS = {
    "--cfg job": "print the composed config instead of training (-p GROUP for one group of it)",
    "--resolve": "with --cfg: print the values of interpolations",
    "--multirun": "one job for each combination of values given as key=a,b",
    "--config-dir DIR": "a folder with recipes and options of your own, besides $HP_TRAIN_CONFIG_DIR and ./recipes",
    "--info searchpath": "print where configs are looked for (or defaults-tree, config)",
    "-sc install=bash": "print the script that completes groups, options and keys; eval it",
    "--version": "print the version",
}
_EXIT_CODES = (
    "Exit codes: 0 done; 1 fault of the system; 2 fault in what was typed; 3 diverged;\n"
    "75 stopped by a signal and saved; 130 stopped by Ctrl-C and saved."
)


def part(name: str) -> str:
    """Return the `header` or `footer` of the help; called by Hydra through a resolver."""
    text = {"header": _header, "footer": key_table}[name]()
    return text.replace("$", "$$")  # Hydra fills in a template, in which a single $ is a placeholder


def _header() -> str:
    rows = [*_aligned(VERBS), "", "Options:", "", *_aligned(_OPTIONS)]
    return "\n".join([f"Usage: {USAGE}", "", "Verbs:", "", *rows, "", _EXIT_CODES])


def _aligned(table: dict[str, str]) -> list[str]:
    width = max(map(len, table))
    return [f"  {name:<{width}}  {text}" for name, text in table.items()]


def key_table() -> str:
    """Return every key of the schema with its docstring, by group."""
    documents = field_documents()
    lines = ["Keys:"]
    for group in GROUPS:
        lines += ["", f"{group}: {SECTIONS[group].__doc__}"]
        lines += _aligned({key: documents[key] for key in LEAVES if key.startswith(f"{group}.")})
    return "\n".join(lines)


def field_documents() -> dict[str, str]:
    """Return dotted key -> the docstring under its field in the schema's source."""
    tree = ast.parse(Path(schema.__file__).read_text(encoding="utf-8"))
    by_class = {node.name: _documents_of(node) for node in tree.body if isinstance(node, ast.ClassDef)}
    return {
        key: by_class[SECTIONS[leaf.section].__name__][key.rpartition(".")[2]] for key, leaf in LEAVES.items()
    }  # fmt: skip


def _documents_of(node: ast.ClassDef) -> dict[str, str]:
    found = {}
    for field, document in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(document, ast.Expr):
            found[field.target.id] = " ".join(document.value.value.split())
    return found
