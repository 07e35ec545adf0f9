"""One stage of the pipeline: the `Stage` protocol that the runtime drives, and `ModuleStage` for an nn.Module.

Imports torch and siblings. A stage keeps, per micro-batch in flight, its inputs and the edges of the autograd graph at
which backward starts; output tensors themselves are let go of as soon as they have been sent. The graph engine puts
its own slices behind the same protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from hp_train.pipeline_parallel.backward_split import PendingWeights, backward_input, backward_weight
from hp_train.pipeline_parallel.sharding import Units, units_of
from hp_train.pipeline_parallel.swap import SwapSpace

Grads = tuple[Tensor | None, ...]


class Stage(Protocol):
    """What the runtime asks of a stage. Calls for one micro-batch come in order; those of others interleave."""

    stage_index: int
    num_stages: int

    def begin_step(self, swapped: frozenset[int]) -> None:
        """Called once before every training step; `swapped` are the micro-batches with SWAP steps."""

    def forward(
        self, micro_index: int, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], targets: Any
    ) -> tuple[Tensor, ...]:
        """Return the outputs, in the last stage the loss sum alone. Under no_grad nothing is kept."""

    def backward(self, micro_index: int, output_grads: Grads) -> Grads:
        """Accumulate the parameters' gradients; return those of the inputs, None where there is none."""

    def backward_input(self, micro_index: int, output_grads: Grads) -> Grads:
        """The first half of `backward`: return the gradients of the inputs."""

    def backward_weight(self, micro_index: int) -> None:
        """The second half: accumulate the parameters' gradients."""

    def unshard(self) -> None:
        """Gather the full parameters and keep them until `reshard`."""

    def reshard(self) -> None:
        """Free the gathered parameters."""

    def reduce_grad(self) -> None:
        """Reduce the accumulated gradients over the data-parallel ranks, once a step."""

    def swap_space(self) -> SwapSpace:
        """Where SWAP steps find the activations."""

    def recover(self) -> None:
        """Forget a step that ended in an exception."""


@dataclass(slots=True)
class _InFlight:
    inputs: list[Tensor]  # those that need a gradient
    positions: list[int]  # where they stand among all inputs
    num_inputs: int
    roots: list[GradientEdge | None]  # one an output; None for outputs without gradient
    pending: PendingWeights | None = None
    postponed: Grads | None = None  # the outputs' gradients, when all of backward is left to its second half


@dataclass(slots=True)
class ModuleStage:
    """A stage that is an nn.Module, sharded by `fully_shard` or not.

    module: called as `module(*inputs, **kwargs)`, the last stage with `targets=` as well if there are any; returns a
        tensor or a tuple of tensors, in the last stage the loss summed over the micro-batch.
    loss_fn: if given, the last stage's loss is `loss_fn(module(...), targets)` instead.
    """

    module: nn.Module
    stage_index: int
    num_stages: int
    loss_fn: Callable[[Any, Any], Tensor] | None = None
    _in_flight: dict[int, _InFlight] = field(default_factory=dict, init=False)
    is_last: bool = field(init=False)
    _units: Units = field(init=False)
    _swap: SwapSpace = field(init=False)
    _swapped: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        assert 0 <= self.stage_index < self.num_stages, f"stage {self.stage_index} of {self.num_stages}"
        self.is_last = self.stage_index == self.num_stages - 1
        self._units = units_of(self.module)
        self._swap = SwapSpace(self.module)

    def begin_step(self, swapped: frozenset[int]) -> None:
        """See Stage."""
        self._swapped = swapped
        assert not self._in_flight, f"stage {self.stage_index} still holds micro-batches {sorted(self._in_flight)}"
        self._units.begin_step()

    def forward(
        self, micro_index: int, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], targets: Any
    ) -> tuple[Tensor, ...]:
        """See Stage."""
        is_training = torch.is_grad_enabled()
        if not is_training or micro_index not in self._swapped:
            outputs = self._call(inputs, kwargs, targets)
        else:
            with self._swap.saving(micro_index, (*inputs, *kwargs.values(), targets)):
                outputs = self._call(inputs, kwargs, targets)
            self._swap.keep_outputs(micro_index, outputs)
        if is_training:
            self._keep(micro_index, inputs, outputs)
        return outputs

    def _call(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], targets: Any) -> tuple[Any, ...]:
        if not self.is_last or (targets is None and self.loss_fn is None):
            outputs = self.module(*inputs, **kwargs)
        elif self.loss_fn is not None:
            outputs = self.loss_fn(self.module(*inputs, **kwargs), targets)
        else:
            outputs = self.module(*inputs, **kwargs, targets=targets)
        if self.is_last and isinstance(outputs, Tensor) and outputs.ndim > 0 and outputs.numel() == 1:
            outputs = outputs.reshape(())  # a loss of shape [1], as whole modules may return it
        return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)

    def _keep(self, micro_index: int, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
        positions = [at for at, each in enumerate(inputs) if isinstance(each, Tensor) and each.requires_grad]
        roots = [
            get_gradient_edge(each) if isinstance(each, Tensor) and each.requires_grad else None for each in outputs
        ]
        self._in_flight[micro_index] = _InFlight([inputs[at] for at in positions], positions, len(inputs), roots)

    def backward(self, micro_index: int, output_grads: Grads) -> Grads:
        """See Stage."""
        flight = self._in_flight.pop(micro_index)
        roots, root_grads = _with_gradient(flight.roots, output_grads)
        if roots:
            # What torch.autograd.backward calls after it has looked over its arguments, which is a long look at a small
            # model's scale: these are gradient edges, with gradients made for them.
            _engine_run_backward(roots, root_grads, False, False, (), allow_unreachable=True, accumulate_grad=True)
        self._units.after_backward()
        if micro_index in self._swapped:
            self._swap.forget(micro_index)
        grads = [each.grad for each in flight.inputs]
        for each in flight.inputs:
            each.grad = None
        return _spread(flight, grads)

    def backward_input(self, micro_index: int, output_grads: Grads) -> Grads:
        """See Stage."""
        flight = self._in_flight[micro_index]
        if not flight.inputs:  # nobody waits for a gradient, so the second half does it all in one run
            flight.postponed = output_grads
            return (None,) * flight.num_inputs
        roots, root_grads = _with_gradient(flight.roots, output_grads)
        grads, flight.pending = backward_input(roots, root_grads, flight.inputs)
        flight.roots, flight.inputs = [], []
        return _spread(flight, grads)

    def backward_weight(self, micro_index: int) -> None:
        """See Stage."""
        if self._in_flight[micro_index].pending is None:
            self.backward(micro_index, self._in_flight[micro_index].postponed)
            return
        flight = self._in_flight.pop(micro_index)
        self._units.before_weight_grads()
        backward_weight(flight.pending)
        self._swap.forget(micro_index)
        self._units.after_weight_grads()

    def unshard(self) -> None:
        """See Stage."""
        self._units.unshard()

    def reshard(self) -> None:
        """See Stage."""
        self._units.reshard()

    def reduce_grad(self) -> None:
        """See Stage."""
        self._units.reduce_grad()

    def swap_space(self) -> SwapSpace:
        """See Stage."""
        return self._swap

    def recover(self) -> None:
        """See Stage."""
        self._swap.forget_all()
        self._in_flight.clear()
        self._units.recover()


def _with_gradient(
    roots: Sequence[GradientEdge | None], grads: Grads
) -> tuple[tuple[GradientEdge, ...], tuple[Tensor, ...]]:
    """The roots from which backward starts, outputs that have a graph and received a gradient, and the gradients."""
    assert len(roots) == len(grads), f"{len(grads)} gradients for {len(roots)} outputs"
    pairs = zip(roots, grads, strict=True)
    chosen = [(root, grad) for root, grad in pairs if root is not None and grad is not None]
    return tuple(zip(*chosen, strict=True)) if chosen else ((), ())


def _spread(flight: _InFlight, grads: Sequence[Tensor | None]) -> Grads:
    """Gradients of the inputs that need one, put at their places among all inputs."""
    if len(grads) == flight.num_inputs:
        return tuple(grads)
    spread: list[Tensor | None] = [None] * flight.num_inputs
    for at, grad in zip(flight.positions, grads, strict=True):
        spread[at] = grad
    return tuple(spread)
