"""Cutting a batch into micro-batches and joining their outputs."""

from __future__ import annotations

import pytest
import torch

from hp_train.pipeline_parallel import BatchDimSpec, merge_outputs, split_inputs


def test_text_forms() -> None:
    assert repr(BatchDimSpec(0)) == "BatchDimSpec(0)"
    assert str(BatchDimSpec(0)) == "BatchDim(dim=0)"
    assert BatchDimSpec(1) == BatchDimSpec(1) != BatchDimSpec(0)


@pytest.mark.parametrize("dim", [None, "0", 1.0, (0,), {"x": 0}, True])
def test_a_dimension_is_an_integer(dim: object) -> None:
    with pytest.raises(TypeError, match="int"):
        BatchDimSpec(dim)


def test_specs_of_many() -> None:
    assert BatchDimSpec.from_tuple((0, 1)) == (BatchDimSpec(0), BatchDimSpec(1))
    assert BatchDimSpec.from_dict({"x": 0}) == {"x": BatchDimSpec(0)}
    for value in ([0], 0, {"x": 0}, ("0",), None):
        with pytest.raises(TypeError):
            BatchDimSpec.from_tuple(value)
    for value in ([0], 0, (0,), {"x": "0"}, None):
        with pytest.raises(TypeError):
            BatchDimSpec.from_dict(value)


def test_cut_and_join_are_inverse() -> None:
    x, mask, y = torch.arange(14).view(7, 2), torch.arange(14).view(2, 7), torch.arange(7)
    parts = split_inputs(
        (x, 3), {"mask": mask, "scale": torch.ones(1, 5), "none": None}, y, num_microbatches=3,
        kwargs_spec={"mask": BatchDimSpec(1)},
    )  # fmt: skip
    assert [len(part.args[0]) for part in parts] == [3, 2, 2]  # rows need not divide
    assert all(
        part.args[1] == 3 and part.kwargs["scale"].shape == (1, 5) and part.kwargs["none"] is None for part in parts
    )
    assert torch.equal(merge_outputs([part.args[0] for part in parts]), x)
    assert torch.equal(merge_outputs([part.kwargs["mask"] for part in parts], BatchDimSpec(1)), mask)
    assert torch.equal(merge_outputs([part.targets for part in parts]), y)


def test_outputs_join_by_kind() -> None:
    losses = [(torch.tensor(1.0), {"h": torch.ones(2, 3)}), (torch.tensor(2.5), {"h": torch.zeros(1, 3)})]
    loss, named = merge_outputs(losses)
    assert loss.item() == 3.5 and named["h"].shape == (3, 3)


def test_what_can_not_be_cut_is_named() -> None:
    x = torch.zeros(4, 2)
    with pytest.raises(ValueError, match=r"kwargs\['scale'\] has 1 rows .* too few for 2 micro-batches"):
        split_inputs((x,), {"scale": torch.ones(1, 2)}, num_microbatches=2)
    with pytest.raises(ValueError, match=r"args\[0\] 4, targets 3"):
        split_inputs((x,), None, torch.zeros(3), num_microbatches=2)
    with pytest.raises(ValueError, match="args has 1 values, its spec 2"):
        split_inputs((x,), num_microbatches=2, args_spec=BatchDimSpec.from_tuple((0, 0)))
    with pytest.raises(ValueError, match="says dimension 2"):
        split_inputs((x,), num_microbatches=2, args_spec=BatchDimSpec(2))
    with pytest.raises(TypeError, match="must be a BatchDimSpec or None, not 0"):
        split_inputs((x,), num_microbatches=2, args_spec=0)
