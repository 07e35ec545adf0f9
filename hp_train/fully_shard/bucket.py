"""Flat buffers of a unit's sharded parameters: one exchange gathers them, one exchange reduces their gradients.

Imports torch and this package's collectives, placement and param.

    shard buffer   | w0 piece | w1 piece | norm piece | ... |        lives always, original dtype
    full buffer    | w0 rank0 rank1 .. | w1 rank0 rank1 .. | norm |  exists while unsharded, compute dtype

The sharded parameters are views of the shard buffer and the full ones views of the full buffer, so gathering packs
nothing. Zero-copy goes further for a *direct* parameter: rows of dim 0 are contiguous in the full parameter, hence
each rank's rows can be received in their final place and the rows of its gradient be sent from where autograd left
them. What is not direct (small parameters, cuts along another dim) travels in one packed row per rank and is copied
out of it.

`zero_copy=None` chooses per parameter: direct on gloo for pieces of at least `DIRECT_MIN_BYTES`, where a message of
its own costs less than the copy (measured by scripts/bench_fully_shard.py; below that the per-message cost of gloo,
about 50 us, is the larger one); packed on every other backend, where one launch for all is the safe choice.
`zero_copy=True` makes every parameter cut along dim 0 direct (a coalesced launch on NCCL) and `False` none. The
gradient of a direct parameter is packed after all if it has to be cast to the reduce dtype, and on backends other
than gloo, whose reduce-scatter wants one buffer.

The full buffer is freed by resizing its storage to nothing: autograd may hold views of it, and they come alive again
with the next gather. Every full parameter has its own version counter, so refilling the buffer is not an in-place
change in autograd's eyes; and as the memory belongs to the compute stream, it is safe to free after computation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from hp_train.fully_shard.collectives import GroupComm, Pending, Stream, gather_rows
from hp_train.fully_shard.param import HSDPParam

DIRECT_MIN_BYTES = 64 * 1024
_FULL_ALIGNMENT = 128  # elements; keeps every full parameter aligned for vectorised kernels in any dtype


@dataclass(slots=True, eq=False)
class Slot:
    """A parameter's place: element offsets in the shard and the full buffer. `rows[r]` is rank r's part of full."""

    param: HSDPParam
    direct: bool
    shard_offset: int
    full_offset: int
    rows: list[torch.Tensor]
    full: torch.Tensor

    @property
    def numel(self) -> int:
        return self.param.cut.padded_numel


class ShardedBucket:
    """The sharded parameters of one unit and one dtype. `params` is in buffer order: direct ones first."""

    def __init__(
        self,
        params: Sequence[HSDPParam],
        comm: GroupComm,
        device: torch.device,
        *,
        zero_copy: bool | None,
        storage_device: torch.device,
        pin_memory: bool,
        tag: int,
    ) -> None:
        self.comm = comm
        self.device = device
        self.tag = tag
        self.storage_device = storage_device
        self.pin_memory = pin_memory
        self._direct = {param: _is_direct(param, comm, zero_copy) for param in params}
        self.params = sorted(params, key=lambda param: (not self._direct[param], param.cut.dim != 0))
        self.num_direct = sum(self._direct.values())
        self.shard_buffer: torch.Tensor = cast(torch.Tensor, None)
        self.slots: list[Slot] = []
        self._full_buffer: torch.Tensor | None = None
        self._packed_blocks: list[torch.Tensor] = []  # [num ranks, piece] in the full buffer, of packed dim-0 cuts
        self._staging: torch.Tensor | None = None
        self._pending: Pending | None = None
        self._take_initial_values()

    @property
    def shard_numel(self) -> int:
        return sum(param.cut.padded_numel for param in self.params)

    # -- sharded form ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _take_initial_values(self) -> None:
        """Copy this rank's pieces out of the whole parameters; afterwards those can be freed."""
        pieces = []
        for param in self.params:
            initial, length = cast(torch.Tensor, param.initial), param.cut.lengths[param.rank]
            start = min(param.cut.start(param.rank), initial.size(cast(int, param.cut.dim)))
            pieces.append(initial.narrow(cast(int, param.cut.dim), start, length))
            param.initial = None
        self._bind(pieces)

    @torch.no_grad()
    def rebind(self) -> None:
        """After `_apply`, `assign=True` or `to_empty` put new tensors under the parameters: bring them back home."""
        for param in self.params:
            param.adopt_registered()
        if all(self._is_home(param, offset) for param, offset in self._offsets()):
            return
        if len({param.local.is_meta for param in self.params}) == 2:
            return  # in the middle of a load with assign=True; what follows it or the first forward calls again
        self._bind([param.local for param in self.params])
        self._full_buffer, self.slots, self._packed_blocks = None, [], []
        for param in self.params:
            param.unsharded = None

    def _is_home(self, param: HSDPParam, offset: int) -> bool:
        local, buffer = param.local, self.shard_buffer
        if local.device != buffer.device or local.dtype != buffer.dtype:
            return False
        if local.is_meta:
            return True
        same = local.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        return same and (local.numel() == 0 or local.storage_offset() == offset)

    def _bind(self, pieces: Sequence[torch.Tensor]) -> None:
        meta = pieces[0].is_meta
        device = torch.device("meta") if meta else self.storage_device
        pin = self.pin_memory and not meta
        with torch.inference_mode(False):
            self.shard_buffer = torch.zeros(self.shard_numel, dtype=pieces[0].dtype, device=device, pin_memory=pin)
        for (param, offset), piece in zip(self._offsets(), pieces, strict=True):
            local = self.shard_buffer[offset : offset + piece.numel()].view(param.local_size)
            if not meta:
                local.copy_(piece)
            param.bind_local(local)

    def _offsets(self) -> Iterator[tuple[HSDPParam, int]]:
        offset = 0
        for param in self.params:
            yield param, offset
            offset += param.cut.padded_numel

    # -- full form ------------------------------------------------------------------------------------------------

    def _build_full(self, dtype: torch.dtype) -> None:
        """Lay out the full buffer and build the full parameters on it; done once, at the first gather."""
        numel = sum(_aligned(param.cut.padded_numel * self.comm.size) for param in self.params)
        numel = -(-numel // self.comm.size) * self.comm.size  # so that a smaller group can cut it evenly as well
        with torch.inference_mode(False), torch.no_grad():
            self._full_buffer = torch.empty(numel, dtype=dtype, device=self.device)
            storage, full_offset = self._full_buffer.untyped_storage(), 0
            for param, shard_offset in self._offsets():
                rows = [
                    _view(self._full_buffer, full_offset + rank * param.cut.padded_numel, (param.cut.padded_numel,))
                    for rank in range(self.comm.size)
                ]
                full = _view(self._full_buffer, full_offset, param.cut.size)
                self.slots.append(Slot(param, self._direct[param], shard_offset, full_offset, rows, full))
                param.bind_unsharded(_view(self._full_buffer, full_offset, param.cut.size))
                full_offset += _aligned(param.cut.padded_numel * self.comm.size)
            self._packed_blocks = [
                _view(self._full_buffer, slot.full_offset, (self.comm.size, slot.numel))
                for slot in self.packed
                if slot.param.cut.dim == 0
            ]
            storage.resize_(0)

    @property
    def packed(self) -> list[Slot]:
        return self.slots[self.num_direct :]

    def allocate_full(self, dtype: torch.dtype) -> None:
        if self._full_buffer is None:
            self._build_full(dtype)
        buffer = cast(torch.Tensor, self._full_buffer)
        buffer.untyped_storage().resize_(buffer.numel() * buffer.itemsize)

    def free_full(self) -> None:
        if self._full_buffer is not None:
            self._full_buffer.untyped_storage().resize_(0)

    # -- gather ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def start_gather(self, dtype: torch.dtype, stream: Stream) -> None:
        """Allocate the full buffer, put this rank's own rows in place (cast to `dtype`) and send them round."""
        assert self._pending is None, "a gather of this bucket is in flight"
        self.allocate_full(dtype)
        rank, direct = self.comm.rank, self.slots[: self.num_direct]
        shard = self.shard_buffer.to(self.device, non_blocking=True)
        matrices = [slot.rows for slot in direct]
        if direct:
            sources = [shard[slot.shard_offset : slot.shard_offset + slot.numel] for slot in direct]
            torch._foreach_copy_([slot.rows[rank] for slot in direct], sources)
        packed_start = sum(slot.numel for slot in direct)
        if packed_start < self.shard_numel:
            self._staging = torch.empty(
                (self.comm.size, self.shard_numel - packed_start), dtype=dtype, device=self.device
            )
            self._staging[rank].copy_(shard[packed_start:])
            matrices.append(list(self._staging.unbind(0)))
        if matrices and self.comm.size > 1:
            self._pending = gather_rows(self.comm, stream, matrices, self.tag)
        else:
            self._pending = Pending()

    @property
    def gathering(self) -> bool:
        return self._pending is not None

    @torch.no_grad()
    def finish_gather(self) -> None:
        assert self._pending is not None, "no gather of this bucket is in flight"
        self._pending.wait()
        self._pending = None
        if self._staging is not None:
            self._copy_out(self._staging)
            self._staging = None

    def _copy_out(self, staging: torch.Tensor) -> None:
        """Copy packed rows [num ranks, packed numel] to their parameters' final places."""
        packed = self.packed
        pieces = staging.split([slot.numel for slot in packed], dim=1)
        targets, sources = list(self._packed_blocks), list(pieces[: len(self._packed_blocks)])
        for slot, piece in zip(packed[len(targets) :], pieces[len(targets) :], strict=True):
            cut = slot.param.cut  # along another dim: each rank's piece is a stripe of the full parameter
            for rank in range(self.comm.size):
                targets.append(slot.full.narrow(cast(int, cut.dim), cut.start(rank), cut.lengths[rank]))
                sources.append(piece[rank, : cut.numel(rank)].view(cut.sizes(rank)))
        torch._foreach_copy_(targets, sources)

    # -- resharding to a smaller group ----------------------------------------------------------------------------

    @torch.no_grad()
    def keep_part(self, part: GroupComm) -> torch.Tensor:
        """This rank's 1/`part.size` of the full buffer: enough to gather it again within `part` alone."""
        buffer = cast(torch.Tensor, self._full_buffer)
        step = buffer.numel() // part.size
        return buffer[part.rank * step : (part.rank + 1) * step].clone()

    @torch.no_grad()
    def start_gather_parts(self, part: GroupComm, kept: torch.Tensor, stream: Stream) -> None:
        """Refill the full buffer from the parts that `keep_part` left on the ranks of `part`."""
        assert self._pending is None, "a gather of this bucket is in flight"
        buffer = cast(torch.Tensor, self._full_buffer)
        self.allocate_full(buffer.dtype)
        step = buffer.numel() // part.size
        rows = [_view(buffer, rank * step, (step,)) for rank in range(part.size)]
        rows[part.rank].copy_(kept)
        self._pending = gather_rows(part, stream, [rows], self.tag)


def _view(buffer: torch.Tensor, offset: int, size: Sequence[int]) -> torch.Tensor:
    """A contiguous tensor on `buffer`'s storage, with a version counter of its own."""
    strides = torch.empty(size, device="meta").stride()
    return torch.empty(0, dtype=buffer.dtype, device=buffer.device).set_(
        buffer.untyped_storage(), offset, tuple(size), strides
    )


def _aligned(numel: int) -> int:
    return -(-numel // _FULL_ALIGNMENT) * _FULL_ALIGNMENT


def _is_direct(param: HSDPParam, comm: GroupComm, zero_copy: bool | None) -> bool:
    if param.cut.dim != 0 or zero_copy is False:
        return False
    if zero_copy is None:
        piece_bytes = param.cut.padded_numel * param.dtype.itemsize
        return comm.direct and piece_bytes >= DIRECT_MIN_BYTES
    return True
