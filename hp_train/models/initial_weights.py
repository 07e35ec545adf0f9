"""Initial weights as a function of seed and parameter name alone. Models floor: imports torch and `shapes`.

Every parameter is cut into blocks of whole rows, and each block is drawn on the CPU by a generator of its own, seeded
with a hash of (seed, name, block). The cut depends on the shape only, so a rank that holds a shard draws the blocks its
rows touch and copies what is its own: the numbers are those of every other mesh and device (given CPUs with the same
vector instructions), nothing is communicated, and no more than one block is ever held beside the shards.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from hp_train.config.schema import ModelSection
from hp_train.models.shapes import EMBEDDING_NAME, HEAD_NAME

BLOCK_NUMEL = 2**20  # part of the definition of the weights: another value gives other numbers


@dataclass(frozen=True, slots=True)
class Constant:
    """A parameter starts as one value everywhere."""

    value: float


@dataclass(frozen=True, slots=True)
class Normal:
    """A matrix starts as normal numbers of mean 0 and this deviation."""

    deviation: float


@torch.no_grad()
def initialize(module: nn.Module, seed: int) -> None:
    """Fill every parameter of a Llama or a stage of it (`module.config` is its ModelSection), in place.

    Norm weights are 1. Matrices are normal with deviation sqrt(2 / (5 dim)), which a model of any width learns from at
    once (Nguyen and Salazar 2019, section 2.2); those that write to the residual stream with 1 / sqrt(2 num_layers) of
    it, so that its variance does not grow with depth (Radford et al. 2019, section 2.3).
    A model that has `initial_weight(name) -> Constant | Normal` says itself how its parameters start.
    Parameters are plain tensors or DTensors, sharded or replicated in any way, on any device but meta.
    """
    config: ModelSection = module.config
    for name, parameter in module.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        assert not local.is_meta, f"{name} is on the meta device; call to_empty first"
        if hasattr(module, "initial_weight"):
            start = module.initial_weight(name)
            if isinstance(start, Constant):
                local.fill_(start.value)
                continue
        else:
            start = None
        if start is None and parameter.ndim == 1:
            assert name.endswith("norm.weight"), f"no rule for the vector {name}"
            local.fill_(1.0)
        else:
            drawn_as = EMBEDDING_NAME if name == HEAD_NAME and config.tie_embeddings else name
            deviation = _deviation(name, config) if start is None else start.deviation
            assert parameter.ndim >= 2, f"{name} is a vector; its start is a Constant"
            _fill(local, _owned_indices(parameter), parameter.shape, drawn_as, seed, deviation)


def _deviation(name: str, config: ModelSection) -> float:
    deviation = math.sqrt(2 / (5 * config.dim))
    if name.endswith(("self_attn.o_proj.weight", "mlp.down_proj.weight")):
        return deviation / math.sqrt(2 * config.num_layers)
    return deviation


def _fill(local: Tensor, owned: list[Tensor], shape: torch.Size, name: str, seed: int, deviation: float) -> None:
    """Write into `local` its rows and columns of the matrix `name`; `owned` are their global indices, ascending."""
    rows, columns = owned[0], owned[1]
    num_rows, num_columns = shape[0], shape[1]
    if len(shape) > 2:  # rows of what follows, which only ever is cut along the rows
        num_columns = shape[1:].numel()
        assert all(len(indices) == size for indices, size in zip(owned[1:], shape[1:], strict=True)), f"{name} is cut"
        local, columns = local.view(local.shape[0], -1), torch.arange(num_columns)
    block_rows = max(1, BLOCK_NUMEL // num_columns)
    all_columns = len(columns) == num_columns
    for block in torch.unique(rows // block_rows).tolist():
        first = block * block_rows
        drawn = torch.empty(min(block_rows, num_rows - first), num_columns, device="cpu", dtype=torch.float32)
        drawn.normal_(0.0, deviation, generator=_generator(seed, name, block))
        start, end = torch.searchsorted(rows, rows.new_tensor([first, first + block_rows])).tolist()
        mine = drawn if end - start == len(drawn) else drawn[rows[start:end] - first]
        local[start:end].copy_(mine if all_columns else mine[:, columns])


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest, "big", signed=True))


def _owned_indices(parameter: Tensor) -> list[Tensor]:
    """Return, per dimension of `parameter`, the global indices that this rank holds, ascending."""
    indices = [torch.arange(size, device="cpu") for size in parameter.shape]
    if not isinstance(parameter, DTensor):
        return indices
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside a parameter's mesh holds none of it"
    # A dimension sharded twice is cut from left to right in the mesh's order.
    for mesh_dim, placement in enumerate(parameter.placements):
        if isinstance(placement, Replicate):
            continue
        # FSDP over tensor parallelism marks its cut _StridedShard: each of `split_factor` pieces is cut in turn.
        pieces = _chunks(indices[placement.dim], getattr(placement, "split_factor", 1))
        num_ranks = parameter.device_mesh.size(mesh_dim)
        own = [_chunks(piece, num_ranks)[coordinate[mesh_dim]] for piece in pieces]
        indices[placement.dim] = torch.cat(own)
    return indices


def _chunks(indices: Tensor, count: int) -> list[Tensor]:
    """Cut as torch.chunk does, but into exactly `count` pieces, empty ones last."""
    chunks = list(indices.chunk(count))
    return chunks + [indices[:0]] * (count - len(chunks))
