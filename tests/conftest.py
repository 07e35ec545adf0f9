"""Shared fixtures: one thread per process, and `gpu` tests only where a GPU is."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

START_PROCESSES = {"distributed", "launch", "slurm", "bad_inputs", "test_end_to_end.py"}


@pytest.fixture(autouse=True)
def loggers_that_speak() -> None:
    """Undo what composing in this process does: Hydra's `disabled` logging switches off every logger that exists."""
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.disabled = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files that start processes take longest: they go first, so that no worker is left with one at the end.
    items.sort(key=lambda item: not START_PROCESSES & set(item.path.parts))
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return
    without_gpu = pytest.mark.skip(reason="no NVIDIA device on this machine")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(without_gpu)
