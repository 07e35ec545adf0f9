"""The parameters of one unit and the form they are in: sharded, arriving, full, or kept in part after forward.

Imports torch and this package's buckets, param, placement, reduction. `HSDPState` knows no hook and no order of
events: the scheduler tells it when to unshard, reshard, fold and reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from hp_train.fully_shard.bucket import ShardedBucket
from hp_train.fully_shard.collectives import GroupComm, Pending, ReducePending, Stream
from hp_train.fully_shard.param import HSDPParam
from hp_train.fully_shard.placement import DataParallelMesh
from hp_train.fully_shard.reduction import PartialSum, ReduceRule, Stages, reduce_replicated, reduce_sharded
from hp_train.fully_shard.replicated import ReplicatedBucket

_TAGS_PER_BUCKET = 5  # gather, reduce-scatter, and up to three all-reduces


class Form(Enum):
    """Which form of the sharded part exists."""

    SHARDED = "sharded"
    GATHERING = "gathering"  # the full buffer is being filled
    FULL = "full"
    PART = "part"  # resharded to a smaller group after forward


@dataclass(frozen=True, slots=True)
class BucketOptions:
    """How parameters are laid out: see `fully_shard` for the two comm_fusion keywords."""

    comm_fusion: bool
    zero_copy: bool | None
    offload: OffloadPolicy

    def storage_device(self, device: torch.device) -> torch.device:
        return torch.device("cpu") if isinstance(self.offload, CPUOffloadPolicy) else device

    def pin_memory(self, device: torch.device) -> bool:
        # pinning serves copies to an accelerator; a build without one cannot pin and need not
        return isinstance(self.offload, CPUOffloadPolicy) and self.offload.pin_memory and device.type != "cpu"


class HSDPState:
    """A unit's parameters, in buckets by dtype: sharded ones and replicated ones.

    Attributes: `params` in the order of registration, `sharded_form`, `replicate_full` (the replicated part's full
    form is in use), `fqn` of the unit (set by the root context).
    """

    def __init__(
        self,
        params: Sequence[HSDPParam],
        dp_mesh: DataParallelMesh,
        mp_policy: MixedPrecisionPolicy,
        options: BucketOptions,
        first_tag: int,
    ) -> None:
        self.params = list(params)
        self.dp_mesh = dp_mesh
        self.mp_policy = mp_policy
        self.options = options
        self.fqn = ""
        self.reduce_comm: GroupComm | None = dp_mesh.shard
        self.gradient_divide_factor: float | None = None
        self.all_reduce_hook: Callable[[torch.Tensor], Any] | None = None
        self.sharded_buckets: list[ShardedBucket] = []
        self.replicated_buckets: list[ReplicatedBucket] = []
        self._build_buckets(first_tag)
        self._partials = {bucket: PartialSum() for bucket in self.sharded_buckets}
        self.sharded_form = Form.SHARDED
        self.replicate_full = False
        self._kept_parts: list[torch.Tensor] = []
        self._part_comm: GroupComm | None = None
        self._gathered_versions: list[int] = []

    def _build_buckets(self, first_tag: int) -> None:
        device = self.dp_mesh.device
        home = {
            "storage_device": self.options.storage_device(device),
            "pin_memory": self.options.pin_memory(device),
        }
        tag = first_tag
        for group in self._groups(param for param in self.params if param.cut.dim is not None):
            assert self.dp_mesh.shard is not None
            self.sharded_buckets.append(
                ShardedBucket(group, self.dp_mesh.shard, device, zero_copy=self.options.zero_copy, tag=tag, **home)
            )
            tag += _TAGS_PER_BUCKET
        for group in self._groups(param for param in self.params if param.cut.dim is None):
            self.replicated_buckets.append(ReplicatedBucket(group, device, tag=tag, **home))
            tag += _TAGS_PER_BUCKET

    def _groups(self, params: Iterable[HSDPParam]) -> list[list[HSDPParam]]:
        """One bucket per dtype, or per parameter without comm_fusion."""
        groups: dict[object, list[HSDPParam]] = {}
        for param in params:
            groups.setdefault(param.dtype if self.options.comm_fusion else param, []).append(param)
        return list(groups.values())

    @property
    def num_tags(self) -> int:
        return _TAGS_PER_BUCKET * (len(self.sharded_buckets) + len(self.replicated_buckets))

    # -- checks before the first use ------------------------------------------------------------------------------

    def check_materialised(self) -> None:
        """Raise RuntimeError if parameters are still on meta or, with CPU offload, not on the CPU."""
        on_meta = [param.fqn for param in self.params if param.local.is_meta]
        if on_meta:
            raise RuntimeError(
                f"parameters still on the meta device: {', '.join(on_meta)}; "
                "call to_empty(device=...) on the sharded model and initialise it before the first forward"
            )

    def rebind(self) -> None:
        """Bring parameters whose tensors were replaced back into their buckets."""
        for bucket in (*self.sharded_buckets, *self.replicated_buckets):
            bucket.rebind()

    # -- unshard --------------------------------------------------------------------------------------------------

    @property
    def is_stale(self) -> bool:
        """The full form exists, and the sharded one was written since (an optimizer step, a load)."""
        return self.sharded_form is not Form.SHARDED and self._versions() != self._gathered_versions

    def _versions(self) -> list[int]:
        # an operation on a DTensor counts on the DTensor, one on its local tensor on that
        return [param.sharded._version + param.local._version for param in self.params]

    @property
    def is_sharded(self) -> bool:
        return self.sharded_form is Form.SHARDED and not self.replicate_full

    @property
    def is_full(self) -> bool:
        sharded_full = self.sharded_form is Form.FULL or not self.sharded_buckets
        return sharded_full and (self.replicate_full or not self.replicated_buckets)

    def start_unshard(self, stream: Stream) -> None:
        """Start gathering the sharded part unless it is full or on its way."""
        if self.sharded_form is Form.SHARDED:
            for bucket in self.sharded_buckets:
                bucket.start_gather(self._compute_dtype(bucket), stream)
            self._gathered_versions = self._versions()
        elif self.sharded_form is Form.PART:
            assert self._part_comm is not None
            for bucket, kept in zip(self.sharded_buckets, self._kept_parts, strict=True):
                bucket.start_gather_parts(self._part_comm, kept, stream)
        else:
            return
        self.sharded_form = Form.GATHERING

    def finish_unshard(self) -> None:
        """Wait for the gather and put the full parameters on their modules, both parts."""
        if self.sharded_form is Form.GATHERING:
            for bucket in self.sharded_buckets:
                bucket.finish_gather()
            self._kept_parts, self._part_comm = [], None
            self.sharded_form = Form.FULL
        for bucket in self.sharded_buckets:
            for param in bucket.params:
                param.register_unsharded()
        self.unshard_replicate()

    def unshard_replicate(self) -> None:
        """Put the full form of the replicated part alone on its modules."""
        for bucket in self.replicated_buckets:
            if not self.replicate_full:
                bucket.make_full(self.mp_policy.param_dtype)
            for param in bucket.params:
                param.register_unsharded()
        self.replicate_full = True

    def _compute_dtype(self, bucket: ShardedBucket) -> torch.dtype:
        dtype = bucket.shard_buffer.dtype
        return self.mp_policy.param_dtype or dtype if dtype.is_floating_point else dtype

    # -- reshard --------------------------------------------------------------------------------------------------

    def reshard(self) -> None:
        """Free the full forms and put the sharded ones on the modules. Gradients not reduced yet are kept."""
        self.fold_grads()
        if self.sharded_form is Form.GATHERING:  # asked for and never used: the memory must not be freed under it
            for bucket in self.sharded_buckets:
                bucket.finish_gather()
        self.register_sharded(self.sharded_buckets)
        for bucket in self.sharded_buckets:
            bucket.free_full()
        self._kept_parts, self._part_comm = [], None
        self.sharded_form = Form.SHARDED
        self.shard_replicate()

    def shard_replicate(self) -> None:
        """Put the optimizer's form of the replicated part alone back on its modules."""
        self.fold_grads(self.replicated_buckets)
        self.register_sharded(self.replicated_buckets)
        for bucket in self.replicated_buckets:
            bucket.free_full()
        self.replicate_full = False

    def reshard_to(self, part: GroupComm) -> None:
        """Keep 1/`part.size` of the full parameters so that the next gather stays within `part`."""
        if self.sharded_form is not Form.FULL:
            return
        self.fold_grads()
        self.register_sharded(self.sharded_buckets)
        self._kept_parts = [bucket.keep_part(part) for bucket in self.sharded_buckets]
        self._part_comm = part
        for bucket in self.sharded_buckets:
            bucket.free_full()
        self.sharded_form = Form.PART
        self.shard_replicate()

    def register_sharded(self, buckets: Iterable[ShardedBucket | ReplicatedBucket] | None = None) -> None:
        """Put the sharded forms on the modules; the full ones, if they exist, stay in memory."""
        for bucket in buckets if buckets is not None else (*self.sharded_buckets, *self.replicated_buckets):
            for param in bucket.params:
                param.register(param.sharded)

    # -- gradients ------------------------------------------------------------------------------------------------

    @property
    def trainable(self) -> list[HSDPParam]:
        return [param for param in self.params if param.requires_grad]

    def has_grads(self) -> bool:
        """Whether a gradient waits to be reduced; one of a parameter that was frozen since stays where it is."""
        return any(param.has_grad() for param in self.trainable)

    def grad_marks(self) -> list[tuple[int, int] | None]:
        """A mark per trainable parameter that differs after any accumulation into its unreduced gradient."""
        return [param.grad_mark() for param in self.trainable]

    def fold_grads(self, buckets: Iterable[ShardedBucket | ReplicatedBucket] | None = None) -> None:
        """Bring what autograd left in `.grad` into the reduce dtype."""
        for bucket in buckets if buckets is not None else (*self.sharded_buckets, *self.replicated_buckets):
            for param in bucket.params:
                param.fold_grad(self.reduce_dtype_of(param))

    def drop_grads(self) -> None:
        """Forget every gradient that was not handed to the optimizer yet."""
        for param in self.params:
            param.drop_grad()
        for partial in self._partials.values():
            partial.flat = None

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Clear the optimizer's gradients, in place unless `set_to_none`, and drop those not reduced yet."""
        self.drop_grads()
        for param in self.params:
            if set_to_none or param.sharded.grad is None:
                param.sharded.grad = None
            else:
                param.sharded.grad.zero_()

    def take_reductions(self, streams: tuple[Stream, Stream], *, all_reduce: bool) -> list[Stages]:
        """Take the gradients; one reduction, not started yet, per bucket with trainable parameters.

        Without `all_reduce` (2-D mesh, or mode ddp) replicated parameters keep their gradients for the next time.
        """
        reductions = []
        for bucket in self.sharded_buckets:
            assert self.reduce_comm is not None
            if grads := self._take(bucket):
                reductions.append(
                    reduce_sharded(
                        bucket,
                        self._rule(bucket),
                        self._partials[bucket],
                        self.reduce_comm,
                        self.dp_mesh.replicate,
                        streams,
                        grads,
                        all_reduce=all_reduce,
                    )
                )
        if self.dp_mesh.replicate is not None and not all_reduce:
            return reductions
        for replicated in self.replicated_buckets:
            if grads := self._take(replicated):
                rule = self._rule(replicated)
                reductions.append(reduce_replicated(replicated, rule, self.dp_mesh.comms, streams[1], grads))
        return reductions

    def _take(self, bucket: ShardedBucket | ReplicatedBucket) -> list[torch.Tensor | None]:
        return [param.take_grad(self.reduce_dtype_of(param)) for param in bucket.params if param.requires_grad]

    def reduce_dtype_of(self, param: HSDPParam) -> torch.dtype | None:
        """The policy's, unless the parameter is complex: a cast would drop the imaginary part."""
        return None if param.dtype.is_complex else self.mp_policy.reduce_dtype

    def _rule(self, bucket: ShardedBucket | ReplicatedBucket) -> ReduceRule:
        divisor = self.gradient_divide_factor
        return ReduceRule(
            self.reduce_dtype_of(bucket.params[0]),
            float(self.dp_mesh.size) if divisor is None else divisor,
            self.all_reduce_hook,
        )


class Reduction:
    """A reduction under way, at one of its stages."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._pending: Pending | ReducePending | None = None
        self._step()

    @torch.no_grad()
    def _step(self) -> None:
        self._pending = next(self._stages, None)

    @property
    def done(self) -> bool:
        return self._pending is None

    @torch.no_grad()
    def advance(self) -> None:
        """Wait for the stage under way and start the next one."""
        if self._pending is not None:
            self._pending.wait()
            self._step()

    def finish(self) -> None:
        while not self.done:
            self.advance()

    def abandon(self) -> None:
        """Let the messages under way end, then forget the result (after an exception elsewhere)."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        self._stages.close()  # type: ignore[attr-defined]


def shard_groups_of_size(dp_mesh: DataParallelMesh, size: int) -> GroupComm:
    """This rank's group of `size` neighbouring shard ranks, for reshard_after_forward=`size`. Collective.

    Raises ValueError unless `size` divides the number of shard ranks.
    """
    assert dp_mesh.shard is not None
    if size < 1 or dp_mesh.shard.size % size != 0:
        divisors = [n for n in range(1, dp_mesh.shard.size + 1) if dp_mesh.shard.size % n == 0]
        raise ValueError(
            f"reshard_after_forward={size} does not divide the {dp_mesh.shard.size} shard ranks; "
            f"use True, False or one of {divisors}"
        )
    ranks = dist.get_process_group_ranks(dp_mesh.shard.group)
    start = dp_mesh.shard.rank // size * size
    group = dist.new_group(ranks[start : start + size], use_local_synchronization=True)
    return GroupComm(group, dp_mesh.device)
