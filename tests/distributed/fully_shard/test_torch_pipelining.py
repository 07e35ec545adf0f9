"""Under torch's own pipeline runtime: equal gradients, one reduction a step, or a refusal."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble

from hp_train.fully_shard import count_collectives, fully_shard
from tests.distributed.fully_shard.checks import assert_grads
from tests.distributed.fully_shard.models import Block
from tests.distributed.ranks import run_ranks

WIDTH, HIDDEN, MICRO_BATCHES = 8, 12, 4


def stage_module(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(Block(WIDTH, HIDDEN), Block(WIDTH, HIDDEN))


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).pow(2).sum()


def inputs_of(dp_rank: int) -> torch.Tensor:
    return torch.randn(2 * MICRO_BATCHES, WIDTH, generator=torch.Generator().manual_seed(dp_rank))


def pipeline(rank: int, world_size: int, schedule_name: str, reshard: bool) -> str:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    index = grid["pp"].get_local_rank()
    module = stage_module(index)
    for block in module:
        fully_shard(block, mesh=grid["dp_shard"], reshard_after_forward=reshard)
    fully_shard(module, mesh=grid["dp_shard"], reshard_after_forward=reshard)
    x = inputs_of(grid["dp_shard"].get_local_rank())
    stage = PipelineStage(module, index, 2, torch.device("cpu"), group=grid["pp"].get_group())
    if schedule_name == "1f1b":
        schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_fn, scale_grads=False)
    else:
        schedule = ScheduleInterleavedZeroBubble([stage], MICRO_BATCHES, loss_fn=loss_fn, scale_grads=False)
    try:
        with count_collectives() as counted:
            schedule.step(x) if index == 0 else schedule.step(target=torch.zeros_like(x))
    except RuntimeError as error:
        if "hold=True" in str(error):
            return "refused"
        raise
    assert counted["reduce_scatter"] == 2, counted
    reference = [stage_module(0), stage_module(1)]
    for dp_rank in range(2):
        (loss_fn(reference[1](reference[0](inputs_of(dp_rank))), 0) / 2).backward()
    assert_grads(module, reference[index], tolerance=1e-5)
    return "equal"


@pytest.mark.parametrize("reshard", [True, False])
def test_whole_backward(reshard: bool) -> None:
    assert run_ranks(4, pipeline, "1f1b", reshard) == ["equal"] * 4


def test_split_backward_without_resharding() -> None:
    assert run_ranks(4, pipeline, "zero_bubble", False) == ["equal"] * 4


def split_and_resharded(rank: int, world_size: int) -> str:
    """The calls torch's runtime makes around a split backward of a stage, without the peers."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    module = stage_module(0)
    fully_shard(module, mesh=mesh, reshard_after_forward=True)
    x = inputs_of(rank).requires_grad_()
    output = module(x)
    module.set_is_last_backward(False)
    module.set_reshard_after_backward(False)
    module.set_requires_gradient_sync(False)
    with pytest.raises(RuntimeError, match=r"unshard\(recurse=True, hold=True\)"):
        torch.autograd.grad(output.sum(), [x], retain_graph=True)
    return "refused"


def test_split_backward_of_a_resharded_stage_is_refused() -> None:
    assert run_ranks(2, split_and_resharded) == ["refused"] * 2
