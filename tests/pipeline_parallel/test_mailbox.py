"""Headers, pooled receive buffers, and how far the two ends of an edge run ahead."""

from __future__ import annotations

import weakref
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.two_tensor import TwoTensor

from hp_train.pipeline_parallel.header import HEADER_LENGTH, TensorLayout, decode, encode, layouts_of
from hp_train.pipeline_parallel.mailbox import BufferPool, Inbox, Outbox
from hp_train.pipeline_parallel.transport import Edge, Traffic

CPU = torch.device("cpu")


def test_a_header_says_what_comes() -> None:
    outputs = (
        torch.zeros(2, 3, requires_grad=True), torch.zeros((), dtype=torch.bfloat16), torch.zeros(5, dtype=torch.bool),
        torch.zeros(0, 4), torch.zeros(1, 1, 1, 1, 1, 1, 1, 2, dtype=torch.int64),
    )  # fmt: skip
    layouts = layouts_of(outputs, "stage 0")
    for uniform in (True, False):
        header = encode(layouts, uniform)
        assert header.shape == (HEADER_LENGTH,)
        assert decode(header) == (layouts, uniform)
    assert decode(encode((), True)) == ((), True)


def test_what_does_not_cross_is_named() -> None:
    for outputs, text in (
        ([{"h": 1}], "output 0 of stage 3 is dict"),
        ([torch.zeros(1), None], "output 1 of stage 3 is NoneType"),
        ([torch.zeros((1,) * 9)], "9 dimensions; at most 8"),
        ([torch.zeros(1)] * 17, "returns 17 tensors; at most 16"),
        ([torch.zeros(1, dtype=torch.uint16)], "dtype torch.uint16"),
        ([torch.zeros(2, 2).to_sparse()], "output 0 of stage 3 has layout torch.sparse_coo"),
        ([torch.zeros(2), TwoTensor(torch.zeros(2), torch.zeros(2))], "output 1 of stage 3 is TwoTensor"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            layouts_of(outputs, "stage 3")


def test_a_buffer_comes_back_unless_somebody_keeps_it() -> None:
    pool, layout = BufferPool(CPU), TensorLayout((2, 3), torch.float32, True)
    first = pool.take(layout)
    address = first.data_ptr()
    pool.give_back(first)
    del first
    second = pool.take(layout)
    assert second.data_ptr() == address
    view = second[0]  # a module keeps part of its input
    pool.give_back(second)
    third = pool.take(layout)
    assert third.data_ptr() != view.data_ptr()


def test_buffers_of_other_shapes_are_dropped() -> None:
    pool = BufferPool(CPU)
    old, new = (TensorLayout((length, 3), torch.float32, True) for length in (8, 6))
    pool.give_back(pool.take(old))
    assert pool.num_free == 1
    pool.keep_only([new])
    assert pool.num_free == 0


class Channel:
    """Messages of one edge in one process, by kind in the order of posting; sizes must agree, as with gloo."""

    def __init__(self) -> None:
        self.sent: dict[str, deque[Tensor]] = {"header": deque(), "tensor": deque()}
        self.posted: dict[str, deque[Tensor]] = {"header": deque(), "tensor": deque()}
        self.log: list[str] = []

    def end(self, is_send: bool) -> SimpleNamespace:
        """What stands for the wires of the rank at this end."""
        return SimpleNamespace(
            is_host=True, global_ranks=(0, 1), start=lambda tensor, _: self._start("tensor", is_send, tensor),
            send_header=lambda header, _: self._start("header", True, header),
            receive_header=lambda header, _: self._start("header", False, header),
            wait_for=lambda transfers, *_: [each.wait() for each in transfers],
        )  # fmt: skip

    def _start(self, kind: str, is_send: bool, tensor: Tensor) -> SimpleNamespace:
        self.log.append(f"{'send' if is_send else 'receive'} {kind}")
        if is_send:
            self.sent[kind].append(tensor.clone())
            return SimpleNamespace(wait=lambda: None)
        posted = self.posted[kind]
        posted.append(tensor)

        def wait() -> None:
            while any(each is tensor for each in posted):
                buffer, sent = posted.popleft(), self.sent[kind].popleft()
                assert sent.shape == buffer.shape and sent.dtype == buffer.dtype, "gloo would abort the process"
                buffer.copy_(sent)

        return SimpleNamespace(wait=wait)


def send(outbox: Outbox, micro_index: int, values: tuple[Tensor, ...], uniform: bool) -> None:
    layouts = layouts_of(values, "stage 0")
    if layouts != outbox.uniform_layouts:
        outbox.announce(layouts, uniform, "stage 0")
    outbox.send(micro_index, values)


PASSES = {  # per pass, the outputs' rows by micro-batch; one header serves all if they agree
    "same": [[3, 3, 3]] * 3,
    "others in the next pass": [[3, 3], [5, 5], [5, 5], [2, 2]],
    "others within a pass": [[3, 3], [3, 4, 3], [4, 3], [4, 4, 4], [5, 4], [5, 5]],
    "nothing in it": [[0, 0], [3, 3], [0, 0]],
}


@pytest.mark.parametrize("case", PASSES)
def test_the_first_receive_is_posted_before_its_header_and_any_shapes_arrive(case: str) -> None:
    edge, channel = Edge(Traffic.FORWARD, 0, 1, 0, 1), Channel()
    outbox = Outbox(edge, channel.end(is_send=True), limits_open_sends=True)
    inbox = Inbox(edge, channel.end(is_send=False), CPU, most_in_use=2)
    was_uniform = False
    for rows in PASSES[case]:
        channel.log.clear()
        inbox.begin_step(range(len(rows)))
        outbox.begin_step()
        assert channel.log == ["receive header", *["receive tensor"] * 2 * was_uniform]
        uniform = was_uniform = len(set(rows)) == 1
        for micro_index, count in enumerate(rows):
            values = (torch.randn(count, 2), torch.full((count,), micro_index))
            send(outbox, micro_index, values, uniform)
            arrived = inbox.take(micro_index)
            assert all(torch.equal(*pair) for pair in zip(arrived, values, strict=True))
            assert [info.buffer.shape for info in inbox.infos] == [value.shape for value in values]
            del arrived
            inbox.release(micro_index)
        outbox.finish()
        assert not any(channel.sent.values())


def test_what_is_sent_is_what_the_tensor_reads_as() -> None:
    channel = Channel()
    outbox = Outbox(Edge(Traffic.FORWARD, 0, 1, 0, 1), channel.end(is_send=True), limits_open_sends=True)
    outbox.begin_step()
    numbers = torch.view_as_complex(torch.tensor([[1.0, 2.0]]))
    values = (
        numbers.conj(), numbers.conj().imag, torch.arange(6.0).view(2, 3).t(), torch.ones(2, requires_grad=True) * 2,
        AsyncCollectiveTensor(torch.full((2,), 3.0)),
    )  # fmt: skip
    send(outbox, 0, values, True)
    assert [each.tolist() for each in channel.sent["tensor"]] == [
        [1 - 2j], [-2.0], [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], [2.0, 2.0], [3.0, 3.0],
    ]  # fmt: skip
    for each in (entry for _, _, tensors in outbox._open for entry in tensors):
        assert type(each) is Tensor and each.is_contiguous() and not (each.is_conj() or each.is_neg())
    outbox.finish()


@pytest.mark.parametrize(("limits", "uniform", "num_alive"), [(True, True, 1), (False, True, 3), (True, False, 3)])
def test_what_was_sent_is_freed_when_the_next_transfer_ends(limits: bool, uniform: bool, num_alive: int) -> None:
    outbox = Outbox(Edge(Traffic.FORWARD, 0, 1, 0, 1), Channel().end(is_send=True), limits_open_sends=limits)
    outbox.begin_step()
    alive = []
    for micro_index in range(3):
        values = (torch.zeros(2),)
        alive.append(weakref.ref(values[0]))
        send(outbox, micro_index, values, uniform)
        del values
        outbox.let_go()
    assert sum(each() is not None for each in alive) == num_alive
    outbox.note_arrival(1)
    assert [each() is not None for each in alive] == [False, False, True]
    outbox.note_arrival(0)  # once more does no harm
    assert alive[2]() is not None
    outbox.finish()
    assert not any(each() for each in alive)


def test_receives_run_ahead_as_far_as_buffers_are_proven() -> None:
    edge, channel = Edge(Traffic.BACKWARD, 1, 0, 1, 0), Channel()
    inbox = Inbox(edge, channel.end(is_send=False), CPU, most_in_use=3)
    inbox.begin_step(range(6))
    for micro_index in range(6):
        inbox.expect(micro_index, (TensorLayout((2,), torch.float32, True), TensorLayout((2,), torch.bool, False)))
    inbox.post_ahead()
    assert channel.log == ["receive tensor"] * 3  # a gradient each for the one tensor that has one
    channel.sent["tensor"].extend(torch.full((2,), float(index)) for index in range(6))
    for micro_index in range(6):
        gradient, nothing = inbox.take(micro_index)
        assert gradient[0] == micro_index and nothing is None
        inbox.post_ahead()
        assert len(channel.log) == min(6, micro_index + 3)
        del gradient
        inbox.release(micro_index)
    assert inbox.pool.num_free == 3


def test_micro_batches_are_taken_in_another_order_than_they_come() -> None:
    edge, channel = Edge(Traffic.FORWARD, 0, 1, 0, 1), Channel()
    outbox = Outbox(edge, channel.end(is_send=True), limits_open_sends=False)
    inbox = Inbox(edge, channel.end(is_send=False), CPU, most_in_use=3)
    for uniform in (True, False):
        outbox.begin_step()
        inbox.begin_step(range(3))
        for micro_index in range(3):
            send(outbox, micro_index, (torch.full((3 if uniform else 2 + micro_index,), float(micro_index)),), uniform)
        for micro_index in (2, 0, 1):
            (arrived,) = inbox.take(micro_index)
            assert arrived.tolist() == [float(micro_index)] * (3 if uniform else 2 + micro_index)
            del arrived
        for micro_index in range(3):
            inbox.release(micro_index)


def test_a_receive_that_is_due_is_posted_beyond_the_limit() -> None:
    channel = Channel()
    inbox = Inbox(Edge(Traffic.BACKWARD, 1, 0, 1, 0), channel.end(is_send=False), CPU, most_in_use=1)
    inbox.begin_step(range(4))
    for micro_index in range(4):
        inbox.expect(micro_index, (TensorLayout((2,), torch.float32, True),))
    inbox.mark_due()
    inbox.mark_due()
    inbox.post_ahead()
    assert channel.log == ["receive tensor"] * 2 and inbox.is_posted(1) and not inbox.is_posted(2)
    inbox.post_ahead()
    assert len(channel.log) == 2, "neither is due any more, and the limit holds again"
