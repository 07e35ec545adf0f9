"""`hp-train explain [recipe=NAME] [key=value ...] KEY`: a value, and where it comes from. No torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hp_train.commands.arguments import add_config_dir
from hp_train.config.key_check import unknown_key
from hp_train.config.numbers import spell
from hp_train.config.provenance import Setting, Trace, trace
from hp_train.config.schema_tree import GROUPS, LEAVES, SECTIONS, value_at
from hp_train.config.search_path import SearchPath, search_path
from hp_train.errors import ConfigError

if TYPE_CHECKING:  # it imports Hydra, which completion does without
    from hp_train.config.compose import Composition


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    usage = "[recipe=NAME] [key=value ...] KEY"
    parser.add_argument("words", nargs="+", metavar=usage, help="what is composed, and a key or a group")
    add_config_dir(parser)


def run(args: argparse.Namespace) -> int:
    """Print each key's value with the chain of places that set it. Raises ConfigError."""
    from hp_train.config.compose import compose_request

    overrides = [word for word in args.words if "=" in word]
    keys = [word for word in args.words if "=" not in word]
    if not keys:
        example = "hp-train explain recipe=llama_fsdp_pp trainer.seq_len"
        raise ConfigError(f"explain needs a KEY after what is composed: {example}")
    path = search_path(args.config_dir)
    found = trace_of(overrides, path, keys)
    job = compose_request(found.request)
    for number, key in enumerate(keys):
        print(*([""] if number else []), *_explain(key, found, job), sep="\n")
    return 0


def trace_of(overrides: list[str], path: SearchPath, keys: list[str]) -> Trace:
    """Return the trace of sound overrides. Raises ConfigError with every fault, of the keys asked for too."""
    from hp_train.config.override_check import check_request

    faults = [fault.message for fault in check_request(overrides, path).all_faults]
    faults += [unknown_key(key).message for key in keys if key not in LEAVES and key not in SECTIONS]
    if faults:
        raise ConfigError(*faults)
    return trace(overrides, path)


def _explain(key: str, found: Trace, job: Composition) -> Iterator[str]:
    if key in SECTIONS:
        yield from _explain_group(key, found, job)
        return
    from hp_train.config.help_text import field_documents

    settings = found.by_key().get(key, [])
    value = value_at(job.config, key)
    yield f"{key}={spell(value)}"
    yield f"  {field_documents()[key]}"
    rows = [_row(setting) for setting in reversed(settings)]
    why = _derived(key, value, settings[-1] if settings else None, job)
    if why is not None:
        rows.insert(0, (spell(value), "derived", why))
    if not rows:
        rows = [(spell(value), "schema", f"{key.rpartition('.')[0]} is null")]
    yield "from, the first holds:" if len(rows) > 1 else "from:"
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    yield from (f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}".rstrip() for row in rows)
    yield from (f"  at fault: {message}" for message in job.messages if message.startswith(f"{key}="))


def _row(setting: Setting) -> tuple[str, str, str]:
    return spell(setting.value), setting.place, setting.why


def _explain_group(group: str, found: Trace, job: Composition) -> Iterator[str]:
    """Yield the option of a group and who chose it, then each of its keys with the place that holds."""
    by_key = found.by_key()
    if group in GROUPS and group in found.choices:
        first, *others = reversed(found.chosen_by[group])
        yield f"{group}={first.value}, chosen by {first.place} ({first.why})"
        yield from (f"  in place of {other.value} of {other.place} ({other.why})" for other in others)
    rows = []
    for key in LEAVES:
        if key.startswith(f"{group}.") and key in by_key:
            value = value_at(job.config, key)
            derived = _derived(key, value, by_key[key][-1], job) is not None
            rows.append((f"{key}={spell(value)}", "derived" if derived else by_key[key][-1].place))
    width = max((len(row[0]) for row in rows), default=0)
    yield from (f"  {row[0]:<{width}}  {row[1]}" for row in rows)


def _derived(key: str, value: object, last: Setting | None, job: Composition) -> str | None:
    """Say by what a value came from the last that was set; None where it is that."""
    written = None if last is None else last.value
    if value == written and type(value) in (type(written), float):
        return None
    if isinstance(written, str) and "${" in written:
        return f"what {written} refers to"
    if isinstance(written, str) and written.startswith(("~", "file:~")):
        return "the home folder in the place of ~"
    if key.startswith("model.") and job.config.model.pretrained is not None:
        return f"config.json of model.pretrained={job.config.model.pretrained}"
    if isinstance(value, str) and isinstance(written, str):
        return f"the one spelling of {written}"
    return None
