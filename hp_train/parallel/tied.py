"""Tied embeddings that a pipeline holds twice: one copy with the first stage, one with the last.

Both copies start from the same bits and receive the same gradient, the sum of both stages', so that the optimizer keeps
them bitwise equal. The first stage's is the original: it alone is counted in the norm and saved.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hp_train.models.shapes import EMBEDDING_NAME, HEAD_NAME
from hp_train.parallel.mesh import MeshContext


class TiedEmbeddings:
    """Sums the gradients of the two copies. Built by every rank: making the groups is collective."""

    def __init__(self, mesh: MeshContext, first_pp_rank: int, last_pp_rank: int) -> None:
        self._group: dist.ProcessGroup | None = None
        self.holds_pair = mesh.coordinates.pp in (first_pp_rank, last_pp_rank)
        if first_pp_rank != last_pp_rank:
            # One group for every place in the other dimensions, listed in the same order by all ranks.
            size = mesh.sizes.world_size // mesh.sizes.pp
            pairs = [[first_pp_rank * size + place, last_pp_rank * size + place] for place in range(size)]
            self._group, _ = dist.new_subgroups_by_enumeration([sorted(pair) for pair in pairs])

    def sync_gradients(self, parameters: dict[str, nn.Parameter]) -> None:
        """Make the gradient of each copy that this rank holds the sum of both; call after the backward passes."""
        if not self.holds_pair:
            return
        grads = [_local(parameters[name].grad) for name in (EMBEDDING_NAME, HEAD_NAME) if name in parameters]
        if self._group is None:
            total = grads[0] + grads[1]
            for grad in grads:
                grad.copy_(total)
        else:
            dist.all_reduce(grads[0], group=self._group)


def _local(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad
