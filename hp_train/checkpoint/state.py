"""What of a run goes into a checkpoint, and under which names. Imports torch.

    model.<name>                                   every parameter, by its Hugging Face name
    optimizer.<name>.{exp_avg,exp_avg_sq,step}     AdamW's state of that parameter
    rng.rank_<rank>.{python,numpy,torch,cuda}      generators of one rank; see `rng`

One namespace for every mesh, schedule and engine. A weight that exists twice (the output matrix of the last pipeline
stage when it is tied to the embedding of the first) is stored once, under the original's name, and read into both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from hp_train.checkpoint.tensor_shard import TensorShard, shard_of

_ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """This rank's part of a run.

    `parameters` maps Hugging Face names to tensors or DTensors, under pipeline parallelism those of this rank's stages.
    `aliases` maps the name of a tied copy to the original's; the same on every rank, whoever holds either.
    `progress` must be values that JSON can hold, equal on all ranks; only rank 0's is written.
    `rng` holds this rank's generator states by stored name; written, and read back by `rng.read_states`.
    """

    parameters: Mapping[str, torch.Tensor]
    optimizer: Optimizer
    aliases: Mapping[str, str] = field(default_factory=dict)
    progress: Mapping[str, Any] = field(default_factory=dict)
    rng: Mapping[str, torch.Tensor] = field(default_factory=dict)


def shards_to_save(state: CheckpointState) -> dict[str, TensorShard]:
    """Return stored name -> this rank's piece; tied copies are left to the rank that owns the original."""
    initialize_optimizer_state(state.optimizer)
    shards = {
        f"{kind}.{name}{suffix}": shard
        for name, parameter in state.parameters.items()
        if name not in state.aliases
        for (kind, suffix), shard in _pieces(parameter, state.optimizer).items()
    }
    return shards | {name: shard_of(generator) for name, generator in state.rng.items()}


def shards_to_load(state: CheckpointState) -> tuple[dict[str, TensorShard], dict[str, str]]:
    """Return name -> the piece to read into, and for the names of tied copies among them, the stored name.

    Optimizer state that does not exist yet is created, as the optimizer's first step would.
    """
    initialize_optimizer_state(state.optimizer)
    shards: dict[str, TensorShard] = {}
    stored_names: dict[str, str] = {}
    for name, parameter in state.parameters.items():
        original = state.aliases.get(name, name)
        if original != name and parameter is state.parameters.get(original):
            continue  # one tensor under two names
        for (kind, suffix), shard in _pieces(parameter, state.optimizer).items():
            shards[f"{kind}.{name}{suffix}"] = shard
            if original != name:
                stored_names[f"{kind}.{name}{suffix}"] = f"{kind}.{original}{suffix}"
    return shards, stored_names


def _pieces(parameter: torch.Tensor, optimizer: Optimizer) -> dict[tuple[str, str], TensorShard]:
    """Return (kind, suffix) -> piece for one parameter; its stored names are `kind.<parameter's name>suffix`."""
    pieces = {("model", ""): shard_of(parameter)}
    for key, value in optimizer.state.get(parameter, {}).items():
        pieces["optimizer", f".{key}"] = shard_of(value)
    return pieces


def initialize_optimizer_state(optimizer: Optimizer) -> None:
    """Give every parameter without optimizer state the state it has before its first step: zeros, placed as it is.

    AdamW and Adam have two moments and a step; SGD without momentum has none.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state.get(parameter):
                optimizer.state[parameter].update(_zero_state(optimizer, group, parameter))


def _zero_state(optimizer: Optimizer, group: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    if hasattr(optimizer, "initial_state"):  # a plugin's
        return optimizer.initial_state(parameter)
    if isinstance(optimizer, SGD):
        assert not group["momentum"], "the first step of SGD with momentum differs from a zero buffer"
        return {}
    assert isinstance(optimizer, (Adam, AdamW)), f"no known state for {type(optimizer).__name__}"
    assert not group["amsgrad"], "amsgrad keeps a third moment"
    # Only the fused and capturable kernels want the step on the parameter's device.
    device = parameter.device if group["fused"] or group["capturable"] else torch.device("cpu")
    state = {"step": torch.zeros((), dtype=torch.float32, device=device)}
    for moment in _ADAM_MOMENTS:
        state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return state
