"""Every feature of the engine, each as a case on two ranks and on four, against one process."""

from __future__ import annotations

import pytest

from tests.distributed.fully_shard import cases_flow, cases_layout, cases_recompute, cases_units
from tests.distributed.fully_shard.registry import merged
from tests.distributed.ranks import run_ranks

MODULES = {"layout": cases_layout, "flow": cases_flow, "recompute": cases_recompute, "units": cases_units}


def run_module(rank: int, world_size: int, name: str) -> dict[str, str]:
    return MODULES[name].REGISTRY.run((world_size,))


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[int, str], dict[str, str]]:
    return {}


CASES = [
    pytest.param(size, module, case, id=f"{size}-{case}")
    for size in (2, 4)
    for module, content in MODULES.items()
    for case in content.REGISTRY.cases
]


@pytest.mark.parametrize(("size", "module", "case"), CASES)
def test_feature(size: int, module: str, case: str, outcomes: dict[tuple[int, str], dict[str, str]]) -> None:
    if (size, module) not in outcomes:
        outcomes[size, module] = merged(run_ranks(size, run_module, module))
    assert not outcomes[size, module][case], outcomes[size, module][case]
