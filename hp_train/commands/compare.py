"""`hp-train compare RUN RUN`: what differs in the configs, and where the losses first differ. No torch."""

from __future__ import annotations

import argparse

from hp_train.config.numbers import spell
from hp_train.launch.find_run import find_run
from hp_train.reports.comparison import (
    CLOSE,
    Difference,
    LossComparison,
    circumstance_differences,
    compare_losses,
    config_differences,
)

_WIDEST = 48  # of a value; longer ones are cut


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("first", metavar="RUN_A", help="a run: its directory, last, or the end of its id")
    parser.add_argument("second", metavar="RUN_B", help="the run to hold against it")


def run(args: argparse.Namespace) -> int:
    """Print the comparison. Raises ConfigError when one of them is no run."""
    first, second = find_run(args.first), find_run(args.second)
    print(f"A {first}\nB {second}")
    for what, differences in (
        ("config", config_differences(first, second)),
        ("circumstances", circumstance_differences(first, second)),
    ):
        print("\n".join(_table(what, differences)))
    print("\n".join(_losses(compare_losses(first, second))))
    return 0


def _table(what: str, differences: list[Difference]) -> list[str]:
    if not differences:
        return [f"{what}: the same"]
    rows = [("", "A", "B"), *((pair.name, _text(pair.first), _text(pair.second)) for pair in differences)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return [f"{what}:", *(f"  {name:<{widths[0]}}  {a:<{widths[1]}}  {b}".rstrip() for name, a, b in rows)]


def _text(value: object) -> str:
    text = spell(value)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


def _losses(found: LossComparison) -> list[str]:
    if found.last is None:
        return ["losses: no step that both have recorded"]
    if found.first_unequal is None or found.largest is None:
        return [f"losses: the same number in all {found.num_steps} common steps"]
    lines = [f"losses: {found.num_steps} common steps", f"  first unequal at {_pair(found.first_unequal)}"]
    if found.first_apart is not None:
        lines.append(f"  apart by more than {CLOSE:g} of their size from {_pair(found.first_apart)}")
    else:
        lines.append(f"  never apart by more than {CLOSE:g} of their size")
    return [*lines, f"  furthest apart at {_pair(found.largest)}", f"  at the last common {_pair(found.last)}"]


def _pair(found: tuple[int, float, float]) -> str:
    step, first, second = found
    return f"step {step}: {first:.7g} and {second:.7g} (B - A = {second - first:+.1e})"
