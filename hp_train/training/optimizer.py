"""From named parameters to a torch optimizer. Training floor: imports torch and the schema.

Matrices decay, vectors (the norms) do not. Embedding and output matrix count as matrices.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from hp_train import registry
from hp_train.config.schema import OptimizerSection

FUSED_DEVICES = ("cuda", "cpu")  # one pass over memory; on one CPU core four times as fast as the loop over tensors


def build_optimizer(
    named_parameters: Mapping[str, nn.Parameter], config: OptimizerSection, device: torch.device
) -> Optimizer:
    """Return AdamW or plain SGD over `named_parameters`, DTensors or plain tensors on `device`.

    A parameter that goes by two names is updated once, frozen ones are left out. Within the two groups (decayed first)
    parameters keep the order of the mapping, so equal models have equal optimizers. SGD is without momentum, where
    coupled and decoupled decay are the same.
    """
    trained = list({id(p): p for p in named_parameters.values() if p.requires_grad}.values())
    decayed = [parameter for parameter in trained if parameter.ndim >= 2]
    plain = [parameter for parameter in trained if parameter.ndim < 2]
    groups = [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in ((decayed, config.weight_decay), (plain, 0.0))
        if parameters
    ]
    plugged = registry.find("optimizer", config.name)
    if plugged is not None:
        own = None if plugged.config is None else getattr(config, plugged.name)
        return registry.resolve(plugged.build)(groups, config, own)
    if config.name == "sgd":
        return SGD(groups, lr=config.lr)
    assert config.name == "adamw", f"no such optimizer: {config.name}"
    return AdamW(
        groups,
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        fused=device.type in FUSED_DEVICES,
    )
