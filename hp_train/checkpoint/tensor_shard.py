"""One rank's piece of one tensor, in the terms of torch.distributed.checkpoint. Imports torch and nothing of ours.

A `TensorShard` takes part in DCP's planning in place of a DTensor. A DTensor's mesh is needed only to learn where its
piece lies; after that a plain local tensor is easier to stage in CPU memory, to give a second name, and to test.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True, eq=False)
class TensorShard:
    """`local` holds the piece at `offsets` of a tensor of shape `global_shape`; it shares memory with the live tensor.

    The double-underscore methods are the protocol by which DCP's planners ask any object for its pieces.
    """

    local: torch.Tensor
    global_shape: torch.Size
    offsets: torch.Size

    def size(self) -> torch.Size:
        """Return the shape of the whole tensor."""
        return self.global_shape

    @property
    def is_empty(self) -> bool:
        """Return whether this rank holds nothing of a tensor that has elements (an uneven split's last ranks)."""
        return self.local.numel() == 0 and self.global_shape.numel() > 0

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if self.is_empty:
            return []
        return [ChunkStorageMetadata(self.offsets, self.local.shape)]

    def __create_write_items__(self, fqn: str, _object: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.local.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.global_shape),
            )
            for chunk in self.__create_chunk_list__()
        ]


def shard_of(tensor: torch.Tensor) -> TensorShard:
    """Return this rank's piece of `tensor`: the local part of a DTensor, all of any other tensor."""
    if not isinstance(tensor, DTensor):
        return TensorShard(tensor.detach(), tensor.shape, torch.Size([0] * tensor.dim()))
    chunks = tensor.__create_chunk_list__()
    local = tensor.detach().to_local()
    assert len(chunks) == 1 and chunks[0].sizes == local.shape, f"{tensor.placements} is not one piece: {chunks}"
    return TensorShard(local, tensor.shape, chunks[0].offsets)
