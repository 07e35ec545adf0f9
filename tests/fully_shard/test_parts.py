"""Cutting, dividing, marking: the parts that need no process group."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from hp_train.fully_shard.hooks import (
    call_after_input_grads,
    call_before_output_grads,
    differentiable_tensors,
    map_tensors,
)
from hp_train.fully_shard.placement import cut
from hp_train.fully_shard.reduction import ReduceRule
from hp_train.fully_shard.torch_pipelining import answer_torch_pipelining


@given(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(1, 6), st.data())
def test_cut_is_torch_chunk(size: list[int], num_shards: int, data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(size) - 1))
    pieces = cut(torch.Size(size), dim, num_shards)
    chunks = torch.empty(size).chunk(num_shards, dim)
    expected = [chunk.size(dim) for chunk in chunks] + [0] * (num_shards - len(chunks))
    assert list(pieces.lengths) == expected
    assert sum(pieces.lengths) == size[dim] and pieces.lengths[0] == max(pieces.lengths)
    assert all(pieces.numel(rank) == pieces.sizes(rank).numel() <= pieces.padded_numel for rank in range(num_shards))


@given(st.integers(1, 4096))
def test_fp16_division_is_split_exactly_and_about_evenly(divisor: int) -> None:
    before, after = ReduceRule(None, float(divisor)).factors(torch.float16)
    assert before * after == divisor
    assert before == 2 ** (int(before).bit_length() - 1), "a power of two: dividing by it rounds nothing away"
    assert before <= 2 * divisor**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_other_dtypes_divide_once_after_the_sum(dtype: torch.dtype) -> None:
    assert ReduceRule(None, 6.0).factors(dtype) == (1.0, 6.0)


def test_every_torch_pipelining_finds_what_it_reads() -> None:
    """2.11 asks a state for its one group, later ones for a list; all of them then run the root's callback."""
    reduced: list[bool] = []

    class Stage(torch.nn.Module):
        def reduce_grad(self, *, recurse: bool) -> None:
            reduced.append(recurse)

    stage = Stage()
    answer_torch_pipelining(stage)
    root = torch_fully_shard.state(stage)  # type: ignore[attr-defined]
    for state in root._state_ctx.all_states:
        assert not state._fsdp_param_group and list(state._fsdp_param_groups) == []
    root._root_post_backward_final_callback()
    assert reduced == [True]


Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    extra: list


def test_map_tensors_keeps_the_shape_of_things() -> None:
    one = torch.ones(1)
    value = {"a": [one, (one, 3)], "b": Pair(one, None), "c": Output(one, [one]), "d": OrderedDict(x=one)}
    mapped = map_tensors(lambda tensor: tensor + 1, value)
    assert mapped["a"][0] == 2 and mapped["a"][1] == (torch.tensor([2.0]), 3)
    assert isinstance(mapped["b"], Pair) and mapped["b"].left == 2 and mapped["b"].right is None
    assert isinstance(mapped["c"], Output) and mapped["c"].extra == [torch.tensor([2.0])]
    assert isinstance(mapped["d"], OrderedDict) and mapped["d"]["x"] == 2
    assert one == 1 and len(differentiable_tensors(value)) == 0


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("is_view", [False, True])
def test_marks_survive_in_place_operations(in_place: bool, is_view: bool) -> None:
    events: list[str] = []
    x = torch.randn(2, 4, requires_grad=True)
    weight = torch.randn(4, 4, requires_grad=True)
    (marked,), since = call_after_input_grads((x,), lambda: events.append("after"))
    output = marked @ weight
    output = output.view(4, 2) if is_view else output
    assert call_before_output_grads(output, lambda: events.append("before"), since)
    if in_place:
        output += 1
    output.sum().backward()
    assert events[0] == "before" and events[-1] == "after" and events.count("after") == 1


def test_no_mark_on_somebody_elses_node() -> None:
    """A module that returns a view of its input must not mark the node that made the input."""
    events: list[str] = []
    outside = torch.randn(4, requires_grad=True) * 2
    (marked,), since = call_after_input_grads((outside.view(2, 2),), lambda: None)
    call_before_output_grads(marked.view(4), lambda: events.append("before"), since)
    outside.sum().backward()
    assert events == []


def test_nothing_to_mark_without_gradients() -> None:
    value = (torch.ones(1), "text")
    assert call_after_input_grads(value, lambda: None) == (value, None)
    assert not call_before_output_grads(value, lambda: None, None)
