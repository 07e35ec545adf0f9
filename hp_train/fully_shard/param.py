"""One parameter in its two forms: the sharded DTensor that the optimizer sees, the full tensor that modules use.

Imports torch and this package's placement. An `HSDPParam` owns no memory: a bucket gives it views of its flat
buffers; the parameter knows which modules hold it, swaps its forms on them and keeps its unreduced gradient.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from hp_train.fully_shard.placement import DataParallelMesh, ShardCut, cut, shard_spec

_original_ids = itertools.count()


def _id_of_original(param: nn.Parameter) -> int:
    """A number for the object that was given, the same each time; tells when two units were given the same one."""
    if not hasattr(param, "_hsdp_original_id"):
        param._hsdp_original_id = next(_original_ids)  # type: ignore[attr-defined]
    return param._hsdp_original_id  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, eq=False)
class ParamOwner:
    """A place where a parameter is registered: `module._parameters[name]`."""

    module: nn.Module
    name: str

    def register(self, param: nn.Parameter) -> None:
        # nn.Module.__setattr__ checks what cannot have changed here and costs more than the swap itself
        self.module._parameters[self.name] = param


class HSDPParam:
    """A parameter under management.

    Attributes:
        fqn: name from the root module, known after the root's first forward (before: name within its module).
        owners: every place that holds it; several for a shared parameter.
        cut: how its local tensor is cut over the shard ranks; `cut.dim` None if it is replicated.
        sharded: the Parameter that optimizers, checkpoints and clipping see; a DTensor in the original dtype.
        unsharded: the Parameter that modules compute with; None before the first unshard.
        original_id: tells whether two units were given the same Parameter.
        accumulated: gradient not reduced yet, in the reduce dtype, where that is not the dtype of `.grad`.
    """

    def __init__(
        self, param: nn.Parameter, owners: list[ParamOwner], dp_mesh: DataParallelMesh, shard_dim: int | None
    ) -> None:
        """Takes over `param`; `shard_dim` None replicates. Raises ValueError for a layout that cannot be cut."""
        self.owners = owners
        self.fqn = owners[0].name
        self.original_id = _id_of_original(param)
        if hasattr(param, "_hsdp_sharded"):
            raise ValueError(
                f"parameter {self.fqn} belongs to an outer unit already; apply fully_shard to inner modules first"
            )
        local = param._local_tensor if isinstance(param, DTensor) else param
        if not local.is_contiguous():
            raise ValueError(
                f"parameter {self.fqn} of shape {tuple(local.shape)} has strides {local.stride()}; "
                "make it contiguous before fully_shard"
            )
        self.inner_spec: DTensorSpec | None = param._spec if isinstance(param, DTensor) else None
        self.cut: ShardCut = cut(local.size(), shard_dim, dp_mesh.shard_size)
        self.spec = shard_spec(param, dp_mesh, shard_dim)
        self.rank = dp_mesh.shard_rank
        self.initial: torch.Tensor | None = local.detach()  # the full local tensor, until a bucket has taken it
        self.requires_grad_at_wrap = param.requires_grad
        self.sharded: nn.Parameter = cast(nn.Parameter, None)
        self.unsharded: nn.Parameter | None = None
        self.accumulated: torch.Tensor | None = None

    @property
    def requires_grad(self) -> bool:
        return self.sharded.requires_grad if self.sharded is not None else self.requires_grad_at_wrap

    @property
    def dtype(self) -> torch.dtype:
        """The original dtype, that of the sharded form."""
        return self.local.dtype if self.sharded is not None else cast(torch.Tensor, self.initial).dtype

    @property
    def local(self) -> torch.Tensor:
        """This rank's piece, shape `cut.sizes(rank)`."""
        return cast(DTensor, self.sharded)._local_tensor

    @property
    def local_size(self) -> torch.Size:
        return self.cut.sizes(self.rank if self.cut.dim is not None else 0)

    def bind_local(self, local: torch.Tensor) -> None:
        """Make `local` this rank's piece; the Parameter object stays the same once it exists."""
        if self.sharded is None:
            self.sharded = nn.Parameter(self.to_dtensor(local), requires_grad=self.requires_grad_at_wrap)
            self.sharded._hsdp_sharded = True  # type: ignore[attr-defined]
            self.register(self.sharded)
        else:
            cast(DTensor, self.sharded)._local_tensor = local

    def adopt_registered(self) -> None:
        """Take what is registered as the sharded form; `nn.Module._apply` and `assign=True` loads replace it."""
        registered = self.owners[0].module._parameters[self.owners[0].name]
        if registered is self.sharded or registered is self.unsharded:
            return
        if not isinstance(registered, DTensor) or registered._local_tensor.shape != self.local_size:
            raise ValueError(
                f"parameter {self.fqn} was replaced by a {type(registered).__name__} of shape "
                f"{tuple(registered.shape)}; a sharded parameter may only be replaced by a DTensor of its layout"
            )
        self.sharded = registered
        self.spec = registered._spec
        self.register(registered)

    def bind_unsharded(self, full: torch.Tensor) -> None:
        """Build the full form on `full` (contiguous, shape `cut.size`), in whatever dtype computation uses."""
        tensor = full
        if self.inner_spec is not None:
            meta = self.inner_spec.tensor_meta
            assert meta is not None
            spec = replace(self.inner_spec, tensor_meta=TensorMeta(meta.shape, meta.stride, full.dtype))
            tensor = DTensor(full, spec, requires_grad=False)
        self.unsharded = nn.Parameter(tensor, requires_grad=self.sharded.requires_grad)

    def to_dtensor(self, local: torch.Tensor) -> DTensor:
        spec = self.spec
        if spec.tensor_meta is not None and spec.tensor_meta.dtype != local.dtype:
            meta = spec.tensor_meta
            spec = replace(spec, tensor_meta=TensorMeta(meta.shape, meta.stride, local.dtype))
        return DTensor(local, spec, requires_grad=False)

    def register(self, param: nn.Parameter) -> None:
        for owner in self.owners:
            owner.register(param)

    def register_unsharded(self) -> None:
        assert self.unsharded is not None
        if self.unsharded.requires_grad != self.sharded.requires_grad:
            self.unsharded.requires_grad_(self.sharded.requires_grad)
        self.register(self.unsharded)

    # -- gradients ------------------------------------------------------------------------------------------------

    def add_grad(self, grad: torch.Tensor, reduce_dtype: torch.dtype | None) -> None:
        """Accumulate a gradient of the full parameter, as backward would, in the reduce dtype."""
        self.fold_grad(reduce_dtype)
        grad = self._local_grad(grad)
        dtype = reduce_dtype or grad.dtype
        if self.accumulated is None:
            self.accumulated = grad.detach().to(dtype, copy=True)
        else:
            self.accumulated.add_(grad)

    def fold_grad(self, reduce_dtype: torch.dtype | None) -> None:
        """Move what autograd left in `.grad` into `accumulated` if the reduction runs in another dtype.

        In the same dtype autograd's own accumulation is as good, and without a copy.
        """
        unsharded = self.unsharded
        if unsharded is None or unsharded.grad is None:
            return
        if self.accumulated is None and reduce_dtype in (None, unsharded.grad.dtype):
            return
        grad = self._local_grad(unsharded.grad)
        unsharded.grad = None
        if self.accumulated is None:
            self.accumulated = grad.to(reduce_dtype)
        else:
            self.accumulated.add_(grad)

    def take_grad(self, reduce_dtype: torch.dtype | None) -> torch.Tensor | None:
        """Hand over the unreduced gradient, local shape `cut.size`, contiguous; None if there is none."""
        if self.accumulated is not None:
            self.fold_grad(reduce_dtype)
            grad, self.accumulated = self.accumulated, None
        elif self.unsharded is not None and self.unsharded.grad is not None:
            grad = self._local_grad(self.unsharded.grad)
            self.unsharded.grad = None
        else:
            return None
        return grad.contiguous()

    def has_grad(self) -> bool:
        return self.accumulated is not None or (self.unsharded is not None and self.unsharded.grad is not None)

    def grad_mark(self) -> tuple[int, int] | None:
        grad = self.unsharded.grad if self.unsharded is not None else None
        grad = self.accumulated if grad is None else grad
        return None if grad is None else (id(grad), grad._version)

    def drop_grad(self) -> None:
        self.accumulated = None
        if self.unsharded is not None:
            self.unsharded.grad = None

    def _local_grad(self, grad: torch.Tensor) -> torch.Tensor:
        if grad.layout is not torch.strided:
            raise NotImplementedError(
                f"{self.fqn} got a {grad.layout} gradient, which cannot be cut into shards; use "
                "nn.Embedding(sparse=False)"
            )
        if isinstance(grad, AsyncCollectiveTensor):
            grad = grad.wait()
        if not isinstance(grad, DTensor):
            return grad
        assert self.inner_spec is not None, f"{self.fqn}: a DTensor gradient for a plain parameter"
        return grad.redistribute(placements=self.inner_spec.placements).to_local()

    def add_sharded_grad(self, local: torch.Tensor) -> None:
        """Accumulate a reduced piece into the optimizer's `.grad`, then run the user's post-accumulate hooks."""
        if self.sharded.grad is None:
            self.sharded.grad = self.to_dtensor(local)
        else:
            cast(DTensor, self.sharded.grad)._local_tensor.add_(local)
        for hook in (getattr(self.sharded, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(self.sharded)

    def __repr__(self) -> str:
        return f"HSDPParam({self.fqn}, {tuple(self.cut.size)}, dim={self.cut.dim})"
