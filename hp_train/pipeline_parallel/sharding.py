"""Drives the data-parallel sharding inside a stage: when units gather, reshard and reduce is the schedule's word.

Imports torch and the HSDP engine's module class. During a step the units accumulate without communication and keep
gathered parameters through backward; `reduce_grad` then reduces every unit once. Between `unshard` and `reshard` the
whole stage stays gathered; outside of that each unit follows its own reshard_after_forward. `HSDPUnits` drives
hp-train's own engine through its public calls; `TorchUnits` torch's `fully_shard` and `replicate`, which have no call
for a reduction apart from backward, so that it reaches for the same internals as torch's own pipeline runtime.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import nn
from torch.distributed.fsdp import FSDPModule

from hp_train.fully_shard import HSDPModule


class Units(Protocol):
    """The sharded units of one stage."""

    def begin_step(self) -> None:
        """Turn to accumulation: no unit communicates gradients or drops its parameters after a backward."""

    def unshard(self) -> None:
        """Gather every unit that is not gathered, and keep them so until `reshard`."""

    def reshard(self) -> None:
        """Free the gathered parameters of every unit."""

    def before_weight_grads(self) -> None:
        """Gather what resharding may have freed; computing weight gradients alone passes none of the units' hooks."""

    def after_weight_grads(self) -> None:
        """Add the gradients that just came to those accumulated, in the reduction's dtype."""

    def after_backward(self) -> None:
        """The same after an undivided backward, for what the units' own hooks have left."""

    def reduce_grad(self) -> None:
        """Reduce the accumulated gradients of every unit, one reduce-scatter each."""

    def recover(self) -> None:
        """After an exception in the middle of a step: drop what was in flight, so that the next one can start."""


def units_of(module: nn.Module) -> Units:
    """The driver for however `module` is sharded, or for a module that is not."""
    if isinstance(module, HSDPModule):
        return HSDPUnits(module)
    if isinstance(module, FSDPModule):
        return TorchUnits(module)
    inner = [name for name, each in module.named_modules() if isinstance(each, FSDPModule)]
    assert not inner, f"shard the stage's own module too: {inner[0]} has no root above it"
    return NoUnits()


class NoUnits:
    """A stage that is not sharded: its gradients are complete where they accumulate."""

    def begin_step(self) -> None: ...

    def unshard(self) -> None: ...

    def reshard(self) -> None: ...

    def before_weight_grads(self) -> None: ...

    def after_weight_grads(self) -> None: ...

    def after_backward(self) -> None: ...

    def reduce_grad(self) -> None: ...

    def recover(self) -> None: ...


class HSDPUnits:
    """Units of hp-train's `fully_shard`."""

    def __init__(self, root: HSDPModule) -> None:
        self._root = root

    def begin_step(self) -> None:
        """See Units."""
        self._root.set_requires_gradient_sync(False)
        self._root.set_reshard_after_backward(False)

    def unshard(self) -> None:
        """See Units."""
        self._root.unshard(recurse=True, hold=True)

    def reshard(self) -> None:
        """See Units."""
        self._root.reshard(recurse=True)

    def before_weight_grads(self) -> None:
        """See Units."""
        self._root.unshard(recurse=True)

    def after_weight_grads(self) -> None:
        """See Units."""
        for scheduler in self._root._schedulers(recurse=True):
            scheduler.state.fold_grads()

    def after_backward(self) -> None:
        """See Units. Units whose inputs need no gradient see no hook at the end of theirs."""
        self.after_weight_grads()

    def reduce_grad(self) -> None:
        """See Units."""
        self._root.set_requires_gradient_sync(True)
        self._root.reduce_grad(recurse=True)

    def recover(self) -> None:
        """See Units."""
        self._root.reset_iter_state()


class TorchUnits:
    """Units of torch's `fully_shard` or `replicate`."""

    def __init__(self, root: FSDPModule) -> None:
        self._root: Any = root
        self._units: list[Any] = [each for each in root.modules() if isinstance(each, FSDPModule)]
        self._forward_settings: list[tuple[Any, Any]] | None = None

    def begin_step(self) -> None:
        """See Units."""
        self._root.set_requires_gradient_sync(False)
        self._root.set_reshard_after_backward(False)
        self._root.set_is_last_backward(False)

    def unshard(self) -> None:
        """See Units."""
        if self._forward_settings is None:
            self._forward_settings = [(group, group.post_forward_mesh_info) for group in self._param_groups()]
            for group, _ in self._forward_settings:
                group.post_forward_mesh_info = None  # what reshard_after_forward=False means inside
        self.before_weight_grads()

    def reshard(self) -> None:
        """See Units."""
        self._restore_forward_settings()
        for unit in self._units:
            unit.reshard()

    def before_weight_grads(self) -> None:
        """See Units."""
        for unit in self._units:
            unit.unshard()

    def after_weight_grads(self) -> None:
        """See Units."""
        for group in self._param_groups():
            group.post_backward()

    def after_backward(self) -> None:
        """See Units. The root's final callback has done it."""

    def reduce_grad(self) -> None:
        """See Units."""
        self._root.set_requires_gradient_sync(True)
        self._root.set_is_last_backward(True)
        # The order of a backward: what ran last reduces first, on every rank of the data-parallel group alike.
        for group in reversed(list(self._param_groups())):
            group.post_backward()
        self._root._get_fsdp_state()._root_post_backward_final_callback()

    def recover(self) -> None:
        """See Units."""
        self._restore_forward_settings()
        if hasattr(self._root, "reset_iter_state"):  # torch 2.13
            self._root.reset_iter_state()

    def _param_groups(self) -> Iterator[Any]:
        for state in dict.fromkeys(unit._get_fsdp_state() for unit in self._units):
            # torch 2.11 has at most one group a state
            yield from getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group])

    def _restore_forward_settings(self) -> None:
        for group, setting in self._forward_settings or ():
            group.post_forward_mesh_info = setting
        self._forward_settings = None
