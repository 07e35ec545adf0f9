"""The order of events of one unit: when it gathers, frees, prefetches and reduces.

Imports torch and this package's context, hooks, settings, split_backward, state. A unit is one module, or several that
are gathered before the first runs and freed after the last. Hooks drive it by default; `hold` and `reduce_grad` let a
pipeline drive it.

    before forward        gather (or wait for the prefetch), prefetch the next unit
    after forward         free, unless the backward that follows keeps it
    before backward       gather again, prefetch the unit that backward reaches next
    after backward        free, start the reduction of the gradients
    end of the backward   reduce what is left, wait for all reductions

A forward inside backward is a recomputation by activation checkpointing: it uses the full parameters that are there,
gathers only if there are none, frees nothing and prefetches nothing.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn

from hp_train.fully_shard.context import CommContext, SchedulerContext, logger
from hp_train.fully_shard.hooks import (
    call_after_input_grads,
    call_before_output_grads,
    eager_only,
    in_backward,
    map_tensors,
)
from hp_train.fully_shard.settings import UnitSettings
from hp_train.fully_shard.split_backward import SplitBackward
from hp_train.fully_shard.state import Form, HSDPState


class HSDPSchedulerState(Enum):
    """What a unit is in: named after the event it saw last."""

    PRE_FORWARD = "pre_forward"  # its forward runs
    FORWARD = "forward"  # its forward is over, backward may come
    PRE_BACKWARD = "pre_backward"  # its backward runs
    BACKWARD = "backward"  # its backward is over


class _Call:
    """One forward call of a unit, as backward will meet it."""

    __slots__ = ("__weakref__", "done_in_task", "position", "since")

    def __init__(self) -> None:
        self.position = -1  # in the recorded order of the step
        self.since: int | None = None  # sequence number of the graph's mark at the inputs
        self.done_in_task = -1  # id of the backward that has passed the call


class HSDPScheduler(UnitSettings):
    """Drives one unit.

    Attributes:
        modules: the unit's modules. state: its parameters.
        scheduler_state: HSDPSchedulerState, or None before the first forward and after a recovery.
        scheduler_ctx: the SchedulerContext shared by all units under one root.
        held: gathered by hand and kept until `reshard`.
    """

    def __init__(
        self, modules: Sequence[nn.Module], state: HSDPState, reshard_after_forward: bool | int | None
    ) -> None:
        self.modules = tuple(modules)
        super().__init__(state, reshard_after_forward)
        self.device = state.dp_mesh.device
        self.scheduler_ctx = SchedulerContext()
        self.scheduler_state: HSDPSchedulerState | None = None
        self.held = False
        # Forward calls that backward has not passed yet. The graph holds them: one that is dropped without a backward
        # (an evaluation outside no_grad) takes its calls along, and nobody waits for them.
        self._calls: weakref.WeakSet[_Call] = weakref.WeakSet()
        self._current_call: _Call | None = None
        self._modules_to_run: set[nn.Module] = set()
        self._method_of: nn.Module | None = None  # a registered forward method of this module runs
        self._awaiting_weight_grads = False
        self._split = SplitBackward(state)
        self._register_hooks()

    # -- joining a root -------------------------------------------------------------------------------------------

    def join(self, ctx: SchedulerContext) -> None:
        """Become a unit of `ctx`'s root. Raises RuntimeError in the middle of another root's step."""
        mine = self.scheduler_ctx
        if mine is not ctx and mine.lazy_init_done and (mine.forward_root or mine.backward_under_way):
            raise RuntimeError(f"unit {self.state.fqn} is inside a forward or backward of another root module")
        self.scheduler_ctx = ctx
        if self.auto_reshard_after_forward:
            self.reshard_after_forward = True  # it may have been a root of its own before
        self.state.fqn = ""
        self.state.rebind()
        self.state.check_materialised()

    @property
    def comm(self) -> CommContext:
        ctx = self.scheduler_ctx
        if ctx.comm is None:
            ctx.comm = CommContext(self.device)
        return ctx.comm

    # -- explicit control -----------------------------------------------------------------------------------------

    def unshard(self, *, wait: bool = True, hold: bool = False) -> None:
        """Gather by hand. `hold` keeps the unit full until `reshard`, whatever its hooks would do."""
        if not self.scheduler_ctx.lazy_init_done:
            self.state.rebind()
            self.state.check_materialised()
        self.held = self.held or hold
        self._discard_stale()
        with self._span("unshard"):
            self.state.start_unshard(self.comm.gather_stream)
            if wait:
                self.state.finish_unshard()

    def wait_for_unshard(self) -> None:
        if self.state.sharded_form is not Form.SHARDED or not self.state.sharded_buckets:
            self.state.finish_unshard()

    def reshard(self) -> None:
        """Free the full parameters and end a hold; gradients that were not reduced stay with the unit."""
        self.held = False
        self._awaiting_weight_grads = False
        with self._span("reshard"):
            self.state.reshard()

    def reduce_grad(self) -> None:
        """Reduce what has accumulated, however it was computed; without any gradient on this rank, zeros.

        Every rank of the mesh must call it: for pipelines, after the last backward of a stage. The reductions are
        complete once `comm.finish()` returns.
        """
        self._awaiting_weight_grads = False
        self._calls.clear()
        if self.state.trainable:
            for param in self.state.trainable:
                if param.unsharded is None:
                    self.unshard()
                    break
            self._submit_reductions("reduce_grad", reshard=not self.held)
        elif not self.held:
            self.state.reshard()

    def reset(self, *, drop_grads: bool) -> None:
        """Back to sharded and idle after an exception."""
        self._calls.clear()
        self._current_call = None
        self._modules_to_run.clear()
        self.scheduler_state = None
        self.reshard()
        if drop_grads:
            self.state.drop_grads()

    # -- forward --------------------------------------------------------------------------------------------------

    def _register_hooks(self) -> None:
        for module in self.modules:
            module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.post_forward)
        for module in {owner.module for param in self.state.params for owner in param.owners}:
            module.register_state_dict_pre_hook(self._show_sharded)
            module.register_load_state_dict_pre_hook(self._show_sharded)
            module.register_load_state_dict_post_hook(self._after_load)

    def _show_sharded(self, *_: Any) -> None:
        self.state.register_sharded()

    def _after_load(self, *_: Any) -> None:
        self.state.rebind()

    @eager_only
    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Hook before a module of the unit runs."""
        if in_backward():
            return self._pre_recompute(args, kwargs)
        if module is self._method_of:
            return self._cast_inputs(args, kwargs)
        if not self._modules_to_run:
            self._modules_to_run.update(self.modules)
            first = True
        else:  # a further module of the unit, or the only one again after an exception
            first = self.scheduler_state is not HSDPSchedulerState.PRE_FORWARD or len(self.modules) == 1
        if first:
            args, kwargs = self._enter_forward(args, kwargs)
        args, kwargs = self._cast_inputs(args, kwargs)
        if first and torch.is_grad_enabled():
            call = self._current_call = _Call()
            callback = functools.partial(self._post_backward, call)
            (args, kwargs), call.since = call_after_input_grads((args, kwargs), callback, self._split.probe)
        return args, kwargs

    @contextlib.contextmanager
    def running_method_of(self, module: nn.Module) -> Iterator[None]:
        """A method registered as a forward runs and may call `module` itself: the unit is entered already."""
        outer, self._method_of = self._method_of, module
        try:
            yield
        finally:
            self._method_of = outer

    def is_running_method_of(self, module: nn.Module) -> bool:
        return self._method_of is module

    def _enter_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        ctx = self.scheduler_ctx
        if ctx.begin_forward(self):
            self._modules_to_run.update(self.modules)  # a recovery may have emptied it
            if self.device.type != "cpu":
                args, kwargs = map_tensors(lambda tensor: tensor.to(self.device), (args, kwargs))
        self.scheduler_state = HSDPSchedulerState.PRE_FORWARD
        ctx.forward_trace.append(self)
        self._discard_stale()
        with self._span("pre_forward unshard"):
            self.state.start_unshard(self.comm.gather_stream)
            self.state.finish_unshard()
        targets = self._forward_prefetch
        if targets is None:
            following = ctx.next_in_forward(self)
            targets = [following] if following is not None else []
        self._prefetch(targets, "forward prefetch")
        return args, kwargs

    def _pre_recompute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        with self._span("recompute unshard"):
            self.state.start_unshard(self.comm.gather_stream)
            self.state.finish_unshard()
        args, kwargs = self._cast_inputs(args, kwargs)
        self._current_call = None
        if torch.is_grad_enabled() and self.scheduler_state is not HSDPSchedulerState.PRE_BACKWARD:
            # reentrant checkpointing: this recomputation is the forward that backward goes through
            call = self._current_call = _Call()
            callback = functools.partial(self._post_backward, call)
            (args, kwargs), call.since = call_after_input_grads((args, kwargs), callback, self._split.probe)
        return args, kwargs

    @eager_only
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Hook after a module of the unit ran."""
        if in_backward():
            if self._current_call is not None:
                self._watch_outputs(output)
            return self._cast_outputs(output)
        if module is self._method_of:
            return self._cast_outputs(output)
        ctx = self.scheduler_ctx
        self._modules_to_run.discard(module)
        alone = ctx.forward_root is self  # a module of the unit called outside the model's forward
        if self._modules_to_run and not alone:
            self._watch_outputs(output)  # the modules that follow may never run, or not before backward comes here
            return self._cast_outputs(output)
        backward_follows = self._leave_forward(output)
        if alone:
            ctx.end_forward(backward_follows=backward_follows)
        return self._cast_outputs(output)

    def _leave_forward(self, output: Any) -> bool:
        """The unit's forward is over; returns whether a backward can come back to it."""
        self._modules_to_run.clear()
        backward_follows = self._watch_outputs(output)
        self.scheduler_state = HSDPSchedulerState.FORWARD
        self._current_call = None
        self._reshard_after_forward()
        return backward_follows

    def _watch_outputs(self, output: Any) -> bool:
        call = self._current_call
        if call is None or not torch.is_grad_enabled():
            return False
        watched = call_before_output_grads(output, functools.partial(self._pre_backward, call), call.since)
        if watched and call not in self._calls:
            self._calls.add(call)
            if not in_backward():
                call.position = len(self.scheduler_ctx.backward_trace)
                self.scheduler_ctx.backward_trace.append(self)
        return watched

    def _reshard_after_forward(self) -> None:
        if self.held or self._awaiting_weight_grads or self.reshard_after_forward is False:
            return
        with self._span("post_forward reshard"):
            if self.reshard_after_forward is True:
                self.state.reshard()
            else:
                self.state.reshard_to(self._part_comms[self.reshard_after_forward])

    @property
    def awaits_backward(self) -> bool:
        """Whether a graph exists through which backward can come to this unit."""
        return len(self._calls) > 0

    def after_root_forward(self, *, backward_follows: bool) -> None:
        """Clean up at the end of the model's forward: half-run units, prefetches nobody used."""
        if self._modules_to_run:
            self._modules_to_run.clear()
            self._current_call = None
            self.scheduler_state = HSDPSchedulerState.FORWARD
            self._reshard_after_forward()
        if self.held:
            return
        if self.state.sharded_form is Form.GATHERING:
            self.state.reshard()
        elif not backward_follows and not self._awaiting_weight_grads:
            # No backward will free the unit. Kept full by the user's wish, it still shows the sharded parameters:
            # an optimizer built now must find those.
            if self.auto_reshard_after_forward:
                self.state.reshard()
            else:
                self.state.register_sharded()

    # -- backward -------------------------------------------------------------------------------------------------

    @eager_only
    def _pre_backward(self, call: _Call) -> None:
        if call.done_in_task == torch._C._current_graph_task_id():
            return  # the mark on an older node, reached after the unit is done
        self.scheduler_ctx.begin_backward()
        if self.scheduler_state is HSDPSchedulerState.PRE_BACKWARD and self.state.is_full:
            return
        was_full = self.state.is_full
        self.scheduler_state = HSDPSchedulerState.PRE_BACKWARD
        if self.unshard_in_backward:
            with self._span("pre_backward unshard"):
                self.state.start_unshard(self.comm.gather_stream)
                self.state.finish_unshard()
        self._split.enter(was_full=was_full, marked=call.since is not None)
        self._prefetch(self._backward_targets(call), "backward prefetch")

    def _backward_targets(self, call: _Call) -> list[HSDPScheduler]:
        if self._backward_prefetch is not None:
            return self._backward_prefetch
        if call.position < 1 or call.position > len(self.scheduler_ctx.backward_trace):
            return []
        return [self.scheduler_ctx.backward_trace[call.position - 1]]

    @eager_only
    def _post_backward(self, call: _Call) -> None:
        call.done_in_task = torch._C._current_graph_task_id()
        self._calls.discard(call)
        self.scheduler_ctx.begin_backward()
        self.scheduler_state = HSDPSchedulerState.BACKWARD
        if self._leaves_weights_to_later():
            self._awaiting_weight_grads = True
            return
        # With other calls still to come their gradients may all arrive with the last: an empty reduction would be
        # one message too many. With none to come, ranks that did use the parameters wait for this one.
        if self.requires_grad_sync and self.state.trainable and (self.state.has_grads() or not self._calls):
            self._submit_reductions("post_backward", reshard=self._frees_after_backward)
        elif self._frees_after_backward:
            with self._span("post_backward reshard"):
                self.state.reshard()
        else:
            self.state.fold_grads()

    def _leaves_weights_to_later(self) -> bool:
        return self._split.leave(pipelined=not self.scheduler_ctx.is_last_backward and not self.requires_grad_sync)

    @property
    def _frees_after_backward(self) -> bool:
        return self.reshard_after_backward and not self.held and not self._awaiting_weight_grads

    def _submit_reductions(self, event: str, *, reshard: bool) -> None:
        comm = self.comm
        with self._span(event):
            reductions = self.state.take_reductions(
                (comm.reduce_stream, comm.all_reduce_stream), all_reduce=self.requires_all_reduce
            )
            if reshard:  # before the reduction allocates its buffers
                with self._span(f"{event} reshard"):
                    self.state.reshard()
            comm.submit(reductions)

    def after_root_backward(self) -> None:
        """The backward pass is over: reduce gradients that no hook saw, free what is left."""
        if self.scheduler_state is HSDPSchedulerState.PRE_BACKWARD or self.state.has_grads():
            # backward left no mark behind because no input required a gradient
            self.scheduler_state = HSDPSchedulerState.BACKWARD
            self._awaiting_weight_grads = self._leaves_weights_to_later() or self._awaiting_weight_grads
            if self.requires_grad_sync and self.state.trainable and not self._awaiting_weight_grads:
                self._submit_reductions("post_backward", reshard=self._frees_after_backward)
        if self.scheduler_ctx.is_last_backward:
            self._calls.clear()
        if self._frees_after_backward and not self.state.is_sharded:
            with self._span("post_backward reshard"):
                self.state.reshard()

    # -- shared ---------------------------------------------------------------------------------------------------

    def _discard_stale(self) -> None:
        """Full parameters from before an optimizer step or a load must not be used again."""
        if self.state.is_stale:
            self.state.reshard()

    def _prefetch(self, targets: Sequence[HSDPScheduler], event: str) -> None:
        for target in targets:
            if target is not self and not target.state.is_full:
                with target._span(event):
                    target._discard_stale()
                    target.state.start_unshard(self.comm.gather_stream)

    def _cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        policy = self.state.mp_policy
        if policy.param_dtype is None or not policy.cast_forward_inputs:
            return args, kwargs
        return map_tensors(functools.partial(_cast, policy.param_dtype), (args, kwargs))

    def _cast_outputs(self, output: Any) -> Any:
        dtype = self.state.mp_policy.output_dtype
        return output if dtype is None else map_tensors(functools.partial(_cast, dtype), output)

    @contextlib.contextmanager
    def _span(self, event: str) -> Iterator[None]:
        label = f"{event}:{self.state.fqn or 'root'}"
        logger.debug(label)
        with torch.profiler.record_function(label):
            yield


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
