"""The messages of the engine: gather rows, reduce rows, all-reduce, each one counted and each one asynchronous.

Imports torch only. Two ways of carrying them out, chosen once per process group:

* *direct* (gloo on CPU): point-to-point messages between the tensors' final places. Gloo's own collectives copy
  through buffers of their own and its reduce-scatter is an all-reduce inside; sending each piece straight to its
  owner moves the same bytes with none of those copies. Sums run in rank order, so they repeat bit for bit.
* *native* (NCCL and every other backend): one collective of the backend on the communication stream.

Everything returns a `Pending`; nothing blocks until `wait()`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 renamed the two single-tensor collectives; the old names warn there and are all that 2.11 has.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_active_counters: list[Counter[str]] = []


@contextlib.contextmanager
def count_collectives() -> Iterator[Counter[str]]:
    """Count this process's collectives while the block runs: keys all_gather, reduce_scatter, all_reduce.

    Direct exchanges are invisible to torch's CommDebugMode, which only knows the backend's collectives.
    """
    counter: Counter[str] = Counter()
    _active_counters.append(counter)
    try:
        yield counter
    finally:
        _active_counters.remove(counter)


def _count(kind: str) -> None:
    for counter in _active_counters:
        counter[kind] += 1


class Pending:
    """Messages in flight. `wait` makes their results usable on the caller's stream; a second call does nothing."""

    __slots__ = ("_event", "_keep_alive", "_works")

    def __init__(self, works: Sequence[Any] = (), keep_alive: Sequence[Any] = (), event: Any = None) -> None:
        self._works = works
        self._keep_alive = keep_alive  # tensors a message still reads from or writes to
        self._event = event

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._event is not None:
            torch.accelerator.current_stream().wait_event(self._event)
        self._works, self._keep_alive, self._event = (), (), None


class GroupComm:
    """A process group as the engine uses it.

    Attributes: `group`, `size`, `rank` (within the group), `direct` (messages go point to point).
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.size: int = group.size()
        self.rank: int = group.rank()
        self.direct = device.type == "cpu" and _is_gloo(group)

    @property
    def peers(self) -> list[int]:
        """The other ranks, nearest successor first, so that no rank is everybody's first target."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]


def _is_gloo(group: dist.ProcessGroup) -> bool:
    gloo = getattr(dist, "ProcessGroupGloo", None)
    if gloo is None:
        return False
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # the group has no CPU backend
        return False
    return isinstance(backend, gloo)


class Stream:
    """A communication stream on an accelerator; on CPU there is none and every method is free of effect."""

    def __init__(self, device: torch.device) -> None:
        self.stream = None if device.type == "cpu" else torch.Stream(device)

    @contextlib.contextmanager
    def after_current(self) -> Iterator[None]:
        """Run the block on this stream, ordered after what the current stream has queued so far."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.accelerator.current_stream())
        with self.stream:
            yield

    def record(self) -> Any:
        return None if self.stream is None else self.stream.record_event()


def gather_rows(comm: GroupComm, stream: Stream, matrices: Sequence[Sequence[torch.Tensor]], tag: int) -> Pending:
    """Fill every row of every matrix: row r of each comes from rank r, which holds its own row already.

    A matrix is a list of `comm.size` contiguous 1-D tensors of equal length, rows of one contiguous block.
    """
    _count("all_gather")
    if comm.direct:
        works = [comm.group.recv([rows[peer]], peer, tag) for rows in matrices for peer in comm.peers]
        works += [comm.group.send([rows[comm.rank]], peer, tag) for rows in matrices for peer in comm.peers]
        return Pending(works, matrices)
    with stream.after_current():
        works = _coalesced(comm, [lambda rows=rows: _native_gather(comm, rows, stream) for rows in matrices])
        return Pending(works, matrices, stream.record())


def _native_gather(comm: GroupComm, rows: Sequence[torch.Tensor], stream: Stream) -> Any:
    block = torch.as_strided(rows[0], (rows[0].numel() * comm.size,), (1,), rows[0].storage_offset())
    return _all_gather_single(block, rows[comm.rank], group=comm.group, async_op=stream.stream is None)


def _coalesced(comm: GroupComm, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Issue several native collectives as one launch where there is an accelerator, else one after the other."""
    if len(calls) > 1 and torch.accelerator.is_available():
        with dist._coalescing_manager(comm.group):
            for call in calls:
                call()
        return []
    return [work for call in calls if (work := call()) is not None]


def reduce_rows(
    comm: GroupComm,
    stream: Stream,
    matrices: Sequence[Sequence[torch.Tensor]],
    outs: Sequence[torch.Tensor],
    tag: int,
) -> ReducePending:
    """Sum row `comm.rank` of every matrix over the ranks into the matrix's `out`.

    Direct: rows are contiguous 1-D tensors whose lengths may differ by rank (an uneven shard has a short row);
    `out[i]` is as long as this rank's row. Native: exactly one matrix, rows of one contiguous block.
    """
    _count("reduce_scatter")
    if comm.direct:
        return _exchange_rows(comm, matrices, outs, tag)
    (rows,), (out,) = matrices, outs
    with stream.after_current():
        block = torch.as_strided(rows[0], (rows[0].numel() * comm.size,), (1,), rows[0].storage_offset())
        work = _reduce_scatter_single(
            out, block, op=dist.ReduceOp.SUM, group=comm.group, async_op=stream.stream is None
        )
        works = [work] if work is not None else []
        return ReducePending(Pending(works, (matrices, outs), stream.record()), lambda: None)


class ReducePending:
    """A reduction in flight: `wait` completes the messages, then adds what arrived."""

    __slots__ = ("_add", "_pending")

    def __init__(self, pending: Pending, add: Callable[[], None]) -> None:
        self._pending = pending
        self._add = add

    def wait(self) -> None:
        self._pending.wait()
        self._add()
        self._add = _nothing


def _nothing() -> None:
    """Stands for the sum already taken."""


def _exchange_rows(
    comm: GroupComm,
    matrices: Sequence[Sequence[torch.Tensor]],
    outs: Sequence[torch.Tensor],
    tag: int,
    *,
    sum_in_place: bool = False,
) -> ReducePending:
    """Send every row to its owner; `wait` leaves the sum in `outs`, or with `sum_in_place` in this rank's own rows."""
    # The first peer's contribution lands in `out` itself; with two ranks there is no further buffer.
    received: list[Sequence[torch.Tensor]] = []
    works = []
    for position, peer in enumerate(comm.peers):
        places = outs if position == 0 else [torch.empty_like(out) for out in outs]
        received.append(places)
        works += [comm.group.recv([place], peer, tag) for place in places if place.numel()]
    for peer in comm.peers:
        works += [comm.group.send([rows[peer]], peer, tag) for rows in matrices if rows[peer].numel()]
    own = [rows[comm.rank] for rows in matrices]

    def add() -> None:
        target = own if sum_in_place else list(outs)
        if comm.size == 1:
            torch._foreach_copy_(list(outs), own)
        elif comm.size == 2:
            torch._foreach_add_(target, list(outs) if sum_in_place else own)
        else:
            torch._foreach_copy_(target, _sum_in_rank_order(comm, own, dict(zip(comm.peers, received, strict=True))))

    return ReducePending(Pending(works, (matrices, received)), add)


def _sum_in_rank_order(
    comm: GroupComm, own: Sequence[torch.Tensor], received: dict[int, Sequence[torch.Tensor]]
) -> list[torch.Tensor]:
    """Contributions of rank 0 + rank 1 + ... left to right, whichever place each of them arrived in."""
    contributions = [list(own if rank == comm.rank else received[rank]) for rank in range(comm.size)]
    total = list(torch._foreach_add(contributions[0], contributions[1]))
    for contribution in contributions[2:]:
        torch._foreach_add_(total, contribution)
    return total


def all_reduce_stages(
    comm: GroupComm, stream: Stream, tensors: Sequence[torch.Tensor], tag: int, divisor: float = 1.0
) -> Iterator[Pending | ReducePending]:
    """Sum 1-D contiguous tensors over the ranks in place, then divide; yields what to wait for between the stages.

    Direct: every rank sums and divides one part of each tensor, then sends it round, so all hold the same bits.
    Native: exactly one tensor, one stage.
    """
    _count("all_reduce")
    if comm.size == 1:
        _divide(tensors, divisor)
        return
    if comm.direct:
        parts = [list(_split_even(tensor, comm.size)) for tensor in tensors]
        own = [rows[comm.rank] for rows in parts]
        places = [torch.empty_like(part) for part in own]
        yield _exchange_rows(comm, parts, places, tag, sum_in_place=True)
        del places
        _divide(own, divisor)
        works = [
            comm.group.recv([rows[peer]], peer, tag) for rows in parts for peer in comm.peers if rows[peer].numel()
        ]
        works += [comm.group.send([part], peer, tag) for part in own for peer in comm.peers if part.numel()]
        yield Pending(works, parts)
        return
    (tensor,) = tensors
    with stream.after_current():
        work = dist.all_reduce(tensor, group=comm.group, async_op=stream.stream is None)
        pending = Pending([work] if work is not None else [], [tensor], stream.record())
    yield pending  # outside the block: the stream must not stay current while the caller goes on
    _divide(tensors, divisor)


def _divide(tensors: Sequence[torch.Tensor], divisor: float) -> None:
    if divisor != 1.0:
        torch._foreach_div_(list(tensors), divisor)


def _split_even(tensor: torch.Tensor, num_parts: int) -> Iterator[torch.Tensor]:
    step = -(-tensor.numel() // num_parts)
    for index in range(num_parts):
        start = min(index * step, tensor.numel())
        yield tensor[start : min(start + step, tensor.numel())]
