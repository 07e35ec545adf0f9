"""How a unit's gradients become the optimizer's: scaled, summed over the ranks, added to the sharded `.grad`.

Imports torch and this package's buckets and collectives. A reduction is a generator: it starts messages, yields what
to wait for, and goes on from there, so that the scheduler lets computation run between its stages.

All trainable parameters of a bucket take part every time, those without a gradient as zeros: ranks that used
different parameters still exchange the same messages. A flag per parameter is summed along, so that a parameter
without a gradient on any rank ends with `.grad` None, as in a single process; only a rank that lacks a gradient
reads the flags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hp_train.fully_shard.bucket import DIRECT_MIN_BYTES, ShardedBucket
from hp_train.fully_shard.collectives import GroupComm, Pending, ReducePending, Stream, all_reduce_stages, reduce_rows
from hp_train.fully_shard.param import HSDPParam
from hp_train.fully_shard.replicated import ReplicatedBucket

Stages = Iterator[Pending | ReducePending]


@dataclass(frozen=True, slots=True)
class ReduceRule:
    """What a reduction does: dtype (None: the gradients' own), the divisor of the sum, an optional user hook.

    `divisor` defaults to the number of data-parallel ranks. `hook(flat_sum)` sees the undivided sum.
    """

    dtype: torch.dtype | None
    divisor: float
    hook: Callable[[torch.Tensor], Any] | None = None

    def factors(self, dtype: torch.dtype) -> tuple[float, float]:
        """(before, after) the sum, their product being `divisor`.

        fp16 overflows at 65504: half of the division (about its square root, a power of two) comes first. Every
        other dtype is divided once, after the sum, where there is least to divide and nothing is rounded twice.
        """
        if dtype != torch.float16:
            return 1.0, self.divisor
        before = 1.0
        while self.divisor % before == 0 and before * before < self.divisor:
            before *= 2
        return before, self.divisor / before


class PartialSum:
    """Reduce-scattered but not yet all-reduced sums of one bucket, kept over micro-batches (HSDP accumulation)."""

    def __init__(self) -> None:
        self.flat: torch.Tensor | None = None
        self.params: list[HSDPParam] = []

    def check(self, params: Sequence[HSDPParam]) -> None:
        """Raise RuntimeError if other parameters are trained now than those summed so far: nothing would line up."""
        if self.flat is not None and self.params != params:
            changed = sorted(param.fqn for param in {*self.params} ^ {*params})
            raise RuntimeError(
                f"{', '.join(changed)} was frozen or unfrozen while sums of its unit wait for their all-reduce; do so "
                "after the backward that all-reduces"
            )

    def keep(self, flat: torch.Tensor, params: list[HSDPParam]) -> None:
        self.flat, self.params = flat, params

    def add_to(self, flat: torch.Tensor) -> None:
        if self.flat is not None:
            flat.add_(self.flat)
            self.flat = None


def reduce_sharded(
    bucket: ShardedBucket,
    rule: ReduceRule,
    partial: PartialSum,
    reduce_comm: GroupComm,
    replicate: GroupComm | None,
    streams: tuple[Stream, Stream],
    grads: list[torch.Tensor | None],
    *,
    all_reduce: bool,
) -> Stages:
    """Reduce-scatter, all-reduce over `replicate` if there is one, hand out.

    `grads` holds one entry per trainable parameter of `bucket.params`, in that order; it is emptied, so that the
    gradients die with the messages that read them. Without `all_reduce` on a 2-D mesh the sum stays in `partial`
    until the reduction that all-reduces. `streams` are those for the reduce-scatter and the all-reduce.
    """
    params = [param for param in bucket.params if param.requires_grad]
    partial.check(params)
    present = [grad is not None for grad in grads]
    dtype = rule.dtype or bucket_grad_dtype(params[0])
    before, after = rule.factors(dtype)
    plan = _plan_rows(bucket, params, grads, dtype, before, reduce_comm, present)
    grads.clear()
    flat, offsets, pending = (
        plan.flat,
        plan.offsets,
        reduce_rows(reduce_comm, streams[0], plan.matrices, plan.outs, bucket.tag + 1),
    )
    del plan
    yield pending
    partial.add_to(flat)
    if replicate is not None:
        if not all_reduce:
            partial.keep(flat, params)
            return
        yield from all_reduce_stages(replicate, streams[1], [flat], bucket.tag + 2)
    if rule.hook is not None:
        rule.hook(flat)
    _hand_out_shards(bucket, params, flat, offsets, present, after)


@dataclass(slots=True)
class _RowPlan:
    """What is sent (a matrix of rows per message) and where sums arrive; `flat` is all of `outs` in one buffer."""

    matrices: list[list[torch.Tensor]]
    outs: list[torch.Tensor]
    flat: torch.Tensor
    offsets: list[int]


def _plan_rows(
    bucket: ShardedBucket,
    params: Sequence[HSDPParam],
    grads: list[torch.Tensor | None],
    dtype: torch.dtype,
    before: float,
    comm: GroupComm,
    present: Sequence[bool],
) -> _RowPlan:
    """Direct rows straight out of the gradients, all else in one packed row per rank with the flags at its end."""
    device = bucket.device
    direct_params = set(bucket.params[: bucket.num_direct]) if comm.direct and before == 1.0 else set()
    matrices: list[list[torch.Tensor]] = []
    outs: list[torch.Tensor] = []
    offsets, offset = [], 0
    total = sum(param.cut.padded_numel for param in params) + len(params)
    flat = torch.empty(total, dtype=dtype, device=device)
    packed: list[int] = []
    for index, param in enumerate(params):
        offsets.append(offset)
        if param in direct_params and bucket_grad_dtype(param) == dtype:
            matrices.append(_rows_of(param, _present_or_zero(param, grads[index], dtype, device)))
            outs.append(flat[offset : offset + param.cut.numel(comm.rank)])
        else:
            packed.append(index)
        offset += param.cut.padded_numel
    # direct parameters come first in bucket order, so everything packed is one stretch at the end of `flat`
    packed_start = offsets[packed[0]] if packed else offset
    staging = torch.zeros((comm.size, total - packed_start), dtype=dtype, device=device)
    for index in packed:
        _pack(params[index], grads[index], staging, offsets[index] - packed_start)
        grads[index] = None
    _write_flags(staging[:, offset - packed_start :], present)
    if before != 1.0:
        staging.div_(before)
    matrices.append(list(staging.unbind(0)))
    outs.append(flat[packed_start:])
    return _RowPlan(matrices, outs, flat, offsets)


def bucket_grad_dtype(param: HSDPParam) -> torch.dtype:
    """Dtype in which autograd leaves the gradient: that of the full parameter."""
    assert param.unsharded is not None
    return param.unsharded.dtype


def _present_or_zero(
    param: HSDPParam, grad: torch.Tensor | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.zeros(param.cut.size, dtype=dtype, device=device) if grad is None else grad


def _rows_of(param: HSDPParam, grad: torch.Tensor) -> list[torch.Tensor]:
    """The part of a dim-0 cut gradient that belongs to each rank; short or empty for the last ranks if uneven."""
    flat, width = grad.reshape(-1), param.cut.size[1:].numel()
    return [flat[param.cut.start(rank) * width :][: length * width] for rank, length in enumerate(param.cut.lengths)]


def _pack(param: HSDPParam, grad: torch.Tensor | None, staging: torch.Tensor, offset: int) -> None:
    if grad is None:
        return  # staging holds zeros
    cut = param.cut
    assert cut.dim is not None
    if cut.dim == 0 and len(set(cut.lengths)) == 1:
        staging[:, offset : offset + cut.padded_numel].copy_(grad.reshape(len(cut.lengths), -1))
        return
    for rank, length in enumerate(cut.lengths):
        piece = grad.narrow(cut.dim, min(cut.start(rank), grad.size(cut.dim)), length)
        staging[rank, offset : offset + piece.numel()].view(piece.shape).copy_(piece)


def _hand_out_shards(
    bucket: ShardedBucket,
    params: Sequence[HSDPParam],
    flat: torch.Tensor,
    offsets: Sequence[int],
    present: Sequence[bool],
    after: float,
) -> None:
    used = _used_anywhere(flat[flat.numel() - len(params) :], present)
    if after != 1.0:
        flat.div_(after)
    flat = flat.to(params[0].dtype).to(bucket.storage_device)
    for param, offset, is_used in zip(params, offsets, used, strict=True):
        if is_used:
            param.add_sharded_grad(flat[offset : offset + param.cut.numel(param.rank)].view(param.local_size))


def _write_flags(flags: torch.Tensor, present: Sequence[bool]) -> None:
    """flags [rows, parameters] = 1 where a gradient is present; by fills alone, which never wait for a GPU."""
    flags.fill_(1)
    for index, is_present in enumerate(present):
        if not is_present:
            flags[:, index].zero_()


def _used_anywhere(flags: torch.Tensor, present: Sequence[bool]) -> list[bool]:
    """Which parameters had a gradient on some rank. Reading the flags would stall a GPU, so only if one lacks here."""
    if all(present):
        return list(present)
    return [flag > 0 for flag in flags.tolist()]


def reduce_replicated(
    bucket: ReplicatedBucket,
    rule: ReduceRule,
    comms: Sequence[GroupComm],
    stream: Stream,
    grads: list[torch.Tensor | None],
) -> Stages:
    """All-reduce over each group in turn, large gradients where they lie, small ones packed together, one exchange.

    `grads` as in `reduce_sharded`.
    """
    params = [param for param in bucket.params if param.requires_grad]
    present = [grad is not None for grad in grads]
    dtype = rule.dtype or bucket_grad_dtype(params[0])
    before, after = rule.factors(dtype)
    in_place = all(comm.direct for comm in comms)
    sums: list[torch.Tensor] = []
    packed: list[int] = []
    for index, param in enumerate(params):
        large = param.cut.size.numel() * dtype.itemsize >= DIRECT_MIN_BYTES
        if in_place and large and bucket_grad_dtype(param) == dtype:
            sums.append(_present_or_zero(param, grads[index], dtype, bucket.device))
        else:
            sums.append(torch.empty(0))
            packed.append(index)
    numel = sum(params[index].cut.size.numel() for index in packed) + len(params)
    flat = torch.zeros(numel, dtype=dtype, device=bucket.device)
    offset = 0
    for index in packed:
        size, grad = params[index].cut.size, grads[index]
        sums[index] = flat[offset : offset + size.numel()].view(size)
        if grad is not None:
            sums[index].copy_(grad)
        offset += size.numel()
    _write_flags(flat[None, offset:], present)
    grads.clear()
    large_sums = [sums[index].view(-1) for index in range(len(params)) if index not in set(packed)]
    everything = [*large_sums, flat]
    if before != 1.0:
        torch._foreach_div_(everything, before)
    last = len(comms) - 1
    for position, comm in enumerate(comms):
        # a hook is promised the undivided sum; without one the division rides along with the last all-reduce
        divisor = after if position == last and rule.hook is None else 1.0
        yield from all_reduce_stages(comm, stream, everything, bucket.tag + 2 + position, divisor)
    if rule.hook is not None:
        for tensor in everything:
            rule.hook(tensor)
            tensor.div_(after)
    used = _used_anywhere(flat[offset:], present)
    for param, total, is_used in zip(params, sums, used, strict=True):
        if is_used:
            param.add_sharded_grad(total.to(param.dtype).to(bucket.storage_device))
