"""Swapped activations really leave, come back bit by bit, and take nothing with them that is needed meanwhile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from hp_train.pipeline_parallel import ModuleStage
from hp_train.pipeline_parallel.swap import SwapSpace


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)
        self.register_buffer("mask", torch.tensor([1.0, 0.0] * 4))
        self.seen: list[StorageWeakRef] = []

    def forward(self, hidden: Tensor) -> Tensor:
        wide = self.up(self.norm(hidden))
        left, right = wide.chunk(2, dim=-1)  # two saved views of one storage
        gated = F.silu(left) * right * self.mask
        self.seen = [StorageWeakRef(each.untyped_storage()) for each in (wide, gated)]
        return hidden + self.down(torch.cat([gated, gated.sigmoid()], dim=-1))


def stage_of(swapped: frozenset[int]) -> ModuleStage:
    torch.manual_seed(0)
    stage = ModuleStage(nn.Sequential(Block(), Block()), 1, 3)
    stage.begin_step(swapped)
    return stage


def expired(stage: ModuleStage) -> list[bool]:
    return [ref.expired() for block in stage.module for ref in block.seen]


def gradients(stage: ModuleStage, inputs: Tensor, *, swaps: bool) -> list[Tensor]:
    """Forward, the four swap steps in between if asked for, backward."""
    (output,) = stage.forward(0, (inputs.requires_grad_(),), {}, None)
    if swaps:
        space = stage.swap_space()
        space.launch_offload(0)
        space.wait_offload(0)
        assert all(expired(stage)), "storages are alive though swapped out"
        assert space.live_bytes == 0
        torch.full((64, 1024), float("nan"))  # whatever the allocator hands out next is not the old content
        space.launch_load(0)
        space.wait_load(0)
    (grad,) = stage.backward(0, (torch.ones_like(output),))
    return [grad, *(parameter.grad for parameter in stage.module.parameters())]


def test_gradients_are_bitwise_equal_and_memory_is_freed() -> None:
    inputs = torch.randn(4, 8)
    expected = gradients(stage_of(frozenset()), inputs.clone(), swaps=False)
    actual = gradients(stage_of(frozenset({0})), inputs.clone(), swaps=True)
    assert all(map(torch.equal, expected, actual))


def test_live_bytes_follow_the_steps() -> None:
    stage = stage_of(frozenset({0, 1}))
    space = stage.swap_space()
    sizes = [0]
    for micro in (0, 1):
        stage.forward(micro, (torch.randn(4, 8).requires_grad_(),), {}, None)
        sizes.append(space.live_bytes)
    one = sizes[1]
    assert sizes == [0, one, 2 * one] and one > 0
    # Two blocks: normalised input, two statistics, the wide one once, silu, gate, sigmoid, cat.
    floats = 2 * (32 + 4 + 4 + 64 + 32 + 32 + 32 + 32 + 64)
    assert one <= 4 * floats
    space.launch_offload(0)
    assert space.live_bytes == 2 * one  # the copy may still be under way
    space.wait_offload(0)
    assert space.live_bytes == one
    space.launch_load(0)
    assert space.live_bytes == 2 * one
    space.wait_load(0)
    stage.backward(0, (torch.ones(4, 8),))
    assert space.live_bytes == one
    stage.backward(1, (torch.ones(4, 8),))
    assert space.live_bytes == 0


def test_parameters_buffers_inputs_and_outputs_stay() -> None:
    stage = stage_of(frozenset({0}))
    inputs = torch.randn(4, 8)
    kept = [*stage.module.parameters(), *stage.module.buffers(), inputs]
    addresses = [each.data_ptr() for each in kept]
    (output,) = stage.forward(0, (inputs.requires_grad_(),), {}, None)
    before = output.clone()
    stage.swap_space().launch_offload(0)
    stage.swap_space().wait_offload(0)
    assert [each.data_ptr() for each in kept] == addresses
    assert torch.equal(output, before)
    with pytest.raises(AssertionError, match="used while it is swapped out"):
        stage.backward(0, (torch.ones_like(output),))


def test_skipping_the_copy_or_the_free_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = torch.randn(4, 8)
    expected = gradients(stage_of(frozenset()), inputs.clone(), swaps=False)

    def launch_without_copy(self: SwapSpace, micro_index: int) -> None:
        for block in self._micro_batches[micro_index].blocks:
            block.host_bytes = torch.zeros_like(block.device_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(SwapSpace, "launch_offload", launch_without_copy)
        actual = gradients(stage_of(frozenset({0})), inputs.clone(), swaps=True)
        assert not all(map(torch.equal, expected, actual))
    with monkeypatch.context() as patch:
        patch.setattr(SwapSpace, "wait_offload", lambda self, micro_index: None)
        with pytest.raises(AssertionError, match="alive though swapped out"):
            gradients(stage_of(frozenset({0})), inputs.clone(), swaps=True)


def test_host_buffers_are_reused() -> None:
    stage = stage_of(frozenset({0}))
    for _ in range(3):
        stage.begin_step(frozenset({0}))
        gradients(stage, torch.randn(4, 8), swaps=True)
    pooled = [host for free in stage.swap_space()._host_pool.values() for host, _ in free]
    assert sum(host.numel() for host in pooled) <= 4 * 2 * 340
