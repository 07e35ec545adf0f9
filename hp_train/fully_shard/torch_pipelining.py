"""Answers torch's own pipeline runtime, which reaches into FSDP's private state to reduce gradients.

Imports torch only. `torch.distributed.pipelining` treats any FSDPModule the same way: it switches gradient sync off
for every micro-batch and, after the last, takes `fully_shard.state(module)`, runs `post_backward()` on the groups of
all states and then the root's final callback. The stand-in below has no groups, and its callback reduces.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.fsdp import fully_shard as torch_fully_shard


class _PipeliningState:
    """What `fully_shard.state(module)` returns for a module of ours."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._fsdp_param_groups: list[Any] = []
        self._fsdp_param_group: Any = None  # torch 2.11 has one group to a state
        self._state_ctx = SimpleNamespace(all_states=[self])

    def _root_post_backward_final_callback(self) -> None:
        self._module.reduce_grad(recurse=True)  # type: ignore[operator]


def answer_torch_pipelining(module: nn.Module) -> None:
    key = torch_fully_shard.__wrapped__  # type: ignore[attr-defined]
    module.__dict__.setdefault(STATE_KEY, {})[key] = _PipeliningState(module)
