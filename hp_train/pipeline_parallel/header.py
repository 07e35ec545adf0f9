"""What goes ahead of tensors on an edge: a fixed-size header that says how many come, and each one's layout.

Imports torch only. The receiver sizes its buffers from it, so no extra forward is needed to learn shapes and they may
change from step to step. Backward edges need none: a gradient has the layout of the output that it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

MAX_TENSORS = 16
MAX_DIMS = 8
_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128,
)  # fmt: skip
_FIELDS = 3 + MAX_DIMS  # dtype, requires_grad, number of dimensions, sizes
HEADER_LENGTH = 2 + MAX_TENSORS * _FIELDS  # count, uniform, one record a tensor


class TensorLayout(NamedTuple):
    """Shape and type of one crossing tensor, and whether its gradient comes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def layouts_of(outputs: Sequence[object], what: str) -> tuple[TensorLayout, ...]:
    """The layouts of a stage's outputs. Raises TypeError or ValueError naming `what` if one can't cross to a rank."""
    if len(outputs) > MAX_TENSORS:
        raise ValueError(f"{what} returns {len(outputs)} tensors; at most {MAX_TENSORS} cross between stages")
    layouts = []
    for index, output in enumerate(outputs):
        if not isinstance(output, Tensor):
            raise TypeError(
                f"output {index} of {what} is {type(output).__name__}; a tensor or a tuple of tensors crosses to the "
                "next stage"
            )
        if is_traceable_wrapper_subclass(output) and not isinstance(output, AsyncCollectiveTensor):
            raise TypeError(
                f"output {index} of {what} is {type(output).__name__}; a plain tensor crosses, such as to_local() gives"
            )
        if output.layout is not torch.strided:
            raise TypeError(f"output {index} of {what} has layout {output.layout}; a dense tensor crosses")
        if output.dtype not in _DTYPES:
            raise TypeError(f"output {index} of {what} has dtype {output.dtype}, which does not cross between stages")
        if output.ndim > MAX_DIMS:
            raise ValueError(f"output {index} of {what} has {output.ndim} dimensions; at most {MAX_DIMS} cross")
        layouts.append(TensorLayout(output.shape, output.dtype, output.requires_grad))
    return tuple(layouts)


@lru_cache(64)
def encode(layouts: tuple[TensorLayout, ...], uniform: bool) -> Tensor:
    """The header int64 [HEADER_LENGTH]. `uniform`: every later micro-batch of the step has these layouts too."""
    numbers = [len(layouts), int(uniform)]
    for layout in layouts:
        numbers += [_DTYPES.index(layout.dtype), int(layout.requires_grad), len(layout.shape), *layout.shape]
        numbers += [0] * (MAX_DIMS - len(layout.shape))
    return torch.tensor(numbers + [0] * (HEADER_LENGTH - len(numbers)), dtype=torch.int64)


def decode(header: Tensor) -> tuple[tuple[TensorLayout, ...], bool]:
    """The layouts in a header, and whether they hold for the rest of the step."""
    return _decode(tuple(header.tolist()))


@lru_cache(64)
def _decode(header: tuple[int, ...]) -> tuple[tuple[TensorLayout, ...], bool]:
    count, uniform, *numbers = header
    assert 0 <= count <= MAX_TENSORS, f"a header says {count} tensors: the channel is out of step"
    layouts = []
    for start in range(0, count * _FIELDS, _FIELDS):
        dtype, requires_grad, ndim, *sizes = numbers[start : start + _FIELDS]
        layouts.append(TensorLayout(tuple(sizes[:ndim]), _DTYPES[dtype], bool(requires_grad)))
    return tuple(layouts), bool(uniform)
