"""What is said when memory runs out: the bytes of live objects by kind, and the settings that would help most."""

from __future__ import annotations

import pytest
import torch

from hp_train.config.schema import TrainerConfig
from hp_train.launch.failures import Failure
from hp_train.launch.out_of_memory import MemoryByKind, advise, measure


def test_bytes_are_those_of_the_live_objects() -> None:
    before = measure()
    model = torch.nn.Linear(1000, 100, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    after = measure()
    size = 4 * 1000 * 100
    assert after.parameters - before.parameters == size
    assert after.gradients - before.gradients == size
    assert after.optimizer - before.optimizer == 2 * size + 4  # two moments and the count of steps


@pytest.mark.parametrize(
    ("kind", "message", "expected"),
    [
        (torch.OutOfMemoryError.__name__, "CUDA out of memory. Tried to allocate 2.00 GiB", True),
        (MemoryError.__name__, "", True),
        ("RuntimeError", "CUDA error: out of memory", True),
        ("AcceleratorError", "CUDA error: out of memory", True),
        ("DistBackendError", "NCCL error: unhandled cuda error; Cuda failure 2 'out of memory'", True),
        ("RuntimeError", "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you", True),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied", False),
        ("ValueError", "out of memory", False),
    ],
)
def test_which_errors_mean_memory(kind: str, message: str, expected: bool) -> None:
    assert Failure(0, 0, kind, message).is_out_of_memory is expected


def test_advice_follows_the_larger_kind_and_what_is_set_already() -> None:
    config = TrainerConfig()
    config.trainer.micro_batch_size = 4
    activations, state = MemoryByKind(1, 1, 2, 100, None), MemoryByKind(100, 100, 200, 10, None)
    assert advise(config, activations) == [
        "trainer.micro_batch_size=2",
        "activation_checkpoint.mode=full activation_checkpoint.every=1",
    ]
    assert advise(config, state)[0] == "fsdp.dp_shard_size=2 (on twice the processes)"
    config.fsdp.dp_mode, config.fsdp.dp_replicate_size = "ddp", 8
    assert advise(config, state)[0] == "fsdp=fsdp fsdp.dp_shard_size=8 fsdp.dp_replicate_size=1"
    config.trainer.micro_batch_size, config.activation_checkpoint.mode = 1, "full"
    nothing_easy = advise(config, activations)
    assert len(nothing_easy) == 2 and not any("activation_checkpoint" in setting for setting in nothing_easy)
