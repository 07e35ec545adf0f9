"""The two ends of an edge: an Outbox sends what a stage made, an Inbox receives into pooled buffers.

Imports torch and siblings. Receives are posted as early as the proven number of buffers allows and waited for where
they are consumed. A buffer is in use from the posting of its receive until the last backward step that may read it, so
a pool grows to the peak in flight and one ahead of it, not to the number of micro-batches. A buffer that somebody
outside still refers to when it should be free (a module that keeps its input) is given up instead of overwritten.

On the host the first receive of a pass does not wait for its header: it is posted on trust, for the layouts of the pass
before. Should the header say otherwise, the sender, who knows as well what was expected, has first sent something of
the expected layouts to fill what was posted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from hp_train.pipeline_parallel.header import HEADER_LENGTH, TensorLayout, decode, encode
from hp_train.pipeline_parallel.transport import HEADER, Edge, Traffic, Transfer, Wires

MAX_OPEN_SENDS = 1
"""Sends on an edge that may be under way when a transfer step ends: what they send stays allocated.

Not where each micro-batch has a header of its own: receives in one batch may then wait for another edge's header before
they are posted, and a sender that waits for them might be the one who is to announce it.
"""


@dataclass(frozen=True, slots=True)
class RecvInfo:
    """What a receive on an edge is set up with, per tensor.

    peer_global_rank: the process that sends.
    buffer: where it arrives; None if nothing crosses for this tensor (its gradient, if it has none).
    requires_grad: whether a gradient for this tensor travels on the edge, or will travel back.
    """

    peer_global_rank: int
    buffer: Tensor | None
    requires_grad: bool


class BufferPool:
    """Buffers of one inbox, reused by layout."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}

    @property
    def num_free(self) -> int:
        """Buffers that wait for use; between steps, all there are."""
        return sum(map(len, self._free.values()))

    def has_free(self, layout: TensorLayout) -> bool:
        """Whether `take` would reuse one."""
        return bool(self._free.get((layout.shape, layout.dtype)))

    def take(self, layout: TensorLayout) -> Tensor:
        """A buffer of this layout, a new one if none is free."""
        free = self._free.get((layout.shape, layout.dtype))
        return free.pop() if free else torch.empty(layout.shape, dtype=layout.dtype, device=self._device)

    def give_back(self, buffer: Tensor) -> None:
        """Keep a buffer for reuse, unless something else still refers to its memory."""
        if torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) <= _USES_OF_A_LONE_BUFFER:
            self._free.setdefault((buffer.shape, buffer.dtype), []).append(buffer)

    def keep_only(self, layouts: Sequence[TensorLayout]) -> None:
        """Drop free buffers of other layouts: the shapes of an earlier step."""
        wanted = {(layout.shape, layout.dtype) for layout in layouts}
        for key in [key for key in self._free if key not in wanted]:
            del self._free[key]


def _count_uses_of_a_lone_buffer() -> int:
    buffer = torch.empty(1)
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)


_USES_OF_A_LONE_BUFFER = _count_uses_of_a_lone_buffer()


class Outbox:
    """The sending end of an edge.

    uniform_layouts: what one header has announced for all values of the pass; None before, or if each has its own.
    """

    def __init__(self, edge: Edge, wires: Wires, *, limits_open_sends: bool) -> None:
        self.edge = edge
        self._wires = wires
        self._limit = MAX_OPEN_SENDS if limits_open_sends else None
        self._open: deque[tuple[int, list[Transfer], list[Tensor]]] = deque()
        self.uniform_layouts: tuple[TensorLayout, ...] | None = None
        self._trusted: tuple[TensorLayout, ...] | None = None
        self._announces_each = False
        self._made: dict[int, tuple[Sequence[Tensor | None], tuple[TensorLayout, ...] | None]] = {}

    def begin_step(self) -> None:
        """Start a pass: its first values are announced anew."""
        self._made.clear()
        self._trusted, self.uniform_layouts = self.uniform_layouts, None
        self._announces_each = False

    def put(self, micro_index: int, values: Sequence[Tensor | None], layouts: tuple[TensorLayout, ...] | None) -> None:
        """Keep what a micro-batch's send will take, and the layouts that the receiver must know; None if it does."""
        self._made[micro_index] = values, layouts

    def take_out(self, micro_index: int) -> tuple[Sequence[Tensor | None], tuple[TensorLayout, ...] | None]:
        """What has been put here for a micro-batch."""
        return self._made.pop(micro_index)

    def announce(self, layouts: tuple[TensorLayout, ...], uniform: bool, what: str) -> None:
        """Send the header of the values that come next. Values of `uniform_layouts` need none.

        uniform: whether all later values of the pass have these layouts.
        what: the stage that made them, for the error if there is no header for other layouts any more.
        """
        if self.uniform_layouts is not None:
            raise ValueError(
                f"{what} returns {_listed(layouts)} after {_listed(self.uniform_layouts)} from inputs of the same "
                "shapes; the receiver's buffers would not fit"
            )
        self.uniform_layouts = layouts if uniform else None
        self._announces_each = not uniform
        header = encode(layouts, uniform)
        self._open.append((HEADER, [self._wires.send_header(header, self.edge)], [header]))
        trusted, self._trusted = self._trusted, None
        if self._wires.is_host and trusted is not None and not _fit(trusted, layouts):
            self.send(HEADER, [torch.zeros(each.shape, dtype=each.dtype) for each in trusted])

    def send(self, micro_index: int, values: Sequence[Tensor | None]) -> None:
        """Start to send a micro-batch's values, but those that are None, and keep them until they have arrived."""
        tensors, transfers = [], []
        for value in values:
            if value is not None:
                tensors.append(_as_memory(value))
                transfers.append(self._wires.start(tensors[-1], self.edge))
        self._open.append((micro_index, transfers, tensors))

    def let_go(self) -> None:
        """Free what has been sent: on the host, wait for all but the latest sends that may be under way.

        Called when everything of the transfer step has been started, receives too: a peer may wait just so.
        """
        if not self._wires.is_host:
            # Waiting would put the compute stream behind the send; asking costs nothing.
            while len(self._open) > 1 and all(transfer.is_completed() for transfer in self._open[0][1]):
                self._open.popleft()
        elif self._limit is not None and not self._announces_each:
            while len(self._open) > self._limit:
                self._finish_oldest()

    def note_arrival(self, micro_index: int) -> None:
        """Free what has been sent up to this micro-batch: the peer has it, for something made from it has come back."""
        if (
            len(self._open) > MAX_OPEN_SENDS
            and self._wires.is_host
            and any(at == micro_index for at, _, _ in self._open)
        ):
            while self._open[0][0] != micro_index:
                self._finish_oldest()
            self._finish_oldest()

    def finish(self) -> None:
        """Wait for all sends."""
        while self._open:
            self._finish_oldest()

    def abandon(self) -> None:
        """Forget everything under way, after a failure: what still refers to a group keeps its connections open."""
        self._made.clear()
        self._open.clear()

    def _finish_oldest(self) -> None:
        micro_index, transfers, _ = self._open[0]
        self._wires.wait_for(transfers, self.edge, micro_index)
        self._open.popleft()


class Inbox:
    """The receiving end of an edge.

    most_in_use: for how many micro-batches buffers may be in use at once; a receive comes early only within that.
    """

    def __init__(self, edge: Edge, wires: Wires, device: torch.device, most_in_use: int) -> None:
        self.edge = edge
        self._most_in_use = most_in_use
        self.pool = BufferPool(device)
        self._wires = wires
        self._peer_global_rank = wires.global_ranks[edge.source_rank]
        self._queue: deque[int] = deque()
        self._posted: dict[int, tuple[list[Transfer], list[Tensor | None]]] = {}
        self._held: dict[int, list[Tensor | None]] = {}
        self._layouts: dict[int, tuple[TensorLayout, ...]] = {}  # of micro-batches whose layout is known by itself
        self._uniform_layouts: tuple[TensorLayout, ...] | None = None
        self._header: tuple[Tensor, Transfer] | None = None
        self._latest: tuple[tuple[TensorLayout, ...], list[Tensor | None]] = (), []  # of the latest receive
        self._num_due = 0  # receives at the head of the queue that the schedule has come to and that are not posted
        self._trusting: int | None = None  # the micro-batch posted on trust, until its header is read

    @property
    def infos(self) -> tuple[RecvInfo, ...]:
        """What the latest receive was set up with, per tensor; empty before the first."""
        return tuple(
            RecvInfo(self._peer_global_rank, buffer, each.requires_grad)
            for each, buffer in zip(*self._latest, strict=True)
        )

    @property
    def is_uniform(self) -> bool:
        """Whether one header has told the layouts of all micro-batches of the step."""
        return self._uniform_layouts is not None

    def begin_step(self, micro_indices: Sequence[int]) -> None:
        """Expect these micro-batches, in this order."""
        self._queue = deque(micro_indices)
        self._num_due = 0
        trusted, self._uniform_layouts = self._uniform_layouts, None
        self._layouts.clear()
        if self._queue:
            self._expect_header()
            if trusted is not None and self._wires.is_host:
                self._post_on_trust(trusted)

    def expect(self, micro_index: int, layouts: tuple[TensorLayout, ...]) -> None:
        """Say what a backward edge will bring for a micro-batch: the gradients of outputs that were just made."""
        if not self._layouts:
            self.pool.keep_only(layouts)
        self._layouts[micro_index] = layouts

    def knows_next(self) -> bool:
        """Whether the layouts of the next receive are known without waiting for a header."""
        return self._uniform_layouts is not None or bool(self._queue and self._queue[0] in self._layouts)

    def is_posted(self, micro_index: int) -> bool:
        """Whether this micro-batch's receive has been posted and not yet taken."""
        return micro_index in self._posted

    def post(self, micro_index: int) -> None:
        """Start to receive this micro-batch, the next in the queue. Waits for its header."""
        assert self._queue and self._queue[0] == micro_index, f"{self.edge}: micro-batch {micro_index} is out of turn"
        layouts = self.layouts_of(micro_index)
        self._queue.popleft()
        self._num_due = max(0, self._num_due - 1)
        is_backward = self.edge.traffic is Traffic.BACKWARD
        buffers = [self.pool.take(each) if each.requires_grad or not is_backward else None for each in layouts]
        self._latest = layouts, buffers
        self._posted[micro_index] = self._start(buffers), buffers

    def mark_due(self) -> None:
        """The schedule has come to the next receive that is not posted: `post_ahead` posts it, proven limit or not."""
        self._num_due += 1

    def post_ahead(self) -> None:
        """Post receives whose layouts are known: those that are due, and further ones while the limit on use allows."""
        while (
            self._queue
            and (self._num_due or len(self._posted) + len(self._held) < self._most_in_use)
            and self.knows_next()
        ):
            self.post(self._queue[0])

    def take(self, micro_index: int) -> list[Tensor | None]:
        """Wait for the micro-batch and return its buffers; they stay in use until `release`."""
        if micro_index == self._trusting:
            self._read_header(micro_index)
        while micro_index not in self._posted:  # others before it, if they are consumed in another order
            self.post(self._queue[0])
        transfers, buffers = self._posted[micro_index]
        self._wires.wait_for(transfers, self.edge, micro_index)
        self._held[micro_index] = buffers
        del self._posted[micro_index]
        return buffers

    def layouts_of(self, micro_index: int) -> tuple[TensorLayout, ...]:
        """The layouts of a micro-batch that has been posted or is the next; may wait for its header."""
        if self._trusting is not None:
            self._read_header(self._trusting)
        if self._uniform_layouts is not None:
            return self._uniform_layouts
        if micro_index not in self._layouts:
            self._read_header(micro_index)
        return self._layouts[micro_index]

    def release(self, micro_index: int) -> None:
        """Give the micro-batch's buffers back; `post_ahead` may use them."""
        for buffer in self._held.pop(micro_index):
            if buffer is not None:
                self.pool.give_back(buffer)

    def abandon(self) -> None:
        """Forget everything under way, after a failure: what still refers to a group keeps its connections open."""
        self._queue.clear()
        self._posted.clear()
        self._held.clear()
        self._header = None

    def _post_on_trust(self, trusted: tuple[TensorLayout, ...]) -> None:
        """Post the first receive of a pass for the layouts of the last one, whatever its header will say."""
        self._trusting = self._queue.popleft()
        buffers = [self.pool.take(each) for each in trusted]
        self._posted[self._trusting] = self._start(buffers), buffers

    def _resolve_trust(self, layouts: tuple[TensorLayout, ...]) -> None:
        """Now that the first receive's layouts are known: keep it, or let it end and post it anew."""
        micro_index, self._trusting = self._trusting, None
        transfers, buffers = self._posted[micro_index]
        if _fit(buffers, layouts):
            self._latest = layouts, buffers
            return
        self._wires.wait_for(transfers, self.edge, micro_index)
        del self._posted[micro_index]
        self._queue.appendleft(micro_index)
        self.post(micro_index)

    def _start(self, buffers: Sequence[Tensor | None]) -> list[Transfer]:
        return [self._wires.start(buffer, self.edge) for buffer in buffers if buffer is not None]

    def _expect_header(self) -> None:
        if self.edge.traffic is not Traffic.BACKWARD:
            header = torch.empty(HEADER_LENGTH, dtype=torch.int64)
            self._header = (header, self._wires.receive_header(header, self.edge))

    def _read_header(self, micro_index: int) -> None:
        """Wait for the header that announces this micro-batch, the next one due, and act on it."""
        assert self._header is not None, f"{self.edge}: no header announces micro-batch {micro_index}"
        header, work = self._header
        self._wires.wait_for([work], self.edge, micro_index)
        layouts, uniform = decode(header)
        self._layouts[micro_index] = layouts
        self._header = None
        if uniform:
            self._uniform_layouts = layouts
            self.pool.keep_only(layouts)
        elif any(each != micro_index for each in self._queue):
            self._expect_header()
        if self._trusting is not None:
            self._resolve_trust(layouts)


def _as_memory(value: Tensor) -> Tensor:
    """The values without their graph, as a backend reads them: in place, nothing to wait for, conjugate or negate."""
    if isinstance(value, AsyncCollectiveTensor):
        value = value.wait()
    value = value.detach() if value.requires_grad else value
    return value.resolve_conj().resolve_neg().contiguous()


def _fit(expected: Sequence[TensorLayout | Tensor], layouts: Sequence[TensorLayout]) -> bool:
    """Whether buffers for the one, or these buffers, take the other."""
    return [(each.shape, each.dtype) for each in expected] == [(each.shape, each.dtype) for each in layouts]


def _listed(layouts: Sequence[TensorLayout]) -> str:
    return ", ".join(map(str, layouts)) or "nothing"
