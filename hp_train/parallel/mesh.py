"""The device mesh of one rank and the process groups that training asks for.

Reads `topology` and torch.distributed; knows no model. Only dimensions larger than 1 become mesh dimensions: a group of
one rank costs start-up time and moves nothing. Every rank must build the context at the same point.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_train.topology import DIMENSIONS, Coordinates, MeshSizes, coordinates_of, dp_rank_of


@dataclass(frozen=True)
class MeshContext:
    """Where this rank stands and whom it talks to."""

    sizes: MeshSizes
    rank: int
    device: torch.device
    device_mesh: DeviceMesh | None  # named dimensions larger than 1; None in a world of one

    @classmethod
    def build(cls, sizes: MeshSizes, device: torch.device) -> MeshContext:
        """Make the mesh over the default process group, whose size must be `sizes.world_size`."""
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        assert world_size == sizes.world_size, f"{world_size} processes for a mesh of {sizes.world_size}"
        wide = {name: size for name, size in zip(DIMENSIONS, sizes.as_tuple(), strict=True) if size > 1}
        mesh = None
        if wide:
            mesh = init_device_mesh(device.type, tuple(wide.values()), mesh_dim_names=tuple(wide))
        return cls(sizes, rank, device, mesh)

    @cached_property
    def coordinates(self) -> Coordinates:
        """Return this rank's place in the mesh."""
        return coordinates_of(self.rank, self.sizes)

    @property
    def dp_rank(self) -> int:
        """Return which slice of the global batch this rank reads."""
        return dp_rank_of(self.coordinates, self.sizes)

    @property
    def pp_group(self) -> dist.ProcessGroup | None:
        """Return the group of the ranks that hold the stages of this rank's copy, in stage order; None without one."""
        return self.device_mesh.get_group("pp") if self.sizes.pp > 1 else None

    def data_parallel_mesh(self, *, at_least_one: bool = False) -> DeviceMesh | None:
        """Return the mesh that shards and replicates parameters: (dp_replicate, dp_shard), or the one above 1, or None.

        With `at_least_one`, a dp_shard mesh of this rank alone stands in for None: the sharding engine is then used for
        its mixed precision, so that one rank computes as many do. Making that is collective over all ranks.
        """
        names = [name for name in ("dp_replicate", "dp_shard") if getattr(self.sizes, name) > 1]
        if not names:
            return self._lone_mesh() if at_least_one else None
        return self.device_mesh[tuple(names)] if len(names) > 1 else self.device_mesh[names[0]]

    def _lone_mesh(self) -> DeviceMesh:
        names = ("pp", "dp_shard") if self.sizes.pp > 1 else ("dp_shard",)
        shape = (self.sizes.pp, 1) if self.sizes.pp > 1 else (1,)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=names)["dp_shard"]

    def gather(self, values: list[float]) -> torch.Tensor:
        """Return every rank's `values` as float64 [world_size, len(values)] on the host, the same on all ranks.

        One message carries all that ranks must agree on; summed by rank order, so that the bits never depend on the
        backend's reduction tree.
        """
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.device_mesh is None:
            return own.cpu().unsqueeze(0)
        rows = [torch.empty_like(own) for _ in range(self.sizes.world_size)]
        dist.all_gather(rows, own)
        return torch.stack(rows).cpu()
