"""What a user sets on a unit: when it reshards, whether it reduces, what it prefetches.

Imports torch and this package's state. `HSDPScheduler` inherits these and acts on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hp_train.fully_shard.collectives import GroupComm
from hp_train.fully_shard.state import HSDPState, shard_groups_of_size

if TYPE_CHECKING:
    from hp_train.fully_shard.module import HSDPModule


class UnitSettings:
    """The settings of one unit.

    Attributes:
        state: the unit's parameters.
        reshard_after_forward: True, False, or the size of the smaller group to reshard to.
        auto_reshard_after_forward: nobody chose it; a root then turns it off for itself.
        reshard_after_backward, requires_grad_sync, requires_all_reduce, unshard_in_backward: as torch names them.
    """

    def __init__(self, state: HSDPState, reshard_after_forward: bool | int | None) -> None:
        self.state = state
        self.auto_reshard_after_forward = reshard_after_forward is None
        self.reshard_after_forward: bool | int = True if reshard_after_forward is None else reshard_after_forward
        self.reshard_after_backward = True
        self.requires_grad_sync = True
        self.requires_all_reduce = True
        self.unshard_in_backward = True
        self._part_comms: dict[int, GroupComm] = {}
        self._forward_prefetch: list[Any] | None = None
        self._backward_prefetch: list[Any] | None = None
        if isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool):
            self._set_part_size(reshard_after_forward)

    def set_reshard_after_forward(self, value: bool) -> None:
        self.reshard_after_forward = checked_bool("reshard_after_forward", value)
        self.auto_reshard_after_forward = False

    def set_reshard_after_backward(self, value: bool) -> None:
        self.reshard_after_backward = checked_bool("reshard_after_backward", value)

    def set_requires_all_reduce(self, value: bool) -> None:
        self.requires_all_reduce = checked_bool("requires_all_reduce", value)

    def set_requires_grad_sync(self, value: bool) -> None:
        """Whether backward reduces gradients; like torch, this sets `requires_all_reduce` along."""
        self.requires_grad_sync = self.requires_all_reduce = checked_bool("requires_grad_sync", value)

    def set_forward_prefetch_cells(self, modules: Sequence[HSDPModule]) -> None:
        """Units to gather right after this one's own in forward, instead of the next of the recorded order."""
        self._forward_prefetch = _schedulers_of(modules)

    def set_backward_prefetch_cells(self, modules: Sequence[HSDPModule]) -> None:
        """Units to gather right after this one's own in backward, instead of the one before it in forward."""
        self._backward_prefetch = _schedulers_of(modules)

    def _set_part_size(self, size: int) -> None:
        shard = self.state.dp_mesh.shard
        if shard is None:
            raise ValueError(f"reshard_after_forward={size} needs a sharded mesh; mode ddp shards nothing")
        part = shard_groups_of_size(self.state.dp_mesh, size)
        if size == 1 or size == shard.size:
            self.reshard_after_forward = size != 1  # a group of one keeps everything, the whole group nothing
        else:
            self._part_comms[size] = part


def checked_bool(name: str, value: bool) -> bool:
    """`value` if it is a bool; ValueError with `name` otherwise."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} takes True or False, not {value!r} ({type(value).__name__})")
    return value


def _schedulers_of(modules: Sequence[HSDPModule]) -> list[Any]:
    schedulers = []
    for module in modules:
        scheduler = getattr(module, "hsdp_scheduler", None)
        if not isinstance(scheduler, UnitSettings):
            raise ValueError(f"prefetch takes modules that fully_shard was applied to, not {type(module).__name__}")
        schedulers.append(scheduler)
    return schedulers
