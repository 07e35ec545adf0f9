"""What to say when memory runs out: how much each kind took, and the two settings that would help most.

Imports torch only where memory is measured. Parameters, gradients and optimizer state are counted on the live
objects, so the figures hold for every engine; what is left of the peak is activations and gathered parameters.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

from hp_train.config.schema import TrainerConfig
from hp_train.launch.units import GIB


@dataclass(frozen=True, slots=True)
class MemoryByKind:
    """Bytes on one rank."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int | None  # with gathered parameters and temporaries; None where no peak is known (CPU)
    total: int | None  # of the device

    def describe(self) -> str:
        """Return one line."""
        kinds = [("parameters", self.parameters), ("gradients", self.gradients), ("optimizer state", self.optimizer)]
        if self.activations is not None:
            kinds.append(("activations and temporaries", self.activations))
        text = ", ".join(f"{name} {value / GIB:.2f} GiB" for name, value in kinds)
        return f"memory of this rank: {text}" + (f", of {self.total / GIB:.0f} GiB" if self.total else "")


def measure() -> MemoryByKind:
    """Return what the parameters, gradients and optimizer of this process take now."""
    import torch

    parameters, optimizers = {}, {}
    for item in gc.get_objects():
        kind = type(item)  # not isinstance: it would ask dead weak proxies for their class
        if issubclass(kind, torch.nn.Parameter):
            parameters[id(item)] = item
        elif issubclass(kind, torch.optim.Optimizer):
            optimizers[id(item)] = item
    parameter_bytes = sum(_local_bytes(item) for item in parameters.values())
    gradient_bytes = sum(_local_bytes(item.grad) for item in parameters.values())
    state = (value for item in optimizers.values() for values in item.state.values() for value in values.values())
    optimizer_bytes = sum(_local_bytes(value) for value in state)
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return MemoryByKind(parameter_bytes, gradient_bytes, optimizer_bytes, None, None)
    rest = torch.cuda.max_memory_allocated() - parameter_bytes - gradient_bytes - optimizer_bytes
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return MemoryByKind(parameter_bytes, gradient_bytes, optimizer_bytes, max(0, rest), total)


def _local_bytes(value: Any) -> int:
    """Return the bytes that a tensor holds on this rank: of a DTensor, its shard's."""
    local = getattr(value, "_local_tensor", value)
    if not hasattr(local, "untyped_storage"):
        return 0
    return local.numel() * local.element_size() if local.device.type != "meta" else 0


def advise(config: TrainerConfig, memory: MemoryByKind) -> list[str]:
    """Return the two settings that would help most, the larger kind of memory first."""
    state = memory.parameters + memory.gradients + memory.optimizer
    of_activations, of_state = _for_activations(config), _for_state(config)
    activations_lead = memory.activations is None or memory.activations >= state
    ranked = of_activations + of_state if activations_lead else of_state[:1] + of_activations + of_state[1:]
    return ranked[:2]


def _for_activations(config: TrainerConfig) -> list[str]:
    settings = []
    if config.trainer.micro_batch_size > 1:
        settings.append(f"trainer.micro_batch_size={config.trainer.micro_batch_size // 2}")
    if config.activation_checkpoint.mode != "full" or config.activation_checkpoint.every > 1:
        settings.append("activation_checkpoint.mode=full activation_checkpoint.every=1")
    if config.trainer.loss_chunk_tokens == 0:
        settings.append("trainer.loss_chunk_tokens=4096")
    return settings


def _for_state(config: TrainerConfig) -> list[str]:
    settings = []
    if config.fsdp.dp_mode == "ddp":
        settings.append(f"fsdp=fsdp fsdp.dp_shard_size={config.fsdp.dp_replicate_size} fsdp.dp_replicate_size=1")
    else:
        settings.append(f"fsdp.dp_shard_size={2 * max(1, config.fsdp.dp_shard_size)} (on twice the processes)")
    if config.accelerator.pp_size < config.model.num_layers:
        settings.append(f"accelerator.pp_size={2 * config.accelerator.pp_size} (on twice the processes)")
    return [*settings, f"trainer.seq_len={max(1, config.trainer.seq_len // 2)}"]
