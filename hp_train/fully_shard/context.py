"""What the units under one root share: streams, reductions in flight, the recorded order, the state of the step.

Imports torch and this package's state; knows schedulers only as the units they drive.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hp_train.fully_shard.collectives import Stream
from hp_train.fully_shard.state import Reduction, Stages

if TYPE_CHECKING:
    from hp_train.fully_shard.scheduler import HSDPScheduler

logger = logging.getLogger("hp_train.fully_shard")


class CommContext:
    """Streams and reductions in flight. Several roots (the stages of a pipeline on one rank) may share one.

    `max_reductions` reductions are in flight at most; one more waits for the oldest.
    """

    def __init__(self, device: torch.device) -> None:
        self.gather_stream = Stream(device)
        self.reduce_stream = Stream(device)
        self.all_reduce_stream = Stream(device)
        self.max_reductions = 1
        self._in_flight: list[Reduction] = []

    def submit(self, reductions: list[Stages]) -> None:
        """Move what is in flight on by a stage, then start `reductions`.

        One stage per unit keeps the links busy (an all-reduce of one unit beside the reduce-scatter of the next)
        while the gradients of at most a few units exist at once.
        """
        for reduction in self._in_flight[: max(0, len(self._in_flight) - self.max_reductions + 1)]:
            reduction.advance()
        self._in_flight = [reduction for reduction in self._in_flight if not reduction.done]
        for stages in reductions:
            reduction = Reduction(stages)
            if not reduction.done:
                self._in_flight.append(reduction)

    def finish(self) -> None:
        """Wait for every reduction: afterwards all sharded gradients are in place."""
        for reduction in self._in_flight:
            reduction.finish()
        self._in_flight = []

    def abandon(self) -> None:
        for reduction in self._in_flight:
            reduction.abandon()
        self._in_flight = []


class SchedulerContext:
    """Shared by all units under one root.

    Attributes:
        is_last_backward: the backward under way ends the step: wait for all reductions, forget the recorded order.
        root_module: the module whose forward ran first, or None before.
        lazy_init_done: whether the units have found their root.
        units: every scheduler under the root, in the order of `named_modules`.
    """

    def __init__(self) -> None:
        self.is_last_backward = True
        self.root_module: nn.Module | None = None
        self.lazy_init_done = False
        self.units: list[HSDPScheduler] = []
        self.comm: CommContext | None = None
        self.post_optim_event: Any = None
        self.forward_root: HSDPScheduler | None = None
        self.backward_under_way = False
        self.forward_trace: list[HSDPScheduler] = []  # units as this forward entered them
        self.last_forward_trace: list[HSDPScheduler] = []
        self.backward_trace: list[HSDPScheduler] = []  # units as forward left them; backward runs it in reverse

    def lazy_init(self, root: HSDPScheduler) -> None:
        """Collect the units under `root`, name them and their parameters, make them share this context. Idempotent."""
        if self.lazy_init_done:
            return
        self.root_module = root.modules[0]
        self.comm = self.comm or CommContext(root.device)
        for module in root.modules:
            prefix_free = len(root.modules) == 1
            for name, submodule in module.named_modules():
                unit = submodule.__dict__.get("_hsdp_scheduler")
                if unit is None:
                    continue
                if unit not in self.units:
                    unit.join(self)
                    self.units.append(unit)
                own_name = name if prefix_free else type(module).__name__
                unit.state.fqn = ", ".join(filter(None, (unit.state.fqn, own_name)))
            self._name_params(module)
        self._refuse_shared_between_units()
        if root.auto_reshard_after_forward:
            root.reshard_after_forward = False  # its backward comes first: freeing would only mean gathering again
        self.lazy_init_done = True

    def _name_params(self, module: nn.Module) -> None:
        names = {param: name for name, param in module.named_parameters()}
        for unit in self.units:
            for param in unit.state.params:
                for form in (param.sharded, param.unsharded):
                    if form is not None and form in names:
                        param.fqn = names[form]

    def _refuse_shared_between_units(self) -> None:
        owner_of: dict[int, str] = {}
        for unit in self.units:
            for param in unit.state.params:
                other = owner_of.setdefault(param.original_id, param.fqn)
                if other != param.fqn:
                    raise ValueError(
                        f"parameter {param.fqn} is shared with {other} of another unit; put the modules that share "
                        "it into one unit: fully_shard([module_a, module_b])"
                    )

    # -- forward --------------------------------------------------------------------------------------------------

    def begin_forward(self, unit: HSDPScheduler) -> bool:
        """Note that `unit` enters forward; True if this begins a forward of the whole model (or of a part alone)."""
        self.lazy_init(unit)
        if self.forward_root is unit or (self.backward_under_way and self.forward_root is None):
            logger.debug("the step before ended in an exception: starting afresh")
            self.recover(drop_grads=self.backward_under_way)
        if self.forward_root is not None:
            return False
        if not self.backward_under_way and not any(each.awaits_backward for each in self.units):
            self.backward_trace.clear()  # what was recorded was dropped without a backward
        self.forward_root = unit
        self.forward_trace = []
        if self.post_optim_event is not None:
            torch.accelerator.current_stream().wait_event(self.post_optim_event)
            self.post_optim_event = None
        return True

    def end_forward(self, *, backward_follows: bool) -> None:
        """The forward of the whole model is over."""
        self.last_forward_trace, self.forward_trace = self.forward_trace, []
        self.forward_root = None
        for unit in self.units:
            unit.after_root_forward(backward_follows=backward_follows)

    def next_in_forward(self, unit: HSDPScheduler) -> HSDPScheduler | None:
        """The unit that followed in the forward before this one, as long as this one has gone the same way."""
        position = len(self.forward_trace) - 1
        recorded = self.last_forward_trace
        if position + 1 < len(recorded) and recorded[position] is unit:
            return recorded[position + 1]
        return None

    # -- backward -------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        if not self.backward_under_way:
            self.backward_under_way = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def end_backward(self) -> None:
        """Runs when the backward pass is over, whatever drove it."""
        with torch.profiler.record_function("post_backward root"):
            for unit in self.units:
                unit.after_root_backward()
            self.backward_under_way = False
            if self.is_last_backward:
                assert self.comm is not None
                self.comm.finish()
                self.backward_trace.clear()

    # -- after an exception ---------------------------------------------------------------------------------------

    def recover(self, *, drop_grads: bool) -> None:
        """Forget a step that an exception cut short: end all messages, reshard all units, drop half-made gradients."""
        if self.comm is not None:
            self.comm.abandon()
        for unit in self.units:
            unit.reset(drop_grads=drop_grads)
        self.forward_root = None
        self.backward_under_way = False
        self.forward_trace, self.last_forward_trace = [], []
        self.backward_trace.clear()
