"""Where data-parallel ranks sit and how one parameter is cut over them.

Imports torch and this package's collectives. `DataParallelMesh` says which mesh axis shards and which replicates;
`shard_spec` gives the DTensor layout of a parameter on it, with or without tensor parallelism underneath.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from hp_train.fully_shard.collectives import GroupComm

Mode = Literal["fsdp", "ddp", "hsdp"]


@dataclass(frozen=True, slots=True, eq=False)
class DataParallelMesh:
    """The data-parallel ranks: `shard` is None in mode ddp, `replicate` is None in mode fsdp.

    `device` is where computation runs. With `replicate` the first mesh axis replicates, the last one shards.
    """

    mesh: DeviceMesh
    mode: Mode
    device: torch.device
    shard: GroupComm | None
    replicate: GroupComm | None

    @property
    def shard_size(self) -> int:
        return self.shard.size if self.shard else 1

    @property
    def shard_rank(self) -> int:
        return self.shard.rank if self.shard else 0

    @property
    def comms(self) -> tuple[GroupComm, ...]:
        """All groups over which a replicated parameter's gradient is summed, innermost first."""
        return tuple(comm for comm in (self.shard, self.replicate) if comm is not None)

    @property
    def size(self) -> int:
        return self.mesh.size()


def data_parallel_mesh(mesh: DeviceMesh | None, mode: str | None) -> DataParallelMesh:
    """Read a 1-D (shard, or replicate in mode ddp) or 2-D (replicate x shard) mesh.

    Raises ValueError for any other number of axes, an unknown mode, or a mode that does not fit the mesh.
    """
    if mesh is None:
        mesh = _default_mesh()
    if mesh.ndim not in (1, 2):
        raise ValueError(f"mesh has {mesh.ndim} axes; fully_shard takes 1 (shard, or replicate with mode='ddp') or 2")
    valid = ("fsdp", "ddp") if mesh.ndim == 1 else ("hsdp",)
    mode = valid[0] if mode is None else mode
    if mode not in valid:
        raise ValueError(f"mode={mode!r} does not fit a mesh of {mesh.ndim} axes; use {' or '.join(map(repr, valid))}")
    device = _device_of(mesh)
    groups = [GroupComm(mesh.get_group(axis), device) for axis in range(mesh.ndim)]
    shard = None if mode == "ddp" else groups[-1]
    replicate = None if mode == "fsdp" else groups[0]
    return DataParallelMesh(mesh, mode, device, shard, replicate)  # type: ignore[arg-type]


def _default_mesh() -> DeviceMesh:
    """All ranks on one axis, on the accelerator if there is one."""
    if not dist.is_initialized():
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return dist.init_device_mesh(accelerator.type if accelerator else "cpu", (dist.get_world_size(),))


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


@dataclass(frozen=True, slots=True)
class ShardCut:
    """How one local tensor is cut: along `dim`, `lengths[r]` rows to shard rank r, the first piece a longest one.

    `numels[r]` counts the elements of rank r's piece. `dim` None means every rank keeps the whole tensor.
    """

    dim: int | None
    size: torch.Size
    lengths: tuple[int, ...]
    numels: tuple[int, ...]

    def sizes(self, rank: int) -> torch.Size:
        """Shape of the piece that `rank` holds."""
        if self.dim is None:
            return self.size
        return torch.Size((*self.size[: self.dim], self.lengths[rank], *self.size[self.dim + 1 :]))

    def start(self, rank: int) -> int:
        return sum(self.lengths[:rank])

    def numel(self, rank: int) -> int:
        return self.numels[rank]

    @property
    def padded_numel(self) -> int:
        """Elements of the longest piece: what every rank's slot in a flat buffer takes."""
        return self.numels[0]


def cut(size: torch.Size, dim: int | None, num_shards: int) -> ShardCut:
    """Cut `size` along `dim` as `torch.chunk` does: pieces of ceil(n / num_shards), the last ones short or empty."""
    if dim is None:
        return ShardCut(None, size, (0,), (size.numel(),))
    total = size[dim]
    chunk = -(-total // num_shards)
    lengths = tuple(max(0, min(chunk, total - rank * chunk)) for rank in range(num_shards))
    row = torch.Size((*size[:dim], *size[dim + 1 :])).numel()
    return ShardCut(dim, size, lengths, tuple(length * row for length in lengths))


def shard_spec(param: torch.Tensor, dp_mesh: DataParallelMesh, dim: int | None) -> DTensorSpec:
    """Layout of the parameter that the optimizer sees; a tensor-parallel DTensor keeps its own axes innermost.

    Raises NotImplementedError for a DTensor that lies on more than two axes of its own.
    """
    placements: list[Placement] = [Replicate()] if dp_mesh.replicate else []
    if not isinstance(param, DTensor):
        if dp_mesh.shard:
            placements.append(Replicate() if dim is None else Shard(dim))
        meta = TensorMeta(param.size(), param.stride(), param.dtype)
        return DTensorSpec(dp_mesh.mesh, tuple(placements), tensor_meta=meta)
    inner = param._spec
    if len(inner.placements) > 2:
        raise NotImplementedError(f"a parameter may be a DTensor on at most 2 axes of its own, not {inner.placements}")
    if dp_mesh.shard:
        placements.append(_placement_over_tensor_parallel(inner, dim))
    mesh = DeviceMesh._concatenate([dp_mesh.mesh, inner.mesh])
    return DTensorSpec(mesh, (*placements, *inner.placements), tensor_meta=inner.tensor_meta)


def _placement_over_tensor_parallel(inner: DTensorSpec, dim: int | None) -> Placement:
    """Data parallel cuts the piece that tensor parallel left, though its mesh axis stands further out: strided."""
    if dim is None:
        return Replicate()
    split_factor = inner.num_shards_map[dim]
    return _StridedShard(dim, split_factor=split_factor) if split_factor > 1 else Shard(dim)
