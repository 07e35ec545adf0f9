"""A model outside the package: gated causal convolutions (Dauphin et al. 2017) in place of attention."""

from __future__ import annotations

from dataclasses import dataclass

from hp_train import registry
from hp_train.config.fields import number


@dataclass
class GatedConvConfig:
    """Settings of the gated convolutions."""

    kernel_size: int = number(4, 1, 64)
    """Tokens that one layer sees. Integer, tokens; default 4; 1 to 64."""


def shapes(config, *, layers, embedding, head):
    found = {"model.embed_tokens.weight": (config.vocab_size, config.dim)} if embedding else {}
    for layer in layers:
        found[f"model.layers.{layer}.norm.weight"] = (config.dim,)
        found[f"model.layers.{layer}.conv.weight"] = (2 * config.dim, config.dim, config.gated_conv.kernel_size)
        found[f"model.layers.{layer}.conv.bias"] = (2 * config.dim,)
    return {**found, "lm_head.weight": (config.vocab_size, config.dim)} if head else found


def build(config, *, layers, embedding, head, loss_chunk_tokens):
    import torch.nn.functional as F
    from torch import nn

    from hp_train.models.initial_weights import Constant, Normal
    from hp_train.models.llama import OutputHead

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.RMSNorm(config.dim)
            self.conv = nn.Conv1d(config.dim, 2 * config.dim, config.gated_conv.kernel_size)

        def forward(self, hidden):  # [B, S, D]
            padded = F.pad(self.norm(hidden).transpose(1, 2), (config.gated_conv.kernel_size - 1, 0))
            return hidden + F.glu(self.conv(padded), dim=1).transpose(1, 2)

    class GatedConv(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = config
            self.model = nn.Module()
            self.model.embed_tokens = nn.Embedding(config.vocab_size, config.dim) if embedding else None
            self.model.layers = nn.ModuleDict({str(layer): Block() for layer in layers})
            self.lm_head = OutputHead(config, loss_chunk_tokens) if head else None
            self.blocks = {int(number): block for number, block in self.model.layers.items()}

        def forward(self, tokens, positions=None, attention_mask=None, targets=None):
            hidden = tokens if self.model.embed_tokens is None else self.model.embed_tokens(tokens)
            for block in self.model.layers.values():
                hidden = block(hidden)
            return hidden if self.lm_head is None else self.lm_head(hidden, targets)

        def initial_weight(self, name):
            return (
                Constant(float(name.endswith("norm.weight")))
                if name.endswith(("norm.weight", "bias"))
                else Normal(0.05)
            )

    return GatedConv()


registry.register_model("gated_conv", config=GatedConvConfig, build=build, shapes=shapes)
