"""Activation checkpointing and per-block compilation of a Llama. Parallel floor: may import models and torch.

Both replace the `forward` of a block in place, so parameters keep their names, and the hooks of a sharding engine that
is applied afterwards stay outside: a block is gathered, run (compiled, recomputed) and freed. Order: checkpointing,
compilation, sharding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hp_train.models.llama import Llama

_ATEN = torch.ops.aten


def _costly_operators() -> frozenset[Any]:
    """Return matrix products and fused attention: what takes most of a block's time for part of its memory."""
    names = (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    return frozenset(getattr(_ATEN, name).default for name in names)


COSTLY_OPERATORS = _costly_operators()


def apply_activation_checkpointing(module: Llama, mode: str, every: int) -> None:
    """Make the blocks whose global number is a multiple of `every` recompute activations in backward, in place.

    `full` keeps a block's input only (Chen et al. 2016); `selective` also keeps what COSTLY_OPERATORS return and
    recomputes the rest (Korthikanti et al. 2022); `none` changes nothing. Gradients are those of `none`, bit for bit.
    Counting by global number makes the choice of blocks independent of the pipeline split.
    """
    assert mode in ("none", "full", "selective"), f"no such mode: {mode}"
    assert every >= 1, f"every={every} must be positive"
    if mode == "none":
        return
    for number, block in module.blocks.items():
        if number % every == 0:
            block.forward = _recomputed(block.forward, selective=mode == "selective")


def compile_blocks(module: Llama, **options: Any) -> None:
    """Compile each block in place; equal blocks share their code. `options` are those of torch.compile."""
    for block in module.blocks.values():
        block.forward = torch.compile(block.forward, fullgraph=True, **options)


def _recomputed(forward: Callable[..., Tensor], *, selective: bool) -> Callable[..., Tensor]:
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # blocks draw no random numbers
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Tensor:
        return checkpoint(forward, *args, **options, **kwargs)

    return run


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in COSTLY_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE
