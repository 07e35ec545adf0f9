"""Activation checkpointing in both kinds and orders, and torch.compile inside units."""

from __future__ import annotations

import re

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from hp_train.fully_shard import fully_shard
from tests.distributed.fully_shard.checks import assert_grads, assert_nothing_full, expect_collectives, rank, world_size
from tests.distributed.fully_shard.models import batch, build, loss_of, reference_grads, wrap
from tests.distributed.fully_shard.registry import Registry

REGISTRY = Registry()
UNITS = 5


class Checkpointed(nn.Module):
    """Runs `inner` under activation checkpointing."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def check_checkpointed(mesh: DeviceMesh, *, reentrant: bool, unit_inside: bool) -> None:
    model = build()
    fully_shard(model.embed, mesh=mesh)
    for index, block in enumerate(model.blocks):
        if unit_inside:
            model.blocks[index] = Checkpointed(fully_shard(block, mesh=mesh), reentrant)
        else:
            model.blocks[index] = fully_shard(Checkpointed(block, reentrant), mesh=mesh)
    fully_shard(model, mesh=mesh)
    expected = {
        re.sub(r"blocks\.(\d+)\.", r"blocks.\1.inner.", name): grad
        for name, grad in reference_grads(build(), world_size()).items()
    }
    for _ in range(2):
        model.zero_grad()
        with expect_collectives(all_gather=2 * UNITS - 1, reduce_scatter=UNITS):
            loss_of(model, batch(0, rank())).backward()
        assert_grads(model, expected)
        assert_nothing_full(model)


@REGISTRY.case
def checkpoint_of_units(mesh: DeviceMesh) -> None:
    check_checkpointed(mesh, reentrant=False, unit_inside=True)


@REGISTRY.case
def units_of_checkpoints(mesh: DeviceMesh) -> None:
    check_checkpointed(mesh, reentrant=False, unit_inside=False)


@REGISTRY.case
def reentrant_checkpoint_of_units(mesh: DeviceMesh) -> None:
    check_checkpointed(mesh, reentrant=True, unit_inside=True)


@REGISTRY.case
def reentrant_units_of_checkpoints(mesh: DeviceMesh) -> None:
    check_checkpointed(mesh, reentrant=True, unit_inside=False)


@REGISTRY.case
def one_checkpoint_around_several_units(mesh: DeviceMesh) -> None:
    model = wrap(build(), fully_shard, mesh=mesh)

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        def blocks(x: torch.Tensor) -> torch.Tensor:
            for block in model.blocks:
                x = block(x)
            return x

        return model.head(model.norm(checkpoint(blocks, model.embed(tokens), use_reentrant=False)))

    model.forward = forward
    for _ in range(2):
        model.zero_grad()
        with expect_collectives(all_gather=2 * UNITS - 1, reduce_scatter=UNITS):
            loss_of(model, batch(0, rank())).backward()
        assert_grads(model, reference_grads(build(), world_size()))
        assert_nothing_full(model)


@REGISTRY.case
def compiled_blocks(mesh: DeviceMesh) -> None:
    model = build(num_blocks=2)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    wrap(model, fully_shard, mesh=mesh)
    for _ in range(2):
        model.zero_grad()
        loss_of(model, batch(0, rank())).backward()
    assert_grads(model, reference_grads(build(num_blocks=2), world_size()))
    assert_nothing_full(model)
