"""Shared fixtures: one thread per process, and `gpu` tests only where a GPU is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return
    without_gpu = pytest.mark.skip(reason="no NVIDIA device on this machine")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(without_gpu)
