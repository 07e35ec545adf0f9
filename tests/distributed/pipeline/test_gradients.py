"""Gradients of a pipeline against a single process, fp32: losses within 1e-6, gradients within 2e-6 of their norm.

The bound on gradients is the one that a mere change of the order of summation stays below; where nothing is summed in
another order they are equal, and transports and options must not change a bit. All cases of one world size share their
processes.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from tests.distributed.pipeline.llama_cases import Case, run_case
from tests.distributed.ranks import run_ranks

TOLERANCE = 2e-6
SCHEDULES = {
    "gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "zb_h1": 1, "interleaved_zb": 2, "zbv": 2, "dualpipe_v": 2,
}  # fmt: skip
TRANSPORTS = ("plain", "batch", "multi_stream", "boundary")
OPTIONS = {  # one a transport, so that every schedule meets every option
    "plain": {"swap": 2},
    "batch": {"overlap": "b_f"},
    "multi_stream": {"data": True},
    "boundary": {"overlap": "f_b", "data": True, "swap": 3},
}


def _worker(rank: int, world_size: int, cases: list[Case]) -> list[float]:
    return [run_case(case) for case in cases]


def _check(world_size: int, cases: list[Case], tolerance: float = TOLERANCE) -> None:
    errors = run_ranks(world_size, _worker, cases, timeout_s=400)
    worst = {case: max(each[index] for each in errors) for index, case in enumerate(cases)}
    assert all(error <= tolerance for error in worst.values()), {k: v for k, v in worst.items() if v > tolerance}


def test_all_schedules_and_transports_on_two_processes() -> None:
    """Untied weights, each micro-batch's gradients added in order: bitwise equal."""
    cases = [Case(name, 2, 4, SCHEDULES[name], transport) for name, transport in product(SCHEDULES, TRANSPORTS)]
    _check(2, cases, tolerance=0.0)


def test_all_options_on_two_processes() -> None:
    """Swapped, overlapped, with targets carried by the schedule: still bitwise equal."""
    cases = [
        Case(name, 2, 5 if name in ("1f1b", "zbv") else 4, SCHEDULES[name], transport, num_steps=2,
             lowering=tuple(OPTIONS[transport].items()), ragged=transport != "boundary")
        for name, transport in product(SCHEDULES, TRANSPORTS)
    ]  # fmt: skip
    _check(2, cases, tolerance=0.0)


def test_all_schedules_and_transports_on_four_processes() -> None:
    cases = []
    for number, (name, transport) in enumerate(product(SCHEDULES, TRANSPORTS)):
        v = SCHEDULES[name]
        split = (2, 1, 3, 1) if v == 1 else (1, 2, 1, 1, 1, 2, 1, 1)
        case = Case(name, 4, 8, v, transport, tied=number % 2 == 0, layer_split=split)
        cases.append(replace(case, num_steps=3 if transport == "plain" else 1))
    _check(4, cases)


def test_sharded_stages() -> None:
    """Two stages' ranks by two data-parallel ranks: both engines, resharding and not, by hooks and by the schedule."""
    cases = [
        Case(name, 2, 4, v, reshard_after_forward=reshard, engine="ours" if (number % 2) == reshard else "torch",
             lowering=(("fsdp", 2),) if number % 3 else (), tied=name in ("1f1b", "zbv"), num_steps=2)
        for number, (name, v) in enumerate(SCHEDULES.items()) for reshard in (True, False)
    ]  # fmt: skip
    cases += [  # where torch's own runtime goes silently wrong
        Case(name, 2, 4, SCHEDULES[name], reshard_after_forward=True, engine=engine, num_steps=2)
        for name, engine in product(("zb_h1", "zbv"), ("torch", "ours"))
    ]
    _check(4, cases)
