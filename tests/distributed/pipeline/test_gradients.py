"""Gradients of a pipeline against a single process, fp32: losses within 1e-6, gradients within 2e-6 of their norm.

The bound on gradients is the one that a mere change of the order of summation stays below for three SGD steps. All
cases of one world size share a process group.
"""

from __future__ import annotations

from tests.distributed.pipeline.llama_cases import Case, run_case
from tests.distributed.ranks import run_ranks

TOLERANCE = 2e-6


def _worker(rank: int, world_size: int, cases: list[Case]) -> list[float]:
    return [run_case(case) for case in cases]


def _check(world_size: int, cases: list[Case]) -> None:
    errors = run_ranks(world_size, _worker, cases, timeout_s=240)
    worst = {case: max(each[index] for each in errors) for index, case in enumerate(cases)}
    assert all(error <= TOLERANCE for error in worst.values()), {k: v for k, v in worst.items() if v > TOLERANCE}


def test_two_processes() -> None:
    _check(2, [
        Case("gpipe", 2, 4, ragged=True),
        Case("1f1b", 2, 5, tied=True, layer_split=(1, 3)),
    ])  # fmt: skip


def test_four_processes() -> None:
    _check(4, [
        Case("1f1b", 4, 6),
        Case("gpipe", 2, 3, reshard_after_forward=False),
        Case("1f1b", 2, 3, reshard_after_forward=True, tied=True),
    ])  # fmt: skip
