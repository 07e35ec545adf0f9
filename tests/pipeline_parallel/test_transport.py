"""What the wires do apart from the groups behind them."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from hp_train.pipeline_parallel.transport import Edge, Traffic, Wires


class Backend:
    """Stands for a device's process group; notes what is called."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.num_ended = 0

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self.calls.append(("send", tensors[0].dtype, peer, tag))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self.calls.append(("recv", tensors[0].dtype, peer, tag))

    def _start_coalescing(self) -> None:
        self.calls.append(("start",))

    def _end_coalescing(self) -> SimpleNamespace:
        self.calls.append(("end",))
        return SimpleNamespace(wait=lambda: setattr(self, "num_ended", self.num_ended + 1), is_completed=lambda: True)


def test_transfers_of_a_block_start_in_one_group_call_when_it_ends() -> None:
    up, back = Edge(Traffic.FORWARD, 0, 1, 1, 2), Edge(Traffic.BACKWARD, 1, 0, 2, 1)
    wires, backend = Wires("batch", (), (0, 1, 2), 1, torch.device("cpu"), 1.0, store=None), Backend()
    group = SimpleNamespace(backend=backend, rank_of={1: 1, 2: 2})
    wires._groups = {up: group, back: group}
    wires._lines = {edge: wires._line(edge, group, tag) for tag, edge in enumerate((up, back))}
    with wires.together():
        transfers = [wires.start(torch.zeros(3), up), wires.start(torch.zeros(2, dtype=torch.bool), back)]
        assert backend.calls == []
    assert backend.calls == [("start",), ("send", torch.float32, 2, 0), ("recv", torch.uint8, 2, 1), ("end",)]
    wires.wait_for(transfers[:1], up, 0)
    assert backend.num_ended == 1 and transfers[1].is_completed()
    with wires.together():
        pass
    assert len(backend.calls) == 4, "an empty block is no group call"
