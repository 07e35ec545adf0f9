"""The global gradient norm and clipping, each parameter counted once over every mesh.

A rank adds the squares of what it alone owns: its shard of a sharded gradient; a replicated gradient only at coordinate
0 of the dimensions that replicate it; a tied copy in another pipeline stage never. The sum over all ranks is then the
square of the norm of the whole model's gradient, whatever the mesh. Units of one model may live on different meshes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hp_train.topology import DIMENSIONS, Coordinates


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return the local parts of all gradients that exist, as views that can be scaled in place."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]


def owned_square_sum(
    parameters: Mapping[str, nn.Parameter], coordinates: Coordinates, not_owned: frozenset[str]
) -> torch.Tensor:
    """Return the sum of squares of the gradient elements that this rank owns, a float64 scalar on their device.

    `parameters` maps names to parameters; `not_owned` names those whose original is counted by another rank.
    Norms are taken in float32 a tensor and squared in float64.
    """
    owned = [
        parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        for name, parameter in parameters.items()
        if parameter.grad is not None and name not in not_owned and _is_owner(parameter.grad, coordinates)
    ]
    owned = [grad for grad in owned if grad.numel() > 0]
    if not owned:
        return torch.zeros((), dtype=torch.float64)
    norms = torch._foreach_norm([grad.float() for grad in owned])
    return torch.stack(norms).double().square().sum()


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply every gradient by `factor` in place; 1.0 touches nothing."""
    grads = local_gradients(parameters)
    if factor != 1.0 and grads:
        torch._foreach_mul_(grads, factor)


def clip_factor(norm: float, max_norm: float | None) -> float:
    """Return what gradients of this norm are multiplied by so that it is at most `max_norm`."""
    return 1.0 if max_norm is None or norm <= max_norm else max_norm / norm


def _is_owner(grad: torch.Tensor, coordinates: Coordinates) -> bool:
    """Say whether this rank counts its part: it stands at 0 along every dimension that holds copies of it."""
    sharded: set[str] = set()
    if isinstance(grad, DTensor):
        assert not any(placement.is_partial() for placement in grad.placements), "a gradient is not reduced yet"
        names = grad.device_mesh.mesh_dim_names or ()
        sharded = {name for name, placement in zip(names, grad.placements, strict=True) if not placement.is_replicate()}
    return all(getattr(coordinates, name) == 0 for name in DIMENSIONS[1:] if name not in sharded)
