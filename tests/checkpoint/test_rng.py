"""Generators go on where the checkpoint was taken, on a run of as many ranks; on another they begin anew."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from hp_train.checkpoint import rng
from hp_train.checkpoint.load import find_checkpoint, load_checkpoint
from hp_train.checkpoint.save import save_checkpoint
from hp_train.checkpoint.state import CheckpointState
from hp_train.checkpoint.storage import SavePolicy
from tests.checkpoint.whole_runs import tiny_state
from tests.distributed.ranks import run_ranks

CPU = torch.device("cpu")


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), *np.random.rand(2), np.random.randn(), *torch.rand(3).tolist()]


def save_and_go_on(rank: int, world_size: int, root: Path) -> tuple[list[float], list[float]]:
    rng.start_anew(7, rank, 0)
    first = draw()
    rng.start_anew(7, rank, 0)
    assert draw() == first
    rng.start_anew(7, rank, 1)
    assert all(one != two for one, two in zip(draw(), first, strict=True))
    state = tiny_state(1)
    state = CheckpointState(state.parameters, state.optimizer, {}, {"step": 1}, rng.capture(rank, CPU))
    save_checkpoint(root, 1, state, SavePolicy(1))
    expected = draw()
    folder = find_checkpoint(root)
    load_checkpoint(folder, tiny_state(5))  # what it holds beside the tensors of a run is no misfit
    rng.restore(rng.read_states(folder, rank, world_size), CPU)
    assert rng.read_states(folder, rank, world_size + 1) is None
    return expected, draw()


def test_every_generator_of_every_rank_goes_on(tmp_path: Path) -> None:
    first, second = run_ranks(2, save_and_go_on, tmp_path)
    for expected, drawn in (first, second):
        assert drawn == expected
    assert first[0] != second[0]
