"""`fully_shard` and its two companions.

Imports torch and the rest of this package. `fully_shard` collects the parameters that no inner unit has, wraps them
in an `HSDPState` with an `HSDPScheduler`, and turns the module's class into a subclass of `HSDPModule`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from hp_train.fully_shard.module import HSDPModule
from hp_train.fully_shard.param import HSDPParam, ParamOwner
from hp_train.fully_shard.placement import DataParallelMesh, data_parallel_mesh
from hp_train.fully_shard.scheduler import HSDPScheduler
from hp_train.fully_shard.state import BucketOptions, HSDPState
from hp_train.fully_shard.torch_pipelining import answer_torch_pipelining

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims  # torch 2.13

_sharded_classes: dict[type, type] = {}
_next_tag = 0x5D0000  # messages of the engine carry tags from here on, apart from anybody's small hand-made tags


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    replicate_params: set[nn.Parameter] | None = None,
    comm_fusion: bool = True,
    comm_fusion_zero_copy: bool | None = None,
    mode: str | None = None,
) -> Any:
    """Make `module` (or several modules as one unit) a unit of sharded data parallelism, in place; inner units first.

    The unit takes every parameter below it that no inner unit has. It is gathered before its forward, freed after,
    gathered again for its backward, and its gradients are reduced and sharded after that. Parameters become
    DTensors: optimizers, torch.distributed.checkpoint, clipping and `full_tensor()` work on them.

    Up to `dp_mesh_dims` the keywords, their order and defaults are those of `torch.distributed.fsdp.fully_shard`.

    Args:
        mesh: 1-D: shard over it, or replicate with `mode="ddp"`; 2-D: replicate over the first axis, shard over the
            second. None: all ranks, 1-D.
        reshard_after_forward: True frees the parameters after forward, False keeps them for backward, an int keeps
            1/int of them and gathers again among int neighbours. None: True, but False for the root.
        shard_placement_fn: returns the `Shard(dim)` to cut a parameter along, or None for dim 0. Any size can be
            cut along any dim, also unevenly.
        mp_policy, offload_policy: torch's. Gradients accumulate in the reduce dtype. Pinning is skipped without an
            accelerator.
        ignored_params: left as they are, never moved nor reduced.
        replicate_params: kept whole on every rank of the unit's mesh, their gradients all-reduced in one bucket.
            Scalars are replicated always.
        comm_fusion: one exchange per unit and direction (per dtype, if a unit mixes dtypes); False: one per
            parameter.
        comm_fusion_zero_copy: receive each parameter where it will be used and send gradients from where they were
            computed. None chooses per parameter and backend, see `hp_train.fully_shard.bucket`.
        mode: "fsdp" (default) or "ddp" on a 1-D mesh, "hsdp" on a 2-D one. In mode ddp nothing is gathered and the
            module computes on the very memory the optimizer updates.

    Returns `module`, each now also an `HSDPModule`. Raises ValueError for arguments that do not fit together,
    NotImplementedError for `dp_mesh_dims` (pass the data-parallel submesh as `mesh`).
    """
    if dp_mesh_dims is not None:
        raise NotImplementedError("dp_mesh_dims is not part of this engine; pass the data-parallel submesh as mesh=")
    modules = list(module) if isinstance(module, list | tuple) else [module]
    _check_modules(modules)
    dp_mesh = data_parallel_mesh(mesh, mode)
    _check_choices(dp_mesh, reshard_after_forward, shard_placement_fn, comm_fusion, comm_fusion_zero_copy)
    ignored, replicated = set(ignored_params or ()), set(replicate_params or ())
    owners = _owners_of_params(modules, ignored)
    _check_known(replicated, owners, modules)
    _move_to_device(modules, list(owners), dp_mesh.device, ignored)
    params = [
        HSDPParam(param, places, dp_mesh, _shard_dim(param, dp_mesh, replicated, shard_placement_fn))
        for param, places in owners.items()
    ]
    options = BucketOptions(comm_fusion, comm_fusion_zero_copy, offload_policy)
    state = HSDPState(params, dp_mesh, mp_policy, options, _next_tag)
    _claim_tags(state.num_tags)
    scheduler = HSDPScheduler(modules, state, False if dp_mesh.mode == "ddp" else reshard_after_forward)
    for unit_module in modules:
        unit_module.__dict__["_hsdp_scheduler"] = scheduler
        unit_module.__class__ = _sharded_class(type(unit_module))
        answer_torch_pipelining(unit_module)
    return module


def _claim_tags(count: int) -> None:
    global _next_tag
    _next_tag += count


def _check_modules(modules: list[nn.Module]) -> None:
    if not modules:
        raise ValueError("fully_shard takes a module or a non-empty list of modules")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise ValueError(f"fully_shard takes nn.Modules, not {type(module).__name__}")
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
            raise ValueError(f"{type(module).__name__} has no forward, so no hook could gather it; pass its modules")
        if isinstance(module, FSDPModule):
            raise ValueError(f"fully_shard was applied to this {type(module).__name__} already")


def _check_choices(
    dp_mesh: DataParallelMesh,
    reshard_after_forward: object,
    shard_placement_fn: object,
    comm_fusion: object,
    zero_copy: object,
) -> None:
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool | int):
        raise ValueError(
            f"reshard_after_forward takes True, False, None or a group size, not {reshard_after_forward!r}"
        )
    if dp_mesh.mode == "ddp" and shard_placement_fn is not None:
        raise ValueError("shard_placement_fn has nothing to place in mode ddp, where every parameter is replicated")
    if not isinstance(comm_fusion, bool) or not (zero_copy is None or isinstance(zero_copy, bool)):
        raise ValueError("comm_fusion takes True or False, comm_fusion_zero_copy takes True, False or None")


def _check_known(replicated: set[nn.Parameter], owners: dict[nn.Parameter, Any], modules: list[nn.Module]) -> None:
    inside = {param for module in modules for param in module.parameters()}
    for param in replicated:
        if param not in owners and param not in inside:
            raise ValueError(f"replicate_params has a parameter of shape {tuple(param.shape)} that is not in the unit")


def _owners_of_params(modules: list[nn.Module], ignored: set[nn.Parameter]) -> dict[nn.Parameter, list[ParamOwner]]:
    """Every parameter of the unit, in the order of registration, with all places that hold it."""
    owners: dict[nn.Parameter, list[ParamOwner]] = {}
    for module in _managed_modules(modules):
        for name, param in module._parameters.items():
            if param is not None and param not in ignored:
                owners.setdefault(param, []).append(ParamOwner(module, name))
    return owners


def _managed_modules(modules: list[nn.Module]) -> Iterator[nn.Module]:
    """The modules of the unit, each once, not going into inner units."""
    seen: set[nn.Module] = set()

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        if module in seen or isinstance(module, FSDPModule):
            return
        seen.add(module)
        yield module
        for child in module.children():
            yield from walk(child)

    for module in modules:
        yield from walk(module)


def _move_to_device(
    modules: list[nn.Module], params: list[nn.Parameter], device: torch.device, ignored: set[nn.Parameter]
) -> None:
    """Parameters and buffers of the unit go where computation runs; what is on meta stays for a later to_empty."""
    buffers = [buffer for module in _managed_modules(modules) for buffer in module._buffers.values()]
    for tensor in (*params, *buffers):
        if tensor is None or tensor.device == device or tensor.is_meta or tensor in ignored:
            continue
        if isinstance(tensor, DTensor):
            raise ValueError(f"a DTensor on {tensor.device} cannot be sharded over a mesh of {device.type}")
        tensor.data = tensor.to(device)


def _shard_dim(
    param: nn.Parameter,
    dp_mesh: DataParallelMesh,
    replicated: set[nn.Parameter],
    placement_fn: Callable[[nn.Parameter], Shard | None] | None,
) -> int | None:
    if dp_mesh.shard is None or param.ndim == 0 or param in replicated:
        return None
    placement = placement_fn(param) if placement_fn is not None else None
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise ValueError(f"shard_placement_fn must return Shard(dim) or None, not {placement!r}")
    if not -param.ndim <= placement.dim < param.ndim:
        raise ValueError(f"shard_placement_fn chose dim {placement.dim} of a parameter of shape {tuple(param.shape)}")
    return placement.dim % param.ndim


def _sharded_class(cls: type) -> type:
    if cls not in _sharded_classes:
        _sharded_classes[cls] = type(f"HSDP{cls.__name__}", (HSDPModule, cls), {})
    return _sharded_classes[cls]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let `module.method_name(...)` gather and free the unit as `forward` does. No effect on other modules."""
    if not isinstance(module, HSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module).__name__} has no method {method_name}")
    method = getattr(module, method_name)

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        scheduler = module.hsdp_scheduler
        if scheduler.is_running_method_of(module):
            return method(*args, **kwargs)
        args, kwargs = scheduler.pre_forward(module, args, kwargs)
        with scheduler.running_method_of(module):
            output = method(*args, **kwargs)
        return scheduler.post_forward(module, args, output)

    setattr(module, method_name, wrapped)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots use the same streams and reductions in flight: the stages of a pipeline on one rank.

    Call it before their first forward. Raises ValueError for a module that fully_shard was not applied to.
    """
    for module in modules:
        if not isinstance(module, HSDPModule):
            raise ValueError(
                f"share_comm_ctx takes modules that fully_shard was applied to, not {type(module).__name__}"
            )
    if modules:
        shared = modules[0].hsdp_scheduler.comm
        for module in modules[1:]:
            module.hsdp_scheduler.scheduler_ctx.comm = shared
