"""Layers to stages: every layer once, as even as whole layers allow, embedding and head counted."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_train.config.schema import ModelSection
from hp_train.models.shapes import num_parameters, num_parameters_of_stage
from hp_train.stage_split import split_faults, split_layers


def model_of(num_layers: int, vocab_size: int = 260, dim: int = 128) -> ModelSection:
    return ModelSection(num_layers=num_layers, vocab_size=vocab_size, dim=dim)


def loads_of(model: ModelSection, split: tuple[range, ...]) -> list[int]:
    last = len(split) - 1
    return [
        num_parameters_of_stage(model, layers, embedding=stage == 0, head=stage == last)
        for stage, layers in enumerate(split)
    ]


@given(num_layers=st.integers(1, 130), data=st.data(), vocab_size=st.sampled_from([1, 260, 50_000, 128_256]))
def test_every_layer_is_owned_once_in_order(num_layers: int, data: st.DataObject, vocab_size: int) -> None:
    model = model_of(num_layers, vocab_size)
    num_stages = data.draw(st.integers(1, num_layers))
    split = split_layers(model, num_stages)
    assert len(split) == num_stages and all(len(layers) >= 1 for layers in split)
    assert [layer for layers in split for layer in layers] == list(range(num_layers))
    assert sum(loads_of(model, split)) == num_parameters(model)


@pytest.mark.parametrize("vocab_size", [1, 260, 3000, 50_000])
@pytest.mark.parametrize(("num_layers", "num_stages"), [(4, 2), (5, 2), (6, 4), (7, 3), (9, 4), (10, 5)])
def test_no_other_split_is_more_even(num_layers: int, num_stages: int, vocab_size: int) -> None:
    model = model_of(num_layers, vocab_size)

    def unevenness(counts: tuple[int, ...]) -> int:
        ends = list(itertools.accumulate(counts))
        split = tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))
        return sum(load * load for load in loads_of(model, split))

    chosen = tuple(len(layers) for layers in split_layers(model, num_stages))
    others = (
        counts for counts in itertools.product(range(1, num_layers + 1), repeat=num_stages) if sum(counts) == num_layers
    )
    assert unevenness(chosen) == min(map(unevenness, others))


def test_ends_of_a_large_vocabulary_hold_fewer_layers() -> None:
    llama3_70b = ModelSection(vocab_size=128_256, dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, ffn_dim=28_672)
    counts = [len(layers) for layers in split_layers(llama3_70b, 8)]
    assert counts[0] < max(counts) and counts[-1] < max(counts)
    assert max(counts[1:-1]) - min(counts[1:-1]) <= 1


def test_a_split_that_was_given_is_taken() -> None:
    assert split_layers(model_of(4), 3, [1, 3, 0]) == (range(0, 1), range(1, 4), range(4, 4))


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "layer_split", "words"),
    [
        (3, 4, None, ["model.num_layers=3 is less than the 4 pipeline stages"]),
        (4, 2, [4], ["has 1 entries; give 2"]),
        (4, 2, [], ["pp.layer_split=[] has 0 entries; give 2"]),
        (4, 2, [2, 1], ["covers 3 layers"]),
        (4, 2, [3, 2], ["covers 5 layers"]),
        (4, 3, [2, 0, 2], ["leaves stage 1 with 0 layers"]),
        (4, 2, [5, -1], ["leaves stage 1 with -1 layers"]),
        (4, 3, [1, 1], ["has 2 entries", "covers 2 layers"]),
    ],
)
def test_what_cannot_be_split_says_why(
    num_layers: int, num_stages: int, layer_split: list[int] | None, words: list[str]
) -> None:
    faults = split_faults(num_layers, num_stages, layer_split)
    assert len(faults) == len(words)
    assert all(word in fault for word, fault in zip(words, faults, strict=True))
