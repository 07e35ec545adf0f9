"""Rotary position embedding with the frequency scaling of Llama 3.1. Models floor: imports torch and the schema only.

Angles, cosines and the rotation itself are fp32 whatever the precision of the model: at position 8,192 a bf16 angle is
off by whole turns. For the same reason a module takes integer positions and makes its own angles: a mixed-precision
policy casts every floating input of a module, but leaves integers alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hp_train.config.schema import ModelSection, RopeScalingSection
from hp_train.models.shapes import head_dim


def rotary_frequencies(config: ModelSection) -> Tensor:
    """Return radians per position of each feature pair, fp32 [head_dim / 2], on the CPU (so the same on any device).

    Su et al. 2021 (RoFormer), section 3.2.2; scaled as published with Llama 3.1 when `rope_scaling` is set.
    """
    exponents = torch.arange(0, head_dim(config), 2, dtype=torch.float32, device="cpu") / head_dim(config)
    frequencies = 1.0 / config.rope_theta**exponents
    return frequencies if config.rope_scaling is None else _scale(frequencies, config.rope_scaling)


def _scale(frequencies: Tensor, scaling: RopeScalingSection) -> Tensor:
    """Slow long wavelengths by `factor`, leave short ones alone, and blend linearly in between."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position_embeddings / wavelengths  # within the length first trained at
    slowed = frequencies / scaling.factor
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - share) * slowed + share * frequencies
    scaled = torch.where(turns < scaling.low_freq_factor, slowed, blended)
    return torch.where(turns > scaling.high_freq_factor, frequencies, scaled)


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their positions. Has no parameters; its buffer is not saved."""

    inv_freq: Tensor  # fp32 [head_dim / 2]

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("inv_freq", torch.empty(head_dim(config) // 2), persistent=False)
        self._compute_frequencies()

    def _compute_frequencies(self) -> None:
        if not self.inv_freq.is_meta:
            self.inv_freq = rotary_frequencies(self.config).to(self.inv_freq.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        # After `to_empty` the buffer is garbage and after `.to(bfloat16)` it is rounded; it depends on the config
        # alone, so every such move ends with computing it again.
        super()._apply(fn, recurse)
        self._compute_frequencies()
        return self

    def forward(self, queries: Tensor, keys: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return rotated queries and keys [B, S, heads, head_dim], in their own dtype.

        `positions` is int64 [B, S]; None means 0 to S-1 in every row.
        """
        if positions is None:
            positions = torch.arange(queries.shape[1], device=queries.device).unsqueeze(0)
        angles = positions.unsqueeze(-1).float() * self.inv_freq  # [B or 1, S, head_dim / 2]
        cos, sin = angles.cos().unsqueeze(2), angles.sin().unsqueeze(2)  # one head dimension to broadcast over
        return _rotate(queries, cos, sin), _rotate(keys, cos, sin)


def _rotate(features: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # Feature i turns with feature i + head_dim / 2, the pairing of Hugging Face's weights.
    first, second = features.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(features)
