"""The same engine on CUDA and NCCL: streams, native collectives, memory given back on the right stream."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from hp_train.fully_shard import CPUOffloadPolicy, fully_shard
from tests.distributed.fully_shard.checks import assert_nothing_full
from tests.distributed.fully_shard.models import batch, build, full_grads, loss_of, wrap
from tests.distributed.ranks import run_ranks

OPTIONS = {
    "fsdp": {},
    "zero_copy": {"comm_fusion_zero_copy": True},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "ddp": {"mode": "ddp"},
}


def both_engines(rank: int, world_size: int, store: str, name: str) -> None:
    dist.destroy_process_group()
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cuda", (world_size,), mesh_dim_names=("dp_shard",))
    options = OPTIONS[name]
    ours = wrap(build(width=128, hidden=1024).cuda(), fully_shard, mesh=mesh, **options)
    policy = {key: value for key, value in options.items() if key == "offload_policy"}
    engine = replicate if name == "ddp" else torch_fully_shard
    theirs = wrap(build(width=128, hidden=1024).cuda(), engine, mesh=mesh, **policy)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    for step in range(5):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, batch(step, rank).cuda()).backward()
            optimizer.step()
        mine, its = full_grads(ours), full_grads(theirs)
        for key, grad in mine.items():
            assert torch.allclose(grad, its[key], rtol=1e-4, atol=1e-6), (step, key)
    assert_nothing_full(ours)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_cuda_equals_torch(name: str) -> None:
    world_size = min(2, torch.cuda.device_count())
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(world_size, both_engines, str(Path(folder) / "store"), name)
