"""The HSDP engine: sharded, replicated and hybrid data parallelism behind torch's `fully_shard` interface.

    from hp_train.fully_shard import fully_shard
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

Imports torch and nothing of the trainer. Layers, upper ones import lower ones: api; module and torch_pipelining;
scheduler; settings, split_backward and context; state; reduction; bucket and replicated; param; placement;
collectives. `hooks` stands apart: marks in the autograd graph.
"""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, UnshardHandle

from hp_train.fully_shard.api import fully_shard, register_fsdp_forward_method, share_comm_ctx
from hp_train.fully_shard.collectives import count_collectives
from hp_train.fully_shard.module import HSDPModule
from hp_train.fully_shard.scheduler import HSDPScheduler, HSDPSchedulerState

__all__ = [
    "CPUOffloadPolicy",
    "HSDPModule",
    "HSDPScheduler",
    "HSDPSchedulerState",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "count_collectives",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
