"""What differs between two runs: their configs, what they ran on, and from which step on their losses. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hp_train.config.yaml_text import read as read_yaml
from hp_train.errors import ConfigError
from hp_train.launch.files import read_json
from hp_train.launch.find_run import CONFIG_FILE
from hp_train.reports.run_listing import all_rows

CLOSE = 1e-5  # relative: what another order of float32 sums makes of a loss in a few steps
_ABSENT = "(absent)"
_PLACES = ("trainer.run_dir", "trainer.run_name", "trainer.runs_root")  # where a run lies is no difference


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that is not the same in both runs."""

    name: str
    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class LossComparison:
    """The losses of two runs over the steps that both have taken."""

    num_steps: int  # common ones
    first_unequal: tuple[int, float, float] | None  # step and both losses, from the first that is not the same number
    first_apart: tuple[int, float, float] | None  # from the first that differs by more than CLOSE
    largest: tuple[int, float, float] | None  # where they differ most
    last: tuple[int, float, float] | None


def config_differences(first: Path, second: Path) -> list[Difference]:
    """Return the keys whose values differ, in the order of the first run's config. Raises ConfigError."""
    return _differences(read_config(first), read_config(second), _PLACES)


def circumstance_differences(first: Path, second: Path) -> list[Difference]:
    """Return which versions, hosts and commits differ, of those that capsule.json records."""
    return _differences(_circumstances(first), _circumstances(second), ())


def compare_losses(first: Path, second: Path) -> LossComparison:
    """Compare the losses step by step."""
    others = {row.step: row.loss for row in all_rows(second)}
    pairs = [
        (row.step, row.loss, others[row.step])
        for row in all_rows(first)
        if row.loss is not None and others.get(row.step) is not None
    ]
    unequal = [pair for pair in pairs if pair[1] != pair[2]]
    apart = [pair for pair in unequal if not abs(pair[1] - pair[2]) <= CLOSE * max(abs(pair[1]), abs(pair[2]))]
    return LossComparison(
        num_steps=len(pairs),
        first_unequal=unequal[0] if unequal else None,
        first_apart=apart[0] if apart else None,
        largest=max(unequal, key=lambda pair: abs(pair[1] - pair[2]), default=None),
        last=pairs[-1] if pairs else None,
    )


def read_config(run_dir: Path) -> dict[str, Any]:
    """Return a run's config.yaml as dotted key -> value. Raises ConfigError when it cannot be read."""
    path = run_dir / CONFIG_FILE
    try:
        return dict(_flat(read_yaml(path.read_text(encoding="utf-8")), ""))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from error


def _flat(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _circumstances(run_dir: Path) -> dict[str, Any]:
    capsule = read_json(run_dir / "capsule.json") or {}
    found = {"host": capsule.get("host"), "python": capsule.get("python")}
    found.update(capsule.get("versions") or {})
    git = capsule.get("git")
    if git is not None:
        found["hp-train's commit"] = git["commit"][:12] + (" (changed)" if git["changed"] else "")
    return found


def _differences(first: dict[str, Any], second: dict[str, Any], skipped: tuple[str, ...]) -> list[Difference]:
    names = [name for name in dict.fromkeys([*first, *second]) if name not in skipped]
    pairs = [Difference(name, first.get(name, _ABSENT), second.get(name, _ABSENT)) for name in names]
    return [pair for pair in pairs if pair.first != pair.second]
