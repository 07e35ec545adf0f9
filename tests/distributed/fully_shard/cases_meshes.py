"""Two mesh axes: replicate x shard, and data parallel over tensor parallel."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hp_train.fully_shard import MixedPrecisionPolicy, fully_shard
from tests.distributed.fully_shard.checks import assert_grads, assert_nothing_full, expect_collectives, rank, world_size
from tests.distributed.fully_shard.models import batch, build, full, full_grads, loss_of, wrap
from tests.distributed.fully_shard.registry import Registry

REGISTRY = Registry()
UNITS = 5


@REGISTRY.case
def hybrid_equals_torch_bit_for_bit(mesh: DeviceMesh) -> None:
    results = []
    for engine in (fully_shard, torch_fully_shard):
        model = wrap(build(), engine, mesh=mesh)
        loss_of(model, batch(0, rank())).backward()
        results.append(full_grads(model))
        assert model.embed.weight.placements == (Replicate(), Shard(0))
    # two summands at each of the two stages: no freedom in their order
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@REGISTRY.case
def all_reduce_once_per_optimizer_step(mesh: DeviceMesh) -> None:
    model, reference = wrap(build(), fully_shard, mesh=mesh), build()
    with expect_collectives(reduce_scatter=3 * UNITS, all_reduce=UNITS):
        for step in range(3):
            model.set_requires_all_reduce(step == 2)
            loss_of(model, batch(step, rank())).backward()
            assert (model.embed.weight.grad is not None) == (step == 2)
    for step in range(3):
        for each in range(world_size()):
            (loss_of(reference, batch(step, each)) / world_size()).backward()
    assert_grads(model, reference)


@REGISTRY.case
def another_dim_under_hybrid(mesh: DeviceMesh) -> None:
    model, reference = build(), build()
    wrap(model, fully_shard, mesh=mesh, shard_placement_fn=lambda param: Shard(-1))
    assert model.head.weight.placements == (Replicate(), Shard(1))
    for step in range(2):
        model.set_requires_all_reduce(step == 1)
        loss_of(model, batch(step, rank())).backward()
        for each in range(world_size()):
            (loss_of(reference, batch(step, each)) / world_size()).backward()
    assert_grads(model, reference)
    assert_nothing_full(model)


@REGISTRY.case
def freezing_while_sums_wait_is_refused(mesh: DeviceMesh) -> None:
    model = wrap(build(num_blocks=1), fully_shard, mesh=mesh)
    model.set_requires_all_reduce(False)
    loss_of(model, batch(0, rank())).backward()
    model.blocks[0].up.weight.requires_grad_(False)
    model.set_requires_all_reduce(True)
    with pytest.raises(RuntimeError, match=r"blocks\.0\.up\.weight was frozen or unfrozen while sums"):
        loss_of(model, batch(1, rank())).backward()
    model.reset_iter_state()
    loss_of(model, batch(0, rank())).backward()
    assert model.blocks[0].down.weight.grad is not None
    assert_nothing_full(model)


@REGISTRY.case
def replicated_parameters_over_both_axes(mesh: DeviceMesh) -> None:
    model = build()
    fully_shard(model, mesh=mesh, replicate_params={model.norm.weight, model.head.weight})
    assert model.head.weight.placements == (Replicate(), Replicate())
    for step in range(2):
        model.set_requires_all_reduce(step == 1)
        loss_of(model, batch(step, rank())).backward()
    reference = build()
    for step in range(2):
        for each in range(world_size()):
            (loss_of(reference, batch(step, each)) / world_size()).backward()
    assert_grads(model, reference)
    assert_nothing_full(model)


@REGISTRY.case
def reduction_in_another_dtype(mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    results = []
    for engine in (fully_shard, torch_fully_shard):
        model = wrap(build(), engine, mesh=mesh, mp_policy=policy)
        loss_of(model, batch(0, rank())).backward()
        results.append(full_grads(model))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@REGISTRY.case
def replicas_start_and_stay_equal(mesh: DeviceMesh) -> None:
    model = wrap(build(), fully_shard, mesh=mesh, mode="hsdp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        loss_of(model, batch(step, rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    peers = mesh["dp_replicate"].get_group()
    for param in model.parameters():
        local = param.to_local().contiguous()
        copies = [torch.empty_like(local) for _ in range(peers.size())]
        torch.distributed.all_gather(copies, local, group=peers)
        assert all(torch.equal(copy, local) for copy in copies)


@REGISTRY.case
def modes_that_do_not_fit_are_refused(mesh: DeviceMesh) -> None:
    one_axis = mesh["dp_shard"]
    for axes, mode, message in ((mesh, "ddp", "2 axes"), (one_axis, "hsdp", "1 axes"), (one_axis, "zero", "'ddp'")):
        try:
            fully_shard(nn.Linear(2, 2), mesh=axes, mode=mode)
        except ValueError as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"mode {mode} was accepted")


class Mlp(nn.Module):
    """Column-wise then row-wise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


@REGISTRY.case
def over_tensor_parallel(mesh: DeviceMesh) -> None:
    grid = init_device_mesh("cpu", (2, world_size() // 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    inputs = [torch.randn(4, 8, generator=torch.Generator().manual_seed(index)) for index in range(2)]
    reference = Mlp()
    for x in inputs:
        (reference(x).pow(2).sum() / 2).backward()
    placements = []
    for engine in (fully_shard, torch_fully_shard):
        model = parallelize_module(Mlp(), grid["tp"], plan)
        engine(model, mesh=grid["dp"])
        placements.append({name: param.placements for name, param in model.named_parameters()})
        if engine is torch_fully_shard:
            break
        for step in range(2):
            model.set_requires_gradient_sync(step == 1)
            model(inputs[grid["dp"].get_local_rank()]).pow(2).sum().backward()
        expected = {name: 2 * param.grad for name, param in reference.named_parameters()}
        assert_grads(model, expected)
        assert_nothing_full(model)
        for name, param in Mlp().named_parameters():
            assert torch.equal(full(model.get_parameter(name)), param)
    assert placements[0] == placements[1]


@REGISTRY.case
def hybrid_over_tensor_parallel(mesh: DeviceMesh) -> None:
    reference = Mlp()
    inputs = [torch.randn(4, 8, generator=torch.Generator().manual_seed(index)) for index in range(2)]
    for x in inputs:
        reference(x).pow(2).sum().backward()
    expected = {name: param.grad for name, param in reference.named_parameters()}
    for shape, dim in (((2, 1, 2), 0), ((1, 2, 2), -1)):
        grid = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
        model = parallelize_module(Mlp(), grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=grid["dp_replicate", "dp_shard"], shard_placement_fn=lambda param, dim=dim: Shard(dim))
        for step in range(2):
            model.set_requires_all_reduce(step == 1)
            model(inputs[rank() // 2]).pow(2).sum().backward()
        assert_grads(model, expected)
        assert_nothing_full(model)
