"""Is this config a run that can start? All faults are found, not the first. No torch.

Two passes: every field against its own type and bounds, then the rules over several fields (`rules_*.py`). A rule names
the keys it reads and is left out while one of them is at fault or unknown, so that no fault is told twice.
Nothing here looks at this machine; that is the launcher's part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from hp_train.config import (
    no_effect,
    rules_batch,
    rules_data,
    rules_mesh,
    rules_model,
    rules_pipeline,
    rules_run,
    rules_slurm,
)  # fmt: skip
from hp_train.config.faults import Fault, is_unknown
from hp_train.config.numbers import spell
from hp_train.config.schema import TrainerConfig
from hp_train.config.schema_tree import LEAVES, OPTIONAL_SECTIONS, Leaf, misfit, value_at

RULES = (
    *rules_mesh.RULES, *rules_batch.RULES, *rules_pipeline.RULES, *rules_model.RULES, *rules_data.RULES,
    *rules_run.RULES, *rules_slurm.RULES,
)  # fmt: skip


def faults(config: TrainerConfig) -> list[str]:
    """Return one line for each fault: the key as typed, the numbers, the valid choices."""
    return list(dict.fromkeys(fault.message for fault in check_config(config)))


def warnings(config: TrainerConfig) -> list[str]:
    """Return one line for each setting that has no effect in this run; `config` has no faults."""
    return no_effect.find(config)


def check_config(config: TrainerConfig, unknown: Iterable[str] = ()) -> list[Fault]:
    """Return the faults of `config`; `unknown` are keys whose values are not to be judged (see `faults.Fault`)."""
    unknown = list(unknown)
    found = [*_check_sections(config)]
    unknown.extend(key for fault in found for key in fault.unknown)
    for leaf in LEAVES.values():
        if is_unknown(leaf.key, unknown) or _is_below_null(config, leaf):
            continue
        fault = _check_field(leaf, value_at(config, leaf.key))
        if fault is not None:
            found.append(fault)
            unknown.append(leaf.key)
    for rule in RULES:
        if not any(is_unknown(key, unknown) for key in rule.reads):
            found.extend(Fault(message) for message in rule.check(config))
    return found


def _check_sections(config: TrainerConfig) -> Iterator[Fault]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not isinstance(value, type(field.default_factory())):
            yield Fault(f"{field.name} is a group and cannot be {spell(value)}", (f"{field.name}.",))


def _is_below_null(config: TrainerConfig, leaf: Leaf) -> bool:
    return leaf.section in OPTIONAL_SECTIONS and value_at(config, leaf.section) is None


def _check_field(leaf: Leaf, value: object) -> Fault | None:
    wrong = misfit(leaf, value)
    if wrong is not None:
        return Fault(f"{leaf.key}={spell(value)} {wrong}{leaf.choices()}", (leaf.key,))
    items = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
    for item in items:
        if not leaf.bounds.contain(item):
            what = f"{leaf.key}={spell(value)}"
            if leaf.bounds.choices:
                return Fault(f"{what} is not a choice{leaf.choices()}", (leaf.key,))
            return Fault(f"{what} is out of bounds{leaf.choices()}", (leaf.key,))
    return None
