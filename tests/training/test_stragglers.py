"""Slow ranks are told by share and host; pipeline stages are not held against each other; wrong ones end the run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hp_train.training import health
from hp_train.training.health import Health, check_health, slow_ranks, wrong_ranks
from hp_train.training.metrics import device_name, peak_memory_bytes
from hp_train.training.stragglers import WINDOW, StragglerWatch


def test_a_slow_rank_is_told_once_a_window() -> None:
    watch = StragglerWatch([f"node{rank // 2}" for rank in range(4)], [0, 0, 0, 0])
    told = [line for _ in range(2 * WINDOW) for line in watch.add([0.1, 0.1, 0.1, 0.138])]
    assert told == [f"slow: rank 3 (node1) +38 % for {WINDOW} steps"] * 2


def test_stages_differ_by_design_and_noise_is_not_told() -> None:
    watch = StragglerWatch(["a"] * 4, [0, 0, 1, 1])
    assert not [line for _ in range(WINDOW) for line in watch.add([0.1, 0.11, 0.3, 0.31])]
    assert not [line for _ in range(WINDOW) for line in watch.add([1e-4, 9e-4, 1e-4, 1e-4])]
    alone = StragglerWatch(["a"], [0])
    assert not [line for _ in range(WINDOW) for line in alone.add([1.0])]


HEALTHY = Health("node17", "NVIDIA H100", 3, 690e12, 1.5, 4e11, True)


def test_health_compares_equal_devices_only() -> None:
    found = [HEALTHY] * 3 + [replace(HEALTHY, flops_per_s=412e12), replace(HEALTHY, device="cpu", flops_per_s=1e9)]
    assert slow_ranks(found) == ["node17 GPU 3: 412 TFLOP/s, others 690"]
    assert wrong_ranks(found) == []
    assert slow_ranks([HEALTHY]) == []


def test_a_rank_that_computes_something_else_is_named() -> None:
    found = [HEALTHY, HEALTHY, replace(HEALTHY, checksum=1.25, local_rank=5), replace(HEALTHY, sums_right=False)]
    assert wrong_ranks(found) == ["rank 3 (node17 GPU 3): wrong sum", "rank 2 (node17 GPU 5): wrong product"]


def test_a_healthy_machine_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_SECONDS", 0.01)
    (figures,), slow = check_health(torch.device("cpu"), "cpu", 0)
    assert slow == [] and figures["sums_right"] and figures["flops_per_s"] > 0


@pytest.mark.gpu
def test_the_check_leaves_no_trace_in_the_peak_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_SECONDS", 0.01)
    device = torch.device("cuda", torch.cuda.current_device())
    before = torch.cuda.memory_reserved(device)
    check_health(device, device_name(device), 0)
    assert peak_memory_bytes(device) <= before + 64 * 2**20  # cuBLAS keeps a workspace
