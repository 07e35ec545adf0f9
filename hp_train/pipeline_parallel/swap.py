"""Activations that wait in host memory between a micro-batch's forward and its backward.

Imports torch. `SwapSpace.saving` runs a forward so that everything autograd saves passes through here. What belongs to
the stage for longer stays where it is: parameters, buffers, inputs from outside and boundary tensors. The rest goes by
storage, once however many saved tensors share it: launch_offload copies it to a pool of (pinned) host buffers on a side
stream, wait_offload drops the device's copy, launch_load brings it back on a side stream, wait_load rebuilds the saved
tensors as the views that they were. On the CPU the same copies run in line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor, nn


@dataclass(slots=True, eq=False)
class _Block:
    """One storage of saved activations: on the device, on the host, or on its way."""

    device_bytes: Tensor | None  # uint8 [nbytes], a view of the whole storage
    host_bytes: Tensor | None = None


@dataclass(slots=True, eq=False)
class _Saved:
    """One tensor that autograd saved; `tensor` is None while its block is away."""

    tensor: Tensor | None
    block: _Block | None = None
    layout: tuple[torch.dtype, int, torch.Size, tuple[int, ...]] | None = None  # dtype, offset, size, stride


@dataclass(slots=True)
class _MicroBatch:
    saved: list[_Saved] = field(default_factory=list)
    blocks: list[_Block] = field(default_factory=list)
    copied: torch.Event | None = None  # the copy under way, on a GPU


class SwapSpace:
    """Saved activations of one stage, by micro-batch.

    live_bytes: bytes of swappable activations that are on the device now.
    """

    def __init__(self, module: nn.Module) -> None:
        self.live_bytes = 0
        self._module = module
        self._micro_batches: dict[int, _MicroBatch] = {}
        self._host_pool: dict[int, list[tuple[Tensor, torch.Event | None]]] = {}
        self._out_stream: torch.cuda.Stream | None = None
        self._in_stream: torch.cuda.Stream | None = None

    @contextmanager
    def saving(self, micro_index: int, outside: Iterable[object]) -> Iterator[None]:
        """Run the forward of a micro-batch under this; `outside` are its inputs, whose memory is not the stage's."""
        micro = self._micro_batches[micro_index] = _MicroBatch()
        kept = {_storage_key(each) for each in outside if isinstance(each, Tensor)}
        with torch.autograd.graph.saved_tensors_hooks(_packer(micro, self._module, kept), _unpack):
            yield

    def keep_outputs(self, micro_index: int, outputs: Iterable[object]) -> None:
        """Leave the outputs where they are: they are still on their way to the next stage."""
        kept = {_storage_key(each) for each in outputs if isinstance(each, Tensor)}
        micro = self._micro_batches[micro_index]
        blocks: dict[int, _Block] = {}
        for saved in micro.saved:
            key = _storage_key(saved.tensor)
            if key in kept:
                continue
            if key not in blocks:
                blocks[key] = _Block(_whole_storage(saved.tensor))
            tensor = saved.tensor
            saved.block = blocks[key]
            saved.layout = (tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())
        micro.saved = [saved for saved in micro.saved if saved.block is not None]
        micro.blocks = list(blocks.values())
        self.live_bytes += sum(block.device_bytes.numel() for block in micro.blocks)

    def launch_offload(self, micro_index: int) -> None:
        """Start copying to the host."""
        micro = self._micro_batches[micro_index]
        if not micro.blocks:
            return
        with self._copying(micro, is_offload=True):
            for block in micro.blocks:
                block.host_bytes = self._take_host(block.device_bytes)
                block.host_bytes.copy_(block.device_bytes, non_blocking=True)

    def wait_offload(self, micro_index: int) -> None:
        """Let go of the device's memory once the copy is there."""
        micro = self._micro_batches[micro_index]
        self._join(micro)
        for saved in micro.saved:
            saved.tensor = None
        for block in micro.blocks:
            self.live_bytes -= block.device_bytes.numel()
            block.device_bytes = None

    def launch_load(self, micro_index: int) -> None:
        """Start copying back to the device."""
        micro = self._micro_batches[micro_index]
        if not micro.blocks:
            return
        device = next(self._module.parameters()).device
        for block in micro.blocks:
            # From the stream that computes: the memory may have been freed there a moment ago, and will be again.
            block.device_bytes = torch.empty(block.host_bytes.numel(), dtype=torch.uint8, device=device)
            self.live_bytes += block.device_bytes.numel()
        with self._copying(micro, is_offload=False):
            for block in micro.blocks:
                block.device_bytes.copy_(block.host_bytes, non_blocking=True)

    def wait_load(self, micro_index: int) -> None:
        """Put the saved tensors back; from here on backward may run."""
        micro = self._micro_batches[micro_index]
        self._join(micro)
        for saved in micro.saved:
            dtype, offset, size, stride = saved.layout
            storage = saved.block.device_bytes.untyped_storage()
            saved.tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
        for block in micro.blocks:
            self._give_back_host(block.host_bytes, micro.copied)
            block.host_bytes = None

    def forget(self, micro_index: int) -> None:
        """Backward has run: nothing of the micro-batch is live any more."""
        micro = self._micro_batches.pop(micro_index, None)
        for block in micro.blocks if micro is not None else ():
            if block.device_bytes is not None:
                self.live_bytes -= block.device_bytes.numel()

    def forget_all(self) -> None:
        """The same for every micro-batch, after a failure."""
        for micro_index in list(self._micro_batches):
            self.forget(micro_index)

    @contextmanager
    def _copying(self, micro: _MicroBatch, *, is_offload: bool) -> Iterator[None]:
        """Run copies on the side stream of their direction, behind what the computing stream has done so far."""
        if micro.blocks[0].device_bytes.device.type == "cpu":
            yield
            return
        stream = self._side_stream(is_offload)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
            micro.copied = torch.cuda.Event()
            micro.copied.record(stream)

    def _side_stream(self, is_offload: bool) -> torch.cuda.Stream:
        if self._out_stream is None:
            self._out_stream, self._in_stream = torch.cuda.Stream(), torch.cuda.Stream()
        return self._out_stream if is_offload else self._in_stream

    def _join(self, micro: _MicroBatch) -> None:
        """Make the computing stream wait for the copy; memory freed after this is reused behind it."""
        if micro.copied is not None:
            torch.cuda.current_stream().wait_event(micro.copied)

    def _take_host(self, device_bytes: Tensor) -> Tensor:
        free = self._host_pool.get(device_bytes.numel())
        if not free:
            return torch.empty(device_bytes.numel(), dtype=torch.uint8, pin_memory=device_bytes.is_cuda)
        host, read = free.pop()
        if read is not None:
            self._out_stream.wait_event(read)  # its last load may still be reading
        return host

    def _give_back_host(self, host: Tensor, read: torch.Event | None) -> None:
        self._host_pool.setdefault(host.numel(), []).append((host, read))


def _packer(micro: _MicroBatch, module: nn.Module, kept: set[int]):
    """The pack hook: notes what is an activation, passes what is not."""
    seen: set[int] = set()

    def pack(tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return saved
        key = _storage_key(tensor)
        if key not in seen and key not in kept:
            # Sharded modules show other parameters from one moment to the next, so look whenever a storage is new.
            kept.update(map(_storage_key, chain(module.parameters(), module.buffers())))
        if key not in kept:
            seen.add(key)
            micro.saved.append(saved)
        return saved

    return pack


def _unpack(saved: _Saved) -> Tensor:
    assert saved.tensor is not None, "an activation is used while it is swapped out"
    return saved.tensor


def _storage_key(tensor: Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    return local.untyped_storage()._cdata


def _whole_storage(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
