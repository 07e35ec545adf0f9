"""How large a checkpoint will be, before anything runs. No torch."""

from __future__ import annotations

from hp_train.config.schema import ModelSection
from hp_train.models.shapes import num_parameters

_BYTES_PER_PARAMETER = {"adamw": 12, "sgd": 4}  # fp32 master weight, and AdamW's two fp32 moments
_MARGIN_BYTES = 1 << 20  # JSON and safetensors headers


def checkpoint_bytes(model: ModelSection, optimizer_name: str = "adamw") -> int:
    """Return the size in bytes of one checkpoint: weights and moments in fp32, each parameter once on any mesh."""
    return num_parameters(model) * _BYTES_PER_PARAMETER[optimizer_name] + _MARGIN_BYTES
