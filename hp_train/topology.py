"""From mesh sizes to coordinates, groups and batch arithmetic. Pure; imports nothing of ours and never torch.

Dimensions, outermost first: pp, dp_replicate, dp_shard, cp, tp. A rank's coordinates are its mixed-radix digits in
that order, so neighbours in tp are neighbours in rank. Sample i of a global batch belongs to the data-parallel rank
i // (global_batch_size / dp_size): which samples a step sees, and their order, never depends on the mesh.
"""

from __future__ import annotations

from dataclasses import dataclass

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, slots=True)
class MeshSizes:
    """Number of ranks along each mesh dimension; `world_size` is their product."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        assert all(size >= 1 for size in self.as_tuple()), f"mesh sizes must be positive: {self}"

    def as_tuple(self) -> tuple[int, ...]:
        """Return the sizes in the order of `DIMENSIONS`."""
        return (self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp)

    @property
    def world_size(self) -> int:
        """Return the number of processes."""
        product = 1
        for size in self.as_tuple():
            product *= size
        return product

    @property
    def dp_size(self) -> int:
        """Return the number of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    def describe(self) -> str:
        """Return e.g. `pp 2 x dp_shard 4`: the dimensions above 1, or `1 process`."""
        parts = [f"{name} {size}" for name, size in zip(DIMENSIONS, self.as_tuple(), strict=True) if size > 1]
        return " x ".join(parts) or "1 process"


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where one rank stands in the mesh."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int

    def describe(self) -> str:
        """Return e.g. `pp 1, dp_shard 0` for error messages and logs."""
        return ", ".join(f"{name} {getattr(self, name)}" for name in DIMENSIONS)


def coordinates_of(rank: int, sizes: MeshSizes) -> Coordinates:
    """Return the coordinates of global `rank`."""
    assert 0 <= rank < sizes.world_size, f"rank {rank} is outside a world of {sizes.world_size}"
    digits = []
    for size in reversed(sizes.as_tuple()):
        rank, digit = divmod(rank, size)
        digits.append(digit)
    return Coordinates(*reversed(digits))


def dp_rank_of(coordinates: Coordinates, sizes: MeshSizes) -> int:
    """Return which slice of every global batch a rank reads; equal along pp, cp and tp."""
    return coordinates.dp_replicate * sizes.dp_shard + coordinates.dp_shard


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How a global batch is cut: `dp_size` ranks x `num_microbatches` x `micro_batch_size` sequences."""

    global_batch_size: int
    dp_size: int
    micro_batch_size: int
    seq_len: int

    def __post_init__(self) -> None:
        per_pass = self.dp_size * self.micro_batch_size
        assert self.global_batch_size % per_pass == 0, f"{per_pass} does not divide {self.global_batch_size}"

    @property
    def num_microbatches(self) -> int:
        """Return micro-batches per rank and optimizer step; without a pipeline, the accumulation count."""
        return self.global_batch_size // (self.dp_size * self.micro_batch_size)

    @property
    def tokens_per_step(self) -> int:
        """Return tokens of one optimizer step over the whole job."""
        return self.global_batch_size * self.seq_len

    def describe(self) -> str:
        """Return the first line of every run."""
        return (
            f"batch {self.global_batch_size} sequences = {self.dp_size} data-parallel x {self.micro_batch_size} "
            f"micro-batch x {self.num_microbatches} micro-batches; {self.tokens_per_step:,} tokens a step"
        )

    def samples_of(self, step: int, dp_rank: int) -> list[list[int]]:
        """Return the global sample indices of `step` (counted from 0) for one data-parallel rank, by micro-batch."""
        per_rank = self.global_batch_size // self.dp_size
        first = step * self.global_batch_size + dp_rank * per_rank
        starts = range(first, first + per_rank, self.micro_batch_size)
        return [list(range(start, start + self.micro_batch_size)) for start in starts]
