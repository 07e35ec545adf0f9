"""Headers and pooled receive buffers."""

from __future__ import annotations

import pytest
import torch

from hp_train.pipeline_parallel.header import HEADER_LENGTH, TensorLayout, decode, encode, layouts_of
from hp_train.pipeline_parallel.mailbox import BufferPool

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
