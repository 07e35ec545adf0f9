"""What filled the memory when it ran out, by kind, and the two settings that would help most."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from hp_train.config.schema import TrainerConfig
from hp_train.errors import HpTrainError
from hp_train.training.metrics import device_memory_bytes, peak_memory_bytes
from hp_train.training.setup import Worker

GIB = 2**30


class OutOfMemory(HpTrainError):
    """A device's memory did not suffice. The message says by kind what filled it and what would help."""


def is_out_of_memory(error: BaseException) -> bool:
    """Recognise CUDA's and the CPU allocator's ways to say that memory ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def describe_memory(config: TrainerConfig, worker: Worker) -> str:
    """Return one line of memory by kind on this rank and one with the two settings that would help most."""
    device = worker.mesh.device
    kinds = {
        "parameters": _local_bytes(worker.model.parameters.values()),
        "gradients": _local_bytes(p.grad for p in worker.model.parameters.values() if p.grad is not None),
        "optimizer state": _local_bytes(
            value for state in worker.optimizer.state.values() for value in state.values() if torch.is_tensor(value)
        ),
    }
    peak = peak_memory_bytes(device)
    kinds["activations and the rest"] = max(0, peak - sum(kinds.values()))
    total = device_memory_bytes(device)
    capacity = f" of {total / GIB:.1f}" if total else ""
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in kinds.items())
    return f"out of memory: peak {peak / GIB:.2f}{capacity} GiB: {parts}\nwhat would help most: {'; '.join(_advice(config, worker, kinds))}"


def _advice(config: TrainerConfig, worker: Worker, kinds: dict[str, int]) -> list[str]:
    trainer, mode = config.trainer, config.activation_checkpoint.mode
    states = kinds["parameters"] + kinds["gradients"] + kinds["optimizer state"]
    activations, shards = [], []
    if mode != "full":
        activations.append("activation_checkpoint=full")
    if trainer.micro_batch_size > 1:
        activations.append(f"trainer.micro_batch_size={trainer.micro_batch_size // 2}")
    if trainer.loss_chunk_tokens == 0:
        activations.append("trainer.loss_chunk_tokens=4096")
    if config.fsdp.dp_mode == "ddp":
        shards.append(f"fsdp=fsdp fsdp.dp_shard_size={worker.mesh.sizes.dp_size} fsdp.dp_replicate_size=1")
    shards.append(f"fsdp.dp_shard_size={2 * worker.mesh.sizes.dp_shard} (twice the processes)")
    if worker.mesh.sizes.pp > 1 and config.fsdp.reshard_after_forward is not True:
        shards.append("fsdp.reshard_after_forward=true")
    ordered = activations + shards if kinds["activations and the rest"] >= states else shards + activations
    ordered.append(f"accelerator.pp_size={2 * worker.mesh.sizes.pp} (twice the processes)")
    return ordered[:2]


def _local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    locals_ = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in locals_)
