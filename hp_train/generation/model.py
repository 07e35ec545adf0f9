"""A run's model on one device, from the checkpoint of any mesh. Imports torch."""

from __future__ import annotations

import torch

from hp_train.config.schema import ModelSection
from hp_train.models.llama import Llama
from hp_train.models.shapes import HEAD_NAME
from hp_train.pretrained.stored_weights import StoredWeights


def load_model(weights: StoredWeights, config: ModelSection, device: torch.device, dtype: torch.dtype) -> Llama:
    """Return the whole model with `weights` as `dtype` on `device`; beside it one tensor at a time is in memory."""
    with torch.device("meta"):
        model = Llama(config)
    model = model.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    parameters = dict(model.named_parameters())
    assert set(weights.names) == set(parameters), f"{HEAD_NAME} is stored once when it is tied"
    for name in weights.names:
        parameters[name].copy_(weights.read(name))
    return model
