"""Two mesh axes, each property as a case on 2 x 2 ranks."""

from __future__ import annotations

import pytest

from tests.distributed.fully_shard import cases_meshes
from tests.distributed.fully_shard.registry import merged
from tests.distributed.ranks import run_ranks


def run_cases(rank: int, world_size: int) -> dict[str, str]:
    return cases_meshes.REGISTRY.run((2, 2))


@pytest.fixture(scope="module")
def outcome() -> dict[str, str]:
    return merged(run_ranks(4, run_cases))


@pytest.mark.parametrize("case", cases_meshes.REGISTRY.cases)
def test_two_axes(case: str, outcome: dict[str, str]) -> None:
    assert not outcome[case], outcome[case]
