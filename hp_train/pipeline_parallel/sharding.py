"""Drives the data-parallel sharding inside a stage: when units gather, reshard and reduce is the schedule's word.

Imports torch. `ShardedUnits` wraps the `fully_shard` units of a module, torch's or hp-train's own, which answer to one
set of calls. During a step the units accumulate without communication and keep their gathered parameters through
backward; `reduce_grad` then reduces every unit once. `held` (between FSDP_UNSHARD and FSDP_RESHARD) keeps the whole
stage gathered; outside of it each unit follows its own reshard_after_forward. A module without units needs none of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


class ShardedUnits:
    """The sharded units of one stage, outermost first; empty for a module that is not sharded."""

    def __init__(self, module: nn.Module) -> None:
        self._units = [each for each in module.modules() if hasattr(each, "set_requires_gradient_sync")]
        self._root = module if self._units and self._units[0] is module else None
        self._accumulating = False
        self._forward_settings: list[tuple[object, object]] | None = None
        assert not self._units or self._root is not None, "shard the stage's own module last, so that it is the root"

    def __bool__(self) -> bool:
        return bool(self._units)

    def begin_step(self) -> None:
        """Turn to accumulation: no unit communicates gradients or drops its parameters after a backward."""
        if self._units and not self._accumulating:
            self._root.set_requires_gradient_sync(False)
            self._root.set_reshard_after_backward(False)
            self._root.set_is_last_backward(False)
            self._accumulating = True

    def unshard(self) -> None:
        """Gather every unit that is not gathered, and keep them so until `reshard`."""
        if not self._units:
            return
        self._hold()
        self.gather()

    def gather(self) -> None:
        """Gather every unit that is not gathered; they reshard by their own rules."""
        for unit in self._units:
            unit.unshard()

    def reshard(self) -> None:
        """Free the gathered parameters of every unit."""
        self._let_go()
        for unit in self._units:
            unit.reshard()

    def fold_gradients(self) -> None:
        """After gradients came without the units' own backward hooks: add them up in the reduction's dtype."""
        for group in self._param_groups():
            group.post_backward()

    def reduce_grad(self) -> None:
        """Reduce the accumulated gradients of every unit, one reduce-scatter each."""
        if not self._units:
            return
        root = self._root
        root.set_requires_gradient_sync(True)
        root.set_is_last_backward(True)
        # The order of a backward: what ran last reduces first, the same on every rank of the data-parallel group.
        for group in reversed(list(self._param_groups())):
            group.post_backward()
        root._get_fsdp_state()._root_post_backward_final_callback()
        self._accumulating = False

    def recover(self) -> None:
        """After an exception in the middle of a step: drop what was in flight, so that the next one can start."""
        self._let_go()
        self._accumulating = False
        if self._root is not None and hasattr(self._root, "reset_iter_state"):
            self._root.reset_iter_state()

    def _param_groups(self) -> Iterator:
        for state in dict.fromkeys(unit._get_fsdp_state() for unit in self._units):
            yield from state._fsdp_param_groups

    def _hold(self) -> None:
        if self._forward_settings is None:
            self._forward_settings = [(group, group.post_forward_mesh_info) for group in self._param_groups()]
            for group, _ in self._forward_settings:
                group.post_forward_mesh_info = None

    def _let_go(self) -> None:
        for group, setting in self._forward_settings or ():
            group.post_forward_mesh_info = setting
        self._forward_settings = None
