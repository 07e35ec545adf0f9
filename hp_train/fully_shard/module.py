"""The class that a module becomes: torch's `FSDPModule` interface, answered by our scheduler.

Imports torch and this package's scheduler. Every public method of torch's class is answered or refused here; one
that a later torch adds is refused by name (see `_refuse_unknown_methods`), never inherited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle

from hp_train.fully_shard.collectives import GroupComm
from hp_train.fully_shard.hooks import eager_only
from hp_train.fully_shard.scheduler import HSDPScheduler
from hp_train.fully_shard.settings import checked_bool


class HSDPModule(FSDPModule):
    """Mixin of every module that `fully_shard` was applied to.

    It is a `torch.distributed.fsdp.FSDPModule` in name and interface, so that code that asks for one accepts it.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Indexing or slicing a container builds a new one: of the original class, under no management."""
        original = next(base for base in cls.__mro__ if not issubclass(base, FSDPModule))
        module = original.__new__(original)
        module.__init__(*args, **kwargs)
        return module

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise RuntimeError("a sharded module cannot be deep-copied; save its state_dict, or copy it before fully_shard")

    @property
    def hsdp_scheduler(self) -> HSDPScheduler:
        return cast(HSDPScheduler, self.__dict__["_hsdp_scheduler"])

    def _schedulers(self, recurse: bool) -> list[HSDPScheduler]:
        modules = cast(nn.Module, self).modules() if recurse else [cast(nn.Module, self)]
        found = (module.__dict__.get("_hsdp_scheduler") for module in modules)
        return list(dict.fromkeys(scheduler for scheduler in found if scheduler is not None))

    # -- explicit control -----------------------------------------------------------------------------------------

    @eager_only
    def unshard(self, async_op: bool = False, *, recurse: bool = False, hold: bool = False) -> UnshardHandle | None:
        """Gather the unit's parameters and put the full ones on the modules.

        With `async_op` only starts it and returns a handle to wait on; the next forward waits as well. `recurse`
        does so for all units inside. With `hold` the units stay full until `reshard`, through any number of forward
        and backward passes: how a pipeline drives a stage, also one that computes input and weight gradients apart.
        """
        if recurse:
            self.hsdp_scheduler.scheduler_ctx.lazy_init(self.hsdp_scheduler)
        schedulers = self._schedulers(recurse)
        for scheduler in schedulers:
            scheduler.unshard(wait=False, hold=hold)
        handle = _Handle(schedulers)
        if async_op:
            return handle
        handle.wait()
        return None

    @eager_only
    def reshard(self, *, recurse: bool = False) -> None:
        """Free the full parameters and put the sharded ones on the modules. Ends a hold."""
        for scheduler in self._schedulers(recurse):
            scheduler.reshard()

    @eager_only
    def reduce_grad(self, *, recurse: bool = True) -> None:
        """Reduce the gradients that accumulated unsharded, and wait: afterwards the sharded `.grad`s are in place.

        For backward passes run with `set_requires_gradient_sync(False)`, by `backward` or piece by piece through
        `torch.autograd.grad` and `accumulate_grads`. Collective over the mesh: every rank calls it, also one whose
        parameters got no gradient. Units that are not held are resharded.
        """
        schedulers = self._schedulers(recurse)
        for scheduler in reversed(schedulers):
            scheduler.reduce_grad()
        for comm in {scheduler.comm for scheduler in schedulers}:
            comm.finish()

    @torch.no_grad()
    def accumulate_grads(self, grads: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Add gradients of full parameters, computed outside autograd's own accumulation, in the reduce dtype.

        Keys are full parameters of any unit inside (those `parameters()` yields while unsharded), values have
        their shapes. Raises KeyError for any other key.
        """
        known = {
            param.unsharded: (param, scheduler.state.reduce_dtype_of(param))
            for scheduler in self._schedulers(recurse=True)
            for param in scheduler.state.params
            if param.unsharded is not None
        }
        for key, grad in grads.items():
            if key not in known:
                raise KeyError(f"a parameter of shape {tuple(key.shape)} is no full parameter of this module's units")
            param, reduce_dtype = known[key]
            param.add_grad(grad, reduce_dtype)

    def reset_iter_state(self) -> None:
        """Give up the step under way after an exception: reshard all units, drop gradients not yet reduced.

        The next forward of the root does so by itself when it finds an interrupted step.
        """
        ctx = self.hsdp_scheduler.scheduler_ctx
        if ctx.lazy_init_done and cast(Any, self) not in (ctx.units[0].modules if ctx.units else ()):
            raise RuntimeError("reset_iter_state must be called on the root module")
        ctx.recover(drop_grads=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear every gradient: the optimizer's, whichever form the modules show now, and those not reduced yet."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for scheduler in self._schedulers(recurse=True):
            scheduler.state.zero_grad(set_to_none=set_to_none)

    # -- settings, with torch's names -----------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients; off, they accumulate unsharded in the reduce dtype."""
        for scheduler in self._schedulers(recurse):
            scheduler.set_requires_grad_sync(requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether a reduction on a 2-D mesh ends with the all-reduce; off, sums of shards accumulate."""
        for scheduler in self._schedulers(recurse):
            scheduler.set_requires_all_reduce(requires_all_reduce)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        for scheduler in self._schedulers(recurse):
            scheduler.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        for scheduler in self._schedulers(recurse):
            scheduler.set_reshard_after_backward(reshard_after_backward)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward ends the step: only then are all reductions waited for."""
        self.hsdp_scheduler.scheduler_ctx.is_last_backward = checked_bool("is_last_backward", is_last_backward)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        self.hsdp_scheduler.set_forward_prefetch_cells(cast(list[HSDPModule], modules))

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        self.hsdp_scheduler.set_backward_prefetch_cells(cast(list[HSDPModule], modules))

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by `factor` instead of the number of data-parallel ranks."""
        if not isinstance(factor, int | float) or isinstance(factor, bool) or not factor > 0:
            raise ValueError(f"gradient divide factor must be a positive number, not {factor!r}")
        self.hsdp_scheduler.state.gradient_divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """torch's older name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted for torch's sake: this engine's reductions are sums always, divided afterwards."""
        checked_bool("enable", enable)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Always on here, at no cost; turning it off is refused."""
        if not checked_bool("reduce_scatter_unused_params", reduce_scatter_unused_params):
            raise ValueError("parameters unused on some ranks always take part in this engine's reductions")

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many units' reductions may be in flight before backward waits for the oldest; one for all units."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, not {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be at least 1, not {max_input_buffers}")
        self.hsdp_scheduler.comm.max_reductions = max_input_buffers

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Give reduce-scatter a process group of its own, so that NCCL can run it beside a gather. Collective."""
        groups: dict[tuple[int, ...], GroupComm] = {}
        for scheduler in self._schedulers(recurse):
            shard = scheduler.state.dp_mesh.shard
            if shard is None:
                raise ValueError("mode ddp has no reduce-scatter")
            if not enable:
                scheduler.state.reduce_comm = shard
                continue
            ranks = tuple(dist.get_process_group_ranks(shard.group))
            if ranks not in groups:
                group = dist.new_group(list(ranks), use_local_synchronization=True)
                groups[ranks] = GroupComm(group, scheduler.device)
            scheduler.state.reduce_comm = groups[ranks]

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward needs the unit's parameters; an embedding's does not."""
        self.hsdp_scheduler.unshard_in_backward = checked_bool("unshard_in_backward", unshard_in_backward)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """`hook(flat)` runs on each reduced buffer before it is divided; a sum over further ranks belongs there."""
        if stream is not None:
            raise ValueError("set_all_reduce_hook runs on the stream that computes; synchronise inside the hook")
        self.hsdp_scheduler.state.all_reduce_hook = hook

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Gathers of the next forward wait for `event`, recorded after an optimizer step on another stream."""
        self.hsdp_scheduler.scheduler_ctx.post_optim_event = event

    def set_custom_all_gather(self, comm: Any) -> NoReturn:
        _refuse("set_custom_all_gather", "fully_shard(..., comm_fusion_zero_copy=...) chooses how gathers are laid out")

    def set_custom_reduce_scatter(self, comm: Any) -> NoReturn:
        _refuse("set_custom_reduce_scatter", "use set_all_reduce_hook, or fsdp.implementation=torch")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> NoReturn:
        _refuse(
            "set_allocate_memory_from_process_group_for_comm",
            "use comm_fusion_zero_copy=True, which needs no staging buffers, or fsdp.implementation=torch",
        )

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        _refuse("set_symm_mem_for_comm", "use fsdp.implementation=torch")

    # -- conversions ----------------------------------------------------------------------------------------------

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Conversions such as `.to()` and `to_empty()` act on the sharded parameters."""
        self.reshard()
        result = super(FSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]  # past torch's own
        self.hsdp_scheduler.state.rebind()
        return result


class _Handle(UnshardHandle):
    """Waits for gathers started by `unshard(async_op=True)`."""

    def __init__(self, schedulers: Iterable[HSDPScheduler]) -> None:
        self._schedulers = list(schedulers)

    def wait(self) -> None:
        for scheduler in self._schedulers:
            scheduler.wait_for_unshard()
        self._schedulers = []


def _refuse(name: str, alternative: str) -> NoReturn:
    raise NotImplementedError(f"{name} is not part of this engine; {alternative}")


def _refuse_unknown_methods() -> None:
    """A public method of torch's class that is not answered above would find none of torch's state: refuse it."""
    for name in vars(FSDPModule):
        if name.startswith("_") or name in vars(HSDPModule):
            continue

        def refuse(self: HSDPModule, *args: Any, _name: str = name, **kwargs: Any) -> NoReturn:
            _refuse(_name, "use fsdp.implementation=torch")

        setattr(HSDPModule, name, refuse)


_refuse_unknown_methods()
