"""The Llama family on one device, whole or as one pipeline stage. Models floor: imports torch, the schema and siblings.

Parameters carry Hugging Face's names with global layer numbers in every stage, so one namespace serves checkpoints,
optimizers and all meshes. Attention core, MLP, rotary embedding and loss are modules of their own, which parallelism
replaces or wraps without editing this file. Touvron et al. 2023; Grattafiori et al. 2024 (Llama 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch.nn.functional as F
from torch import Tensor, nn

from hp_train.config.schema import ModelSection
from hp_train.models.loss import ChunkedCrossEntropy
from hp_train.models.rope import RotaryEmbedding
from hp_train.models.shapes import head_dim, num_kv_heads


class AttentionCore(nn.Module):
    """Softmax attention between projected heads, causal unless a mask says otherwise. Has no parameters."""

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Return [B, heads, S, head_dim] from queries of that shape and keys and values [B, kv_heads, S, head_dim].

        `mask` is bool [B, 1, S, S], true where a row's query sees a column's key; None is causal.
        """
        grouped = keys.shape[1] != queries.shape[1]
        if grouped and mask is not None:
            # With a mask the fused CUDA kernels take as many key as query heads only; the fallback holds S x S scores.
            repeats = queries.shape[1] // keys.shape[1]
            keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
            grouped = False
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )


class Attention(nn.Module):
    """Grouped-query attention with rotary positions (Ainslie et al. 2023)."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.head_dim = head_dim(config)
        kv_dim = num_kv_heads(config) * self.head_dim
        q_dim = config.num_heads * self.head_dim
        self.q_proj = nn.Linear(config.dim, q_dim, bias=False)
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(q_dim, config.dim, bias=False)
        self.rotary = RotaryEmbedding(config)
        self.core = AttentionCore()

    def forward(self, hidden: Tensor, positions: Tensor | None, mask: Tensor | None) -> Tensor:
        """Return [B, S, dim] from [B, S, dim]."""
        queries, keys, values = (
            projection(hidden).unflatten(-1, (-1, self.head_dim))  # [B, S, heads, head_dim]
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = self.rotary(queries, keys, positions)
        attended = self.core(queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), mask)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """Gated MLP with SiLU (Shazeer 2020)."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down_proj = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [B, S, dim] from [B, S, dim]."""
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Block(nn.Module):
    """One pre-norm transformer layer. Its RMSNorms (Zhang and Sennrich 2019) work in fp32 inside, whatever comes in."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, hidden: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return [B, S, dim] from [B, S, dim]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), positions, mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class LlamaBody(nn.Module):
    """Embedding, blocks and final norm, or those of them that one pipeline stage has."""

    def __init__(self, config: ModelSection, layers: range, *, embedding: bool, norm: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim) if embedding else None
        self.layers = nn.ModuleDict({str(layer): Block(config) for layer in layers})  # keyed by global number
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps) if norm else None

    def forward(self, tokens: Tensor, positions: Tensor | None, mask: Tensor | None) -> Tensor:
        """Return hidden states [B, S, dim] from token ids [B, S], or from hidden states without an embedding."""
        hidden = tokens if self.embed_tokens is None else self.embed_tokens(tokens)
        for block in self.layers.values():
            hidden = block(hidden, positions, mask)
        return hidden if self.norm is None else self.norm(hidden)


class OutputHead(nn.Linear):
    """The output matrix together with the loss, so that whoever gathers this module's weight gathers it for both."""

    def __init__(self, config: ModelSection, loss_chunk_tokens: int) -> None:
        super().__init__(config.dim, config.vocab_size, bias=False)
        self.loss = ChunkedCrossEntropy(loss_chunk_tokens)

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits [B, S, vocab], or with `targets` int64 [B, S] the loss sum, an fp32 scalar."""
        return super().forward(hidden) if targets is None else self.loss(hidden, self.weight, targets)


class Llama(nn.Module):
    """A Llama, or the part of it with the given global `layers`, with or without `embedding` and `head`.

    Tied embeddings are one Parameter while both ends are here; a stage with the head alone owns a copy named
    `lm_head.weight`. Build on the meta device for large models, then `to_empty` and `initial_weights.initialize`.
    """

    def __init__(
        self,
        config: ModelSection,
        *,
        layers: range | None = None,
        embedding: bool = True,
        head: bool = True,
        loss_chunk_tokens: int = 0,
    ) -> None:
        super().__init__()
        layers = range(config.num_layers) if layers is None else layers
        _check(config, layers)
        self.config = config
        self.tied = config.tie_embeddings and embedding and head
        self.model = LlamaBody(config, layers, embedding=embedding, norm=head)
        self.lm_head = OutputHead(config, loss_chunk_tokens) if head else None
        self._tie()

    @property
    def blocks(self) -> dict[int, Block]:
        """Return the transformer blocks by global layer number, in order."""
        return {int(layer): block for layer, block in self.model.layers.items()}

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        attention_mask: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> Tensor:
        """Run the stage.

        Takes token ids int64 [B, S], or hidden states [B, S, dim] without an embedding; `positions` int64 [B, S]
        (None: 0 to S-1); `attention_mask` bool [B, 1, S, S], true where seen (None: causal); `targets` int64 [B, S],
        -100 where ignored. Returns hidden states [B, S, dim] without a head, else logits [B, S, vocab], or with
        targets the sum of cross-entropy in nats over valid ones, an fp32 scalar.
        """
        seq_len, longest = tokens.shape[1], self.config.max_seq_len
        assert seq_len <= longest, f"{seq_len} tokens are more than max_seq_len={longest}"
        hidden = self.model(tokens, positions, attention_mask)
        if self.lm_head is None:
            assert targets is None, "targets belong to the stage that has the head"
            return hidden
        return self.lm_head(hidden, targets)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Moving a module off the meta device makes new Parameters, one for each place where a tied one stood.
        super()._apply(fn, recurse)
        self._tie()
        return self

    def _tie(self) -> None:
        if self.tied:
            self.lm_head.weight = self.model.embed_tokens.weight


def _check(config: ModelSection, layers: range) -> None:
    assert config.dim % config.num_heads == 0, f"num_heads={config.num_heads} does not divide dim={config.dim}"
    assert head_dim(config) % 2 == 0, f"rotary embedding turns pairs: dim / num_heads = {head_dim(config)} is odd"
    kv_heads = num_kv_heads(config)
    assert config.num_heads % kv_heads == 0, f"num_kv_heads={kv_heads} does not divide num_heads={config.num_heads}"
    assert all(0 <= layer < config.num_layers for layer in layers), f"{layers} of {config.num_layers} layers"
