"""Parameters that every data-parallel rank keeps whole: mode ddp, `replicate_params`, scalars.

Imports torch and this package's param. Nothing is gathered: in the original dtype on the compute device the full
form shares the optimizer's memory, so a replicated parameter exists once. Only if computation runs in another dtype
or on another device is there a full buffer, filled by a cast and freed like a gathered one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from hp_train.fully_shard.param import HSDPParam


class ReplicatedBucket:
    """The replicated parameters of one unit and one dtype. `tag` marks their messages."""

    def __init__(
        self,
        params: Sequence[HSDPParam],
        device: torch.device,
        *,
        storage_device: torch.device,
        pin_memory: bool,
        tag: int,
    ) -> None:
        self.params = list(params)
        self.device = device
        self.storage_device = storage_device
        self.pin_memory = pin_memory
        self.tag = tag
        self._copies: dict[HSDPParam, torch.Tensor] = {}
        for param in self.params:
            initial, param.initial = cast(torch.Tensor, param.initial), None
            param.bind_local(initial if initial.is_meta else self._at_home(initial))

    def _at_home(self, local: torch.Tensor) -> torch.Tensor:
        local = local.to(self.storage_device)
        return local.pin_memory() if self.pin_memory and not local.is_pinned() else local

    @torch.no_grad()
    def rebind(self) -> None:
        """Follow parameters whose tensors were replaced by `_apply`, `assign=True` or `to_empty`."""
        for param in self.params:
            param.adopt_registered()
            if not param.local.is_meta:
                param.bind_local(self._at_home(param.local))
            stale = param.unsharded is not None and not self._shares_memory(param)
            if stale and (param not in self._copies or param.unsharded.dtype != param.dtype):
                param.unsharded = None
                self._copies.pop(param, None)

    def _shares_memory(self, param: HSDPParam) -> bool:
        unsharded = cast(torch.Tensor, param.unsharded)
        full = unsharded.to_local() if param.inner_spec is not None else unsharded
        return full.untyped_storage().data_ptr() == param.local.untyped_storage().data_ptr()

    @torch.no_grad()
    def make_full(self, param_dtype: torch.dtype | None) -> None:
        """Build or refill the full forms, in `param_dtype` or the original dtype."""
        for param in self.params:
            local = param.local
            dtype = param_dtype if param_dtype is not None and local.is_floating_point() else local.dtype
            if dtype == local.dtype and local.device == self.device:
                if param.unsharded is None:
                    with torch.inference_mode(False):
                        param.bind_unsharded(local.detach())
                continue
            if param.unsharded is None:
                with torch.inference_mode(False):
                    self._copies[param] = torch.empty(local.size(), dtype=dtype, device=self.device)
                    param.bind_unsharded(self._copies[param].detach())
            copy = self._copies[param]
            copy.untyped_storage().resize_(copy.numel() * copy.itemsize)
            with torch.autograd._unsafe_preserve_version_counter(copy):
                copy.copy_(local, non_blocking=True)

    def free_full(self) -> None:
        for copy in self._copies.values():
            copy.untyped_storage().resize_(0)
