"""A plugin with one of each kind beside models."""

from __future__ import annotations

from dataclasses import dataclass

from hp_train import registry
from hp_train.config.fields import number


@dataclass
class SignConfig:
    momentum: float = number(0.9, 0, 1, high_open=True)
    """Decay of the momentum. Number; default 0.9; 0 to below 1."""


@dataclass
class PenaltyConfig:
    weight: float = number(0.01, 0, 1)
    """Weight of the penalty. Number; default 0.01; 0 to 1."""


@dataclass
class CountConfig:
    modulus: int = number(7, 2, 100)
    """Tokens count up to it. Integer; default 7; 2 to 100."""

    def faults(self, config):
        if self.modulus == 13:
            yield f"modulus={self.modulus} brings bad luck; use another"


def build_optimizer(groups, section, own):
    import torch

    class SignSGD(torch.optim.Optimizer):
        def initial_state(self, parameter):
            return {"momentum": torch.zeros_like(parameter)}

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter] or self.initial_state(parameter)
                    self.state[parameter] = state
                    state["momentum"].mul_(own.momentum).add_(parameter.grad)
                    parameter.sub_(state["momentum"].sign() * group["lr"])

    return SignSGD(groups, {"lr": section.lr})


def build_loss(own):
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Penalised(nn.Module):
        def forward(self, hidden, weight, targets):
            logits = F.linear(hidden.flatten(0, -2), weight).float()
            penalty = torch.logsumexp(logits, -1).square()[targets.flatten() != -100].sum()
            return F.cross_entropy(logits, targets.flatten(), reduction="sum") + own.weight * penalty

    return Penalised()


def open_counts(own, *, seq_len, seed, split, vocab_size):
    import numpy as np

    from hp_train.data.source import Batch

    class Counts:
        num_sequences = 10**6

        def batch(self, samples):
            rows = (np.asarray(samples)[:, None] + np.arange(seq_len + 1)) % own.modulus
            return Batch(rows[:, :-1].copy(), rows[:, 1:].copy())

    return Counts()


def halved(step, warmup_steps, total_steps, own):
    return 0.5


registry.register_optimizer("sign_sgd", config=SignConfig, build=build_optimizer, state_bytes=4)
registry.register_loss("penalised", config=PenaltyConfig, build=build_loss)
registry.register_data("counts", config=CountConfig, build="tests.plugins.small_parts:open_counts")
registry.register_lr_schedule("halved", build=halved)
