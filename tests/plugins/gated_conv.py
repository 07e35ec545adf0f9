"""A model outside the package: gated causal convolutions (Dauphin et al. 2017) in place of attention."""

from dataclasses import dataclass

from hp_train import registry
from hp_train.config.fields import number


@dataclass
class GatedConvConfig:
    kernel_size: int = number(4, 1, 64)
    """Tokens that one layer sees. Integer, tokens; default 4; 1 to 64."""


def shapes(config, *, layers, embedding, head):
    found = {"model.embed_tokens.weight": (config.vocab_size, config.dim)} if embedding else {}
    for layer in layers:
        found[f"model.layers.{layer}.norm.weight"] = (config.dim,)
        found[f"model.layers.{layer}.conv.weight"] = (2 * config.dim, config.dim, config.gated_conv.kernel_size)
    return {**found, "lm_head.weight": (config.vocab_size, config.dim)} if head else found


def build(config, *, layers, embedding, head, loss_chunk_tokens):
    from torch import nn

    from hp_train.models.initial_weights import Constant, Normal
    from hp_train.models.llama import OutputHead

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.RMSNorm(config.dim)
            self.conv = nn.Conv1d(config.dim, 2 * config.dim, config.gated_conv.kernel_size, bias=False)

        def forward(self, hidden):  # [B, S, D]
            padded = nn.functional.pad(self.norm(hidden).transpose(1, 2), (config.gated_conv.kernel_size - 1, 0))
            return hidden + nn.functional.glu(self.conv(padded), dim=1).transpose(1, 2)

    class GatedConv(nn.Module):
        def __init__(self):
            super().__init__()
            self.config, self.model = config, nn.Module()
            self.model.embed_tokens = nn.Embedding(config.vocab_size, config.dim) if embedding else nn.Identity()
            self.model.layers = nn.ModuleDict({str(layer): Block() for layer in layers})
            self.blocks = {int(number): block for number, block in self.model.layers.items()}
            self.lm_head = OutputHead(config, loss_chunk_tokens) if head else None

        def forward(self, tokens, positions=None, attention_mask=None, targets=None):
            hidden = self.model.embed_tokens(tokens)
            for block in self.model.layers.values():
                hidden = block(hidden)
            return hidden if self.lm_head is None else self.lm_head(hidden, targets)

        def initial_weight(self, name):
            return Constant(1.0) if name.endswith("norm.weight") else Normal(0.05)

    return GatedConv()


registry.register_model("gated_conv", config=GatedConvConfig, build=build, shapes=shapes)
