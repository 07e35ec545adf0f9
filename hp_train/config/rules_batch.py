"""Rules on how the global batch is cut. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from hp_train.config.rule import Rule, divisors_text
from hp_train.config.rules_mesh import SIZE_KEYS, known_mesh
from hp_train.config.schema import TrainerConfig

BATCH_KEYS = (
    *SIZE_KEYS, "launcher.nproc_per_node", "launcher.nodes", "trainer.global_batch_size", "trainer.micro_batch_size",
)  # fmt: skip


def known_num_microbatches(config: TrainerConfig) -> int | None:
    """Return micro-batches per rank and step; None if the batch does not divide or the mesh is not known yet."""
    mesh = known_mesh(config)
    if mesh is None:
        return None
    count, rest = divmod(config.trainer.global_batch_size, mesh.dp_size * config.trainer.micro_batch_size)
    return count if rest == 0 and count > 0 else None


def _division(config: TrainerConfig) -> Iterator[str]:
    mesh = known_mesh(config)
    if mesh is None:
        return
    batch, micro = config.trainer.global_batch_size, config.trainer.micro_batch_size
    per_pass = mesh.dp_size * micro
    if batch % per_pass == 0:
        return
    ways = [f"a multiple of {per_pass}"]
    if batch % mesh.dp_size == 0:
        ways.append(f"trainer.micro_batch_size={divisors_text(batch // mesh.dp_size)}")
    yield (
        f"trainer.global_batch_size={batch} is not divisible by {mesh.dp_size} data-parallel ranks x "
        f"trainer.micro_batch_size={micro} = {per_pass}; use {', or '.join(ways)}"
    )


def _microbatch_size(config: TrainerConfig) -> Iterator[str]:
    size = config.pp.microbatch_size
    if size is not None and size != config.trainer.micro_batch_size:
        yield (
            f"pp.microbatch_size={size} differs from trainer.micro_batch_size={config.trainer.micro_batch_size}; "
            "leave it null or give both the same value"
        )


RULES = (
    Rule(BATCH_KEYS, _division),
    Rule(("pp.microbatch_size", "trainer.micro_batch_size"), _microbatch_size),
)
