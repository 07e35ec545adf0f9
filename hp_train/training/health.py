"""Before the first step: does every rank compute as its peers do, and does what they exchange come out right?

Two seconds on every rank: matrix products, whose speed and bits are compared between ranks with the same device, and
all-reduces, whose sum is known. A rank that is slow is told; one that computes something else ends the run, because
training on it would be worthless.
"""

from __future__ import annotations

import dataclasses
import socket
import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hp_train.checkpoint.agreement import gather_all, is_distributed
from hp_train.errors import HpTrainError

_SECONDS = 1.0  # for the products, and as much for the all-reduces
_SLOW = 0.85  # of its peers' speed
_SIZES = {"cuda": (8192, torch.bfloat16, 64 << 20), "cpu": (512, torch.float32, 1 << 20)}  # matrix, dtype, bytes


class HealthError(HpTrainError):
    """A rank computes or receives something other than its peers."""


@dataclass(frozen=True, slots=True)
class Health:
    """What one rank measured."""

    host: str
    device: str  # its name; only equal devices are compared
    local_rank: int
    flops_per_s: float
    checksum: float  # of a matrix product, the same bits on equal devices
    reduced_bytes_per_s: float  # size of the tensor over the time of an all-reduce
    sums_right: bool

    @property
    def place(self) -> str:
        """Return e.g. `node17 GPU 3`."""
        return f"{self.host} {'process' if self.device == 'cpu' else 'GPU'} {self.local_rank}"


def check_health(device: torch.device, device_name: str, local_rank: int) -> tuple[list[dict], list[str]]:
    """Measure all ranks; return their figures by rank and a line for each slow one. Collective.

    Raises HealthError on every rank when some rank's results are wrong.
    """
    flops_per_s, checksum = _measure_products(device)
    reduced_bytes_per_s, sums_right = _measure_all_reduce(device)
    if device.type == "cuda":  # what was needed here is not what training needs at most
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    mine = Health(socket.gethostname(), device_name, local_rank, flops_per_s, checksum, reduced_bytes_per_s, sums_right)
    found: list[Health] = gather_all(mine)
    wrong = wrong_ranks(found)
    if wrong:
        raise HealthError("health check: " + "; ".join(wrong))
    return [dataclasses.asdict(each) for each in found], slow_ranks(found)


def wrong_ranks(found: list[Health]) -> list[str]:
    """Return a line for each rank whose results are not those of most of its peers."""
    lines = [f"rank {rank} ({each.place}): wrong sum" for rank, each in enumerate(found) if not each.sums_right]
    for name in {each.device for each in found}:
        peers = [(rank, each) for rank, each in enumerate(found) if each.device == name]
        usual = statistics.mode(each.checksum for _, each in peers)
        lines += [f"rank {rank} ({each.place}): wrong product" for rank, each in peers if each.checksum != usual]
    return lines


def slow_ranks(found: list[Health]) -> list[str]:
    """Return a line for each rank that computes slower than its peers: `node17 GPU 3: 412 TFLOP/s, others 690`."""
    lines = []
    for rank, each in enumerate(found):
        others = [peer.flops_per_s for at, peer in enumerate(found) if at != rank and peer.device == each.device]
        usual = statistics.median(others) if others else 0.0
        if each.flops_per_s < _SLOW * usual:
            unit, scale = ("TFLOP/s", 1e12) if usual >= 1e13 else ("GFLOP/s", 1e9)
            lines.append(f"{each.place}: {each.flops_per_s / scale:.0f} {unit}, others {usual / scale:.0f}")
    return lines


def _measure_products(device: torch.device) -> tuple[float, float]:
    size, dtype, _ = _SIZES[device.type]
    left = torch.sin(torch.arange(size * size, device=device, dtype=torch.float32)).reshape(size, size).to(dtype)
    checksum = (left @ left).double().sum().item()
    _wait(device)
    started, products = time.perf_counter(), 0
    while time.perf_counter() - started < _SECONDS:
        for _ in range(10):
            left @ left
        _wait(device)
        products += 10
    return products * 2 * size**3 / (time.perf_counter() - started), checksum


def _measure_all_reduce(device: torch.device) -> tuple[float, bool]:
    if not is_distributed():
        return 0.0, True
    num_bytes = _SIZES[device.type][2]
    world_size = dist.get_world_size()
    tensor = torch.ones(num_bytes // 4, device=device)
    dist.all_reduce(tensor)
    right = bool((tensor == world_size).all())
    tensor.zero_()
    _wait(device)
    started = time.perf_counter()
    dist.all_reduce(tensor)
    _wait(device)
    # All ranks do the same number: what the slowest needs for its share of the time.
    repeats = max(1, min(1000, round(_SECONDS / max(gather_all(time.perf_counter() - started)))))
    started = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(tensor)
    _wait(device)
    return repeats * num_bytes / (time.perf_counter() - started), right


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
