"""Data parallelism of one model part: which modules form a unit, and which engine shards them.

Every transformer block is a unit; embedding, final norm and output matrix form the root's, so that tied matrices share
one. `fsdp.implementation` picks the engine: one entry of `ENGINES` each, the same call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hp_train import fully_shard as hsdp

ShardFunction = Callable[[nn.Module, DeviceMesh, bool, MixedPrecisionPolicy], None]


def shard_model(
    model: nn.Module, mesh: DeviceMesh, *, implementation: str, reshard_after_forward: bool, precision: str
) -> None:
    """Shard `model` in place over `mesh`: 1-D named dp_shard or dp_replicate, or 2-D (dp_replicate, dp_shard).

    Every entry of `model.blocks` becomes a unit. With `precision` bf16 parameters are gathered and computed in bf16 and
    gradients reduced in fp32; the sharded parameters stay fp32.
    """
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard = ENGINES[implementation]
    for block in model.blocks.values():
        shard(block, mesh, reshard_after_forward, policy)
    shard(model, mesh, False, policy)  # its parameters are needed at both ends of forward: resharding gains nothing


def _shard_with_torch(
    module: nn.Module, mesh: DeviceMesh, reshard_after_forward: bool, policy: MixedPrecisionPolicy
) -> None:
    if mesh.mesh_dim_names == ("dp_replicate",):
        from torch.distributed._composable.replicate_with_fsdp import replicate  # no public home up to torch 2.14

        replicate(module, mesh=mesh, mp_policy=policy)
    else:
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)


def _shard_with_hsdp(
    module: nn.Module, mesh: DeviceMesh, reshard_after_forward: bool, policy: MixedPrecisionPolicy
) -> None:
    mode = "ddp" if mesh.mesh_dim_names == ("dp_replicate",) else None
    hsdp.fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy, mode=mode)


ENGINES: dict[str, ShardFunction] = {"hsdp": _shard_with_hsdp, "torch": _shard_with_torch}
