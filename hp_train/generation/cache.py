"""Keys and values of the tokens seen so far, so that each new token costs one row of attention. Imports torch.

The cache takes the place of a block's attention core, which is a module for this purpose; the model's own file knows
nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_train.models.llama import Llama


class CachedAttentionCore(nn.Module):
    """Softmax attention of new queries over all keys so far; at most `capacity` of them."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._length = 0
        self._keys: Tensor | None = None  # [B, kv_heads, capacity, head_dim]
        self._values: Tensor | None = None

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Append `keys` and `values` [B, kv_heads, S, head_dim]; return [B, heads, S, head_dim] of `queries`."""
        assert mask is None, "one document at a time is generated"
        num_new = keys.shape[2]
        start, stop = self._length, self._length + num_new
        assert stop <= self._capacity, f"{stop} tokens for a cache of {self._capacity}"
        if self._keys is None:
            shape = (*keys.shape[:2], self._capacity, keys.shape[3])
            self._keys, self._values = keys.new_empty(shape), values.new_empty(shape)
        self._keys[:, :, start:stop], self._values[:, :, start:stop] = keys, values
        self._length = stop
        # Query i of the new ones sees the keys up to its own; torch's is_causal means that for start = 0 alone.
        seen = None
        if num_new > 1 and start > 0:
            seen = torch.ones(num_new, stop, dtype=torch.bool, device=keys.device).tril(diagonal=start)
        return F.scaled_dot_product_attention(
            queries, self._keys[:, :, :stop], self._values[:, :, :stop], attn_mask=seen,
            is_causal=num_new > 1 and start == 0, enable_gqa=keys.shape[1] != queries.shape[1],
        )  # fmt: skip


@contextmanager
def cached(model: Llama, capacity: int) -> Iterator[None]:
    """Let `model` remember up to `capacity` tokens; inside, pass only new tokens and their positions."""
    attentions = [block.self_attn for block in model.blocks.values()]
    cores = [attention.core for attention in attentions]
    for attention in attentions:
        attention.core = CachedAttentionCore(capacity)
    try:
        yield
    finally:
        for attention, core in zip(attentions, cores, strict=True):
            attention.core = core
