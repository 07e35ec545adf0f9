"""Which rank is slower than its peers, told while the run goes on.

In step with its peers every rank takes the same time for a step, most of it waiting if another is slow: only the time
that a rank computes tells them apart. On the CPU that is the processor time of the training thread, which does not run
while it waits. On a GPU, where waiting kernels look busy, it is the time of the same few matrix products every few
steps, measured by events that nobody waits for.
"""

from __future__ import annotations

import statistics
import time

import torch

WINDOW = 50  # steps over which ranks are compared
MARGIN = 0.2  # slower than its peers by more than this share is slow
_LEAST_S = 0.002  # a step: below it the measurement says nothing

_PROBE_EVERY = 10  # steps
_PROBE_SIZE, _PROBE_PRODUCTS = 4096, 4


class ComputeClock:
    """Measures what this rank computes in a step; `start` and `stop` stand around forward and backward."""

    def __init__(self, device: torch.device) -> None:
        self._probe = _Probe(device) if device.type == "cuda" else None
        self._started = 0.0
        self._steps = 0

    def start(self) -> None:
        """Begin a step."""
        self._started = time.thread_time()
        if self._probe is not None and self._steps % _PROBE_EVERY == 0:
            self._probe.launch()
        self._steps += 1

    def stop(self) -> float:
        """Return the seconds that stand for this rank's computing in this step; comparable between ranks only."""
        return time.thread_time() - self._started if self._probe is None else self._probe.seconds()


class _Probe:
    """A few matrix products in the stream of the step, timed by its events."""

    def __init__(self, device: torch.device) -> None:
        self._left = torch.randn(_PROBE_SIZE, _PROBE_SIZE, device=device, dtype=torch.bfloat16)
        self._out = torch.empty_like(self._left)
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._seconds = 0.0

    def launch(self) -> None:
        self._begin.record()
        for _ in range(_PROBE_PRODUCTS):
            torch.mm(self._left, self._left, out=self._out)
        self._end.record()

    def seconds(self) -> float:
        if self._end.query():  # else the step is still under way, and the last figure stands
            self._seconds = self._begin.elapsed_time(self._end) / 1000
        return self._seconds


class StragglerWatch:
    """Compares the ranks over windows of steps. Ranks of one pipeline stage are peers: stages differ by design."""

    def __init__(self, hosts: list[str], stages: list[int]) -> None:
        """`hosts[rank]` and `stages[rank]`: host name and pipeline coordinate of each rank."""
        self._hosts = hosts
        self._peers = [[other for other, at in enumerate(stages) if at == stage] for stage in stages]
        self._sums = [0.0] * len(hosts)
        self._steps = 0

    def add(self, seconds: list[float]) -> list[str]:
        """Take in the compute time of every rank in one step; return a line for each slow one at the end of a window.

        A line reads e.g. `slow: rank 139 (node17) +38 % for 50 steps`.
        """
        self._sums = [total + more for total, more in zip(self._sums, seconds, strict=True)]
        self._steps += 1
        if self._steps < WINDOW:
            return []
        lines = [line for rank in range(len(self._hosts)) if (line := self._judge(rank)) is not None]
        self._sums, self._steps = [0.0] * len(self._hosts), 0
        return lines

    def _judge(self, rank: int) -> str | None:
        others = [self._sums[other] for other in self._peers[rank] if other != rank]
        usual = statistics.median(others) if others else 0.0
        if usual < _LEAST_S * WINDOW or self._sums[rank] <= usual * (1 + MARGIN):
            return None
        share = self._sums[rank] / usual - 1
        return f"slow: rank {rank} ({self._hosts[rank]}) +{share:.0%} for {WINDOW} steps".replace("%", " %")
