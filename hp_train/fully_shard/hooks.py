"""Small tools of the scheduler's hooks: tensors inside nested values, and marks in the autograd graph.

Imports torch only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])


def eager_only(hook: _F) -> _F:
    """Keep torch.compile from tracing into `hook`: it breaks the graph and runs as ordinary Python."""

    @functools.wraps(hook)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # torch.compiler.disable imports dynamo (over a second), so only once a hook runs, and by torch's own cache
        return disabled(*args, **kwargs)

    disabled = torch._disable_dynamo(hook)
    return wrapper  # type: ignore[return-value]


def in_backward() -> bool:
    """Whether autograd is running on this thread: a forward inside it is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with `fn` applied to every tensor in it; walks lists, tuples, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(fn, item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(fn, item) for item in value)
    if isinstance(value, dict):
        mapped = {key: map_tensors(fn, item) for key, item in value.items()}
        if type(value) is dict:
            return mapped
        result = value.copy()  # an OrderedDict, a ModelOutput: keeps its own type
        for key, item in mapped.items():
            result[key] = item
        return result
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: map_tensors(fn, getattr(value, name)) for name in names})
    return value


def differentiable_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors inside `value` that require a gradient, in the order of `map_tensors`."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(note, value)
    return found


class _CallAfterInputGrads(torch.autograd.Function):
    """Identity whose backward runs `callback` once the gradients of all its inputs are known."""

    @staticmethod
    def forward(
        ctx: Any, callback: Callable[[], None], probe: torch.Tensor | None, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.callback = callback
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ctx.callback()
        return (None, None, *grads)


def call_after_input_grads(
    value: Any, callback: Callable[[], None], probe: torch.Tensor | None = None
) -> tuple[Any, int | None]:
    """Arrange for `callback` when backward has left a module whose inputs are `value`.

    `probe` is a leaf that becomes an input of the mark and gets no gradient: whether a backward would reach it tells
    whether the backward is a whole one.

    Returns the inputs to use instead and the sequence number of the mark in the graph; (value, None) if nothing in
    `value` requires a gradient, in which case backward never leaves through the inputs.
    """
    tensors = differentiable_tensors(value)
    if not tensors:
        return value, None
    marked = iter(outputs := _CallAfterInputGrads.apply(callback, probe, *tensors))
    sequence_nr = outputs[0].grad_fn._sequence_nr()
    return map_tensors(lambda tensor: next(marked) if tensor.requires_grad else tensor, value), sequence_nr


def call_before_output_grads(value: Any, callback: Callable[[], None], since: int | None) -> bool:
    """Arrange for `callback` when backward reaches any tensor of `value`; False if none requires a gradient.

    The mark sits on the graph node, not on the tensor. An in-place operation on a view replaces the view's node, so
    the node of the view's base is marked as well, unless it is older than the module's forward (`since`, the number
    from `call_after_input_grads`): then it belongs to somebody else.
    """

    def run(grads: Any) -> None:
        callback()

    tensors = differentiable_tensors(value)
    for tensor in tensors:
        if tensor.grad_fn is None:
            tensor.register_hook(run)  # a leaf: a parameter or an input handed through
            continue
        tensor.grad_fn.register_prehook(run)
        base = tensor._base
        if base is not None and base.grad_fn is not None and (since is None or base.grad_fn._sequence_nr() > since):
            base.grad_fn.register_prehook(run)
    return bool(tensors)


def accumulates_into(param: torch.Tensor) -> bool:
    """Whether the running backward will reach `param`: false for one that asks for other gradients only."""
    try:
        return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(param).node)
    except RuntimeError:  # torch cannot say it of a leaf under autograd.grad(): the caller asked for this leaf
        return True
