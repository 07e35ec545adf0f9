"""The wires between pipeline ranks: which process group carries an edge, and how operations are handed to it.

Imports torch and the schedule. An edge is one direction between two stages on different ranks. `plain`, `batch` and
`boundary` share one group among the pipeline's ranks (on the host, one for each direction); `multi_stream` has a group
per edge, so that no transfer waits behind another edge's. The groups are the runtime's own: data-parallel traffic never
mixes with theirs, and after a failure they are destroyed, which wakes every peer that waits on them. gloo matches
messages by tag, one tag an edge; NCCL ignores tags and matches by order, which the proof has shown to agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hp_train.schedule import Schedule

HEADER, NOT_STARTED = -1, -2
"""In place of a micro-batch, where a rank waits for a header, or could not even start a transfer."""


class Traffic(Enum):
    """What an edge carries."""

    FORWARD = "F"
    BACKWARD = "B"
    DATA = "D"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash runs in Python, on every look-up


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """One direction between two stages on different ranks. Ranks are pipeline ranks. Compared by identity."""

    traffic: Traffic
    source_stage: int
    target_stage: int
    source_rank: int
    target_rank: int

    def __str__(self) -> str:
        return f"stage {self.source_stage} -> stage {self.target_stage} ({self.traffic.name.lower()})"


class _Batch:
    """Transfers that start together: stands for the Work of each of them, before it has been started too."""

    def __init__(self) -> None:
        self.collected: list[tuple[Tensor, Edge]] = []
        self.work: dist.Work | None = None

    def wait(self) -> None:
        self.work.wait()

    def is_completed(self) -> bool:
        return self.work.is_completed()


Transfer = dist.Work | _Batch
"""A send or receive under way."""


def edges_of(schedule: Schedule) -> tuple[Edge, ...]:
    """Every edge that crosses ranks, in an order that all ranks agree on."""
    ranks, last = schedule.rank_of_stage, schedule.num_stages - 1
    edges = []
    for stage in range(last):
        if ranks[stage] != ranks[stage + 1]:
            edges.append(Edge(Traffic.FORWARD, stage, stage + 1, ranks[stage], ranks[stage + 1]))
            edges.append(Edge(Traffic.BACKWARD, stage + 1, stage, ranks[stage + 1], ranks[stage]))
    if ranks[0] != ranks[last]:
        edges.append(Edge(Traffic.DATA, 0, last, ranks[0], ranks[last]))
    return tuple(edges)


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """A communicator among some pipeline ranks, and the number that each has in it."""

    backend: dist.Backend
    rank_of: dict[int, int]


class _Line(NamedTuple):
    """This rank's end of an edge: its group's send or receive, and what that is called with besides the tensor."""

    start: Callable[[list[Tensor], int, int], dist.Work]
    peer: int
    tag: int


class Wires:
    """Process groups of one pipeline and the raw operations on them.

    transport: plain, batch, multi_stream or boundary.
    edges: those of the whole pipeline, in the order that all ranks agree on.
    global_ranks: the process of each pipeline rank.
    store: where the ranks of this pipeline, and nobody else, find each other.
    Every pipeline rank must make its Wires at the same time: groups are made and warmed up here.

    may_post_early: whether a receive may be posted ahead of its place in the schedule. Not on a GPU: there it is a
        kernel that waits on the device, and with one hardware queue for all streams what is launched behind it would
        wait as well. The proven order is the order that can't deadlock.
    defers_headers: whether a receive step must not wait, not even for a header, but leaves that to its consumer.
    groups_batches: whether neighbouring transfers are handed over in one group call; gloo has none and needs none.
    """

    def __init__(
        self,
        transport: str,
        edges: Sequence[Edge],
        global_ranks: Sequence[int],
        pp_rank: int,
        device: torch.device,
        timeout_s: float,
        store: dist.Store,
    ) -> None:
        self.global_ranks = tuple(global_ranks)
        self.device = device
        self.is_host = self.may_post_early = device.type == "cpu"
        self.defers_headers = transport == "multi_stream"
        self.groups_batches = transport in ("batch", "boundary") and not self.is_host
        self._transport, self._pp_rank = transport, pp_rank
        self._timeout = timedelta(seconds=timeout_s)
        self.waiting: tuple[Edge, int] | None = None  # read by another thread, to say where a rank stands
        self.waited_s = 0.0  # in all waits so far
        self._arrivals: list[tuple[Edge, int, torch.cuda.Event]] = []
        own = [edge for edge in edges if pp_rank in (edge.source_rank, edge.target_rank)]
        tags = {edge: 1 + number for number, edge in enumerate(edges)}
        self._groups: dict[Edge, _Group] = {}
        self._batch: _Batch | None = None
        self._lines: dict[Edge, _Line] = {}
        self._header_lines: dict[Edge, _Line] = {}
        if own:
            header_groups = self._make_groups(own, store, tags)
            self._lines = {edge: self._line(edge, self._groups[edge], tags[edge]) for edge in own}
            self._header_lines = {edge: self._line(edge, header_groups[edge], tags[edge] + len(tags)) for edge in own}
            self._warm_up(own)

    def start(self, tensor: Tensor, edge: Edge) -> Transfer:
        """Start to send a tensor, if the edge begins on this rank, or to receive into it; within `together`, later."""
        if self._batch is None:
            return self._start(tensor, edge, self._lines[edge])
        self._batch.collected.append((tensor, edge))
        return self._batch

    @contextmanager
    def together(self) -> Iterator[None]:
        """Start all transfers of the block when it ends, in one group call."""
        batch = self._batch = _Batch()
        try:
            yield
        finally:
            self._batch = None
        if batch.collected:
            backend = self._groups[batch.collected[0][1]].backend
            backend._start_coalescing()
            for tensor, edge in batch.collected:
                self._start(tensor, edge, self._lines[edge])
            batch.work = backend._end_coalescing()
            batch.collected.clear()

    def send_header(self, header: Tensor, edge: Edge) -> dist.Work:
        """Start sending a header, from host memory over gloo whatever the device."""
        return self._start(header, edge, self._header_lines[edge])

    def receive_header(self, header: Tensor, edge: Edge) -> dist.Work:
        """Start receiving a header."""
        return self._start(header, edge, self._header_lines[edge])

    def wait_for(self, works: Sequence[Transfer], edge: Edge, micro_index: int) -> None:
        """Wait until transfers have ended; on a GPU, make the current stream wait.

        Raises RuntimeError if the peer is gone or, on the host, nothing came within the timeout; `waiting` then says
        what for.
        """
        self.waiting = (edge, micro_index)
        begin_s = time.perf_counter()
        for work in works:
            work.wait()
        self.waited_s += time.perf_counter() - begin_s
        self.waiting = None
        if not self.is_host:  # there the stream waits; what stands behind the wait tells later whether it ended
            arrived = torch.cuda.Event()
            arrived.record()
            self._arrivals.append((edge, micro_index, arrived))

    def drain(self, has_failed: Callable[[], bool]) -> None:
        """On a GPU, wait on the host until the device has come past every transfer of the step.

        Without this a hang would show where the loss is read, with nothing to say about it. Raises RuntimeError after
        the timeout, or when `has_failed()`; `waiting` then names the transfer that the device stands at.
        """
        deadline_s = time.monotonic() + self._timeout.total_seconds()
        for edge, micro_index, arrived in self._arrivals:
            self.waiting = (edge, micro_index)
            while not arrived.query():
                if has_failed():
                    raise RuntimeError("another rank of the pipeline has failed")
                if time.monotonic() > deadline_s:
                    raise RuntimeError(f"timed out after {self._timeout.total_seconds():.0f} s")
                time.sleep(2e-4)
        self.waiting = None
        self._arrivals.clear()

    def abort(self) -> None:
        """On a GPU, end whatever is under way: streams that wait for a failed peer go on. Any thread may call it."""
        if not self.is_host:
            for group in dict.fromkeys(self._groups.values()):
                group.backend.abort()

    def close(self) -> None:
        """Let go of the groups, which closes their connections: peers that wait on them are woken with an error."""
        if not self.is_host:
            for group in dict.fromkeys(self._groups.values()):
                group.backend.shutdown()
        self._groups, self._lines, self._header_lines = {}, {}, {}
        self._arrivals.clear()

    def _start(self, tensor: Tensor, edge: Edge, line: _Line) -> dist.Work:
        carried = tensor if tensor.dtype in _CARRIED_AS_THEY_ARE else _as_carried(tensor)
        try:
            return line.start([carried], line.peer, line.tag)
        except RuntimeError:
            self.waiting = (edge, NOT_STARTED)  # the peer's end is gone: an echo, as a failed wait would be
            raise

    def _line(self, edge: Edge, group: _Group, tag: int) -> _Line:
        if edge.source_rank == self._pp_rank:
            return _Line(group.backend.send, group.rank_of[edge.target_rank], tag)
        return _Line(group.backend.recv, group.rank_of[edge.source_rank], tag)

    def _make_groups(self, own: Sequence[Edge], store: dist.Store, tags: dict[Edge, int]) -> dict[Edge, _Group]:
        """Make the groups that carry tensors; return those that carry headers."""
        everyone = tuple(range(len(self.global_ranks)))
        if self._transport == "multi_stream":
            for edge in own:
                ends = (edge.source_rank, edge.target_rank)
                self._groups[edge] = self._make_group(store, f"edge_{tags[edge]}", ends)
        elif self.is_host:
            # One for each direction: a connection of gloo is one lock between its thread, which takes in what comes,
            # and the caller, who sends; and a thread that is put aside while holding it stops its caller for as long.
            directions = {is_up: self._make_group(store, f"edges_{is_up}", everyone) for is_up in (False, True)}
            self._groups = {edge: directions[edge.source_rank < edge.target_rank] for edge in own}
        else:
            self._groups = dict.fromkeys(own, self._make_group(store, "edges", everyone))
        if self.is_host:
            return self._groups
        return dict.fromkeys(own, self._make_group(store, "headers", everyone, on_host=True))

    def _make_group(self, store: dist.Store, name: str, pp_ranks: tuple[int, ...], on_host: bool = False) -> _Group:
        # Not new_group(): all processes of the job would have to make every pipeline's groups, or, synchronising
        # locally, members would have to have made the same number of groups before; and a name could come back.
        store = dist.PrefixStore(name, store)
        rank, size = pp_ranks.index(self._pp_rank), len(pp_ranks)
        if on_host or self.is_host:
            backend = dist.ProcessGroupGloo(store, rank, size, self._timeout)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            backend = dist.ProcessGroupNCCL(store, rank, size, options)
        return _Group(backend, {pp_rank: number for number, pp_rank in enumerate(pp_ranks)})

    def _warm_up(self, own: Sequence[Edge]) -> None:
        """Open every connection now: edge after edge in one order, so that no two ranks wait for each other."""
        for edge in own:
            self._start(torch.zeros(1, device=self.device), edge, self._lines[edge]).wait()
            self._start(torch.zeros(1), edge, self._header_lines[edge]).wait()
        if not self.is_host:
            torch.cuda.synchronize(self.device)


def _as_carried(tensor: Tensor) -> Tensor:
    """The tensor as one of a type that every backend has."""
    if tensor.dtype in _CARRIED_AS_BYTES:
        return tensor.view(torch.uint8)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


_CARRIED_AS_THEY_ARE = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.int64})  # nearly all that cross
_CARRIED_AS_BYTES = frozenset({torch.bool, torch.float8_e4m3fn, torch.float8_e5m2})
