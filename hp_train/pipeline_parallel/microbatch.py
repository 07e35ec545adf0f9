"""How a batch becomes micro-batches: `BatchDimSpec` names the dimension, `split_inputs` cuts, `merge_outputs` joins.

Imports torch only. A spec mirrors the value that it describes (tuple, dict, nested); a leaf without a spec is given to
every micro-batch as it is. Rows need not divide evenly: the first micro-batches get one row more, as with
`torch.tensor_split`, and the loss stays right because it is a sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


class BatchDimSpec:
    """The dimension along which a tensor holds the samples of a batch. Raises TypeError unless it is an integer."""

    __slots__ = ("batch_dim",)

    def __init__(self, batch_dim: int) -> None:
        if not isinstance(batch_dim, int) or isinstance(batch_dim, bool):
            raise TypeError(f"batch_dim must be an int, not {type(batch_dim).__name__}")
        self.batch_dim = batch_dim

    def __repr__(self) -> str:
        return f"BatchDimSpec({self.batch_dim})"

    def __str__(self) -> str:
        return f"BatchDim(dim={self.batch_dim})"

    def __eq__(self, other: object) -> bool:
        return self.batch_dim == other.batch_dim if isinstance(other, BatchDimSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash((BatchDimSpec, self.batch_dim))

    @staticmethod
    def from_tuple(batch_dims: tuple[int, ...]) -> tuple[BatchDimSpec, ...]:
        """The spec of positional arguments, one dimension each. Raises TypeError unless given a tuple of integers."""
        if not isinstance(batch_dims, tuple):
            raise TypeError(f"batch_dims must be a tuple, not {type(batch_dims).__name__}")
        return tuple(BatchDimSpec(dim) for dim in batch_dims)

    @staticmethod
    def from_dict(batch_dims: dict[str, int]) -> dict[str, BatchDimSpec]:
        """The spec of keyword arguments, one dimension each. Raises TypeError unless given a dict of integers."""
        if not isinstance(batch_dims, dict):
            raise TypeError(f"batch_dims must be a dict, not {type(batch_dims).__name__}")
        return {name: BatchDimSpec(dim) for name, dim in batch_dims.items()}


ROWS = BatchDimSpec(0)
"""Samples along the first dimension, what nearly all tensors have."""


@dataclass(frozen=True, slots=True)
class StageInputs:
    """What one micro-batch brings from outside the pipeline.

    args: positional inputs of the first stage.
    kwargs: keyword inputs of every stage (positions, attention masks, ...).
    targets: what the last stage computes its loss against; None for a model that needs none.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    targets: Any = None


def split_inputs(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    targets: Any = None,
    *,
    num_microbatches: int,
    args_spec: Any = ROWS,
    kwargs_spec: Any = ROWS,
    targets_spec: Any = ROWS,
) -> list[StageInputs]:
    """Cut a batch into `num_microbatches` parts.

    A spec is a BatchDimSpec for all tensors of the value, or mirrors the value's tuples and dicts; None repeats.
    Raises ValueError naming the input that has fewer rows than there are micro-batches, or other rows than the rest.
    """
    kwargs = dict(kwargs or {})
    rows: dict[str, int] = {}
    cut_args = _cut(args, args_spec, num_microbatches, "args", rows)
    cut_kwargs = _cut(kwargs, kwargs_spec, num_microbatches, "kwargs", rows)
    cut_targets = _cut(targets, targets_spec, num_microbatches, "targets", rows)
    if len(set(rows.values())) > 1:
        raise ValueError(f"inputs disagree on the number of rows: {', '.join(f'{k} {v}' for k, v in rows.items())}")
    return [StageInputs(*parts) for parts in zip(cut_args, cut_kwargs, cut_targets, strict=True)]


def merge_outputs(outputs: Sequence[Any], spec: Any = ROWS) -> Any:
    """Join the outputs of all micro-batches, the inverse of the cut.

    A tensor without dimensions is summed (losses are sums); a value under a None spec must be the same everywhere and
    is returned once.
    """
    first = outputs[0]
    if isinstance(first, (tuple, list)):
        specs = spec if isinstance(spec, (tuple, list)) else [spec] * len(first)
        parts = zip(*outputs, strict=True)
        return type(first)(merge_outputs(part, each) for part, each in zip(parts, specs, strict=True))
    if isinstance(first, Mapping):
        return {
            key: merge_outputs([output[key] for output in outputs], spec[key] if isinstance(spec, Mapping) else spec)
            for key in first
        }
    if spec is None or not isinstance(first, Tensor):
        return first
    if first.ndim == 0:
        return torch.stack(list(outputs)).sum()
    return torch.cat(list(outputs), dim=spec.batch_dim)


def _cut(value: Any, spec: Any, parts: int, name: str, rows: dict[str, int]) -> list[Any]:
    """`value` once per micro-batch; notes in `rows` how many rows each tensor that was cut had."""
    if isinstance(value, (tuple, list)):
        specs = spec if isinstance(spec, (tuple, list)) else [spec] * len(value)
        if len(specs) != len(value):
            raise ValueError(f"{name} has {len(value)} values, its spec {len(specs)}")
        columns = [
            _cut(each, own, parts, f"{name}[{i}]", rows) for i, (each, own) in enumerate(zip(value, specs, strict=True))
        ]
        return [type(value)(column[part] for column in columns) for part in range(parts)]
    if isinstance(value, Mapping):
        named = {
            key: _cut(each, spec.get(key) if isinstance(spec, Mapping) else spec, parts, f"{name}[{key!r}]", rows)
            for key, each in value.items()
        }
        return [{key: column[part] for key, column in named.items()} for part in range(parts)]
    if spec is None or not isinstance(value, Tensor) or value.ndim == 0:
        return [value] * parts
    return _cut_tensor(value, spec, parts, name, rows)


def _cut_tensor(value: Tensor, spec: Any, parts: int, name: str, rows: dict[str, int]) -> list[Tensor]:
    if not isinstance(spec, BatchDimSpec):
        raise TypeError(f"the spec of {name} must be a BatchDimSpec or None, not {spec!r}")
    if not -value.ndim <= spec.batch_dim < value.ndim:
        raise ValueError(f"{name} has {value.ndim} dimensions, its spec says dimension {spec.batch_dim}")
    rows[name] = value.shape[spec.batch_dim]
    if rows[name] < parts:
        raise ValueError(
            f"{name} has {rows[name]} rows in dimension {spec.batch_dim}, too few for {parts} micro-batches; "
            "a spec of None gives the whole of it to each"
        )
    return list(value.tensor_split(parts, dim=spec.batch_dim))
