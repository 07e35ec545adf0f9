"""Which transformer layers each pipeline stage holds. Pure, ground floor, no torch.

Stages are numbered in the order in which data flows through them; which rank holds a stage is the schedule's affair.
The first stage holds the embedding too, the last the final norm and the output matrix.
The even split gives every stage about the same number of parameters, the embedding on the first and the output matrix
on the last counted, so that memory and matrix work are level.
"""

from __future__ import annotations

from collections.abc import Sequence

from hp_train.config.schema import ModelSection
from hp_train.models.shapes import part_sizes


def split_faults(num_layers: int, num_stages: int, layer_split: Sequence[int] | None = None) -> list[str]:
    """Say why layers cannot be split so, one line a reason; an empty list when they can."""
    if layer_split is None:
        if num_layers < num_stages:
            return [f"model.num_layers={num_layers} is less than the {num_stages} pipeline stages; each needs a layer"]
        return []
    faults = []
    text = f"pp.layer_split={list(layer_split)}"
    if len(layer_split) != num_stages:
        faults.append(f"{text} has {len(layer_split)} entries; give {num_stages}, one for each pipeline stage")
    if not layer_split:
        return faults  # that it covers no layer goes without saying
    if sum(layer_split) != num_layers:
        faults.append(f"{text} covers {sum(layer_split)} layers; its sum must be model.num_layers={num_layers}")
    for index, count in enumerate(layer_split):
        if count < 0 or (count == 0 and 0 < index < len(layer_split) - 1):
            faults.append(f"{text} leaves stage {index} with {count} layers; only the first and last may have none")
    return faults


def split_layers(model: ModelSection, num_stages: int, layer_split: Sequence[int] | None = None) -> tuple[range, ...]:
    """Return the global layer numbers that each stage of `model` holds: every layer once, in order.

    layer_split: layers of each stage; None splits evenly by parameters, embedding and head counted.
    The caller has seen that `split_faults` finds nothing.
    """
    faults = split_faults(model.num_layers, num_stages, layer_split)
    assert not faults, faults
    counts = even_split(model, num_stages) if layer_split is None else layer_split
    ends = [sum(counts[: index + 1]) for index in range(num_stages)]
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))


def even_split(model: ModelSection, num_stages: int) -> list[int]:
    """Return the number of layers of each stage that brings the stages' parameter counts closest together.

    Every stage gets one layer; each further layer goes to the stage with the fewest parameters so far, which
    minimises the sum of squares (the cost of a stage is convex in its layers). Among equals the later stage wins: the
    earlier a stage, the more micro-batches it holds activations of.
    """
    assert model.num_layers >= num_stages, f"{model.num_layers} layers for {num_stages} stages"
    sizes = part_sizes(model)
    loads = [sizes.layer] * num_stages
    loads[0] += sizes.embedding
    loads[-1] += sizes.norm + sizes.head
    counts = [1] * num_stages
    for _ in range(model.num_layers - num_stages):
        lightest = min(range(num_stages), key=lambda stage: (loads[stage], -stage))
        counts[lightest] += 1
        loads[lightest] += sizes.layer
    return counts
