"""The pipeline on CUDA and NCCL: streams, group calls, aborted communicators. One device makes a pipeline of one."""

from __future__ import annotations

import tempfile
import time
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hp_train.pipeline_parallel import ModuleStage, PipelineRuntime, StageInputs
from hp_train.schedule import MetaStepType, build_schedule, lower
from tests.distributed.ranks import run_ranks

STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "zbv": 2}
TRANSPORTS = ("plain", "batch", "multi_stream", "boundary")
NUM_MICROBATCHES, WIDTH = 6, 64


class Block(nn.Module):
    """A stage whose backward takes long enough on a device for transfers to overlap it, and can be made to fail."""

    def __init__(self, index: int, is_last: bool, fails: bool = False) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.is_last, self.fails = is_last, fails

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        if self.fails:
            raise ValueError("no such token")
        hidden = self.layers(hidden).tanh()
        return (hidden - targets).square().sum() if self.is_last else hidden


def inputs_of(step: int, device: torch.device) -> list[StageInputs]:
    generator = torch.Generator().manual_seed(step)
    rows = 8 + 4 * (step % 2)  # other shapes from step to step
    return [
        StageInputs(
            (torch.randn(rows, WIDTH, generator=generator).to(device),), {},
            torch.randn(rows, WIDTH, generator=generator).to(device),
        )
        for _ in range(NUM_MICROBATCHES)
    ]  # fmt: skip


def start(rank: int, world_size: int, store: str) -> torch.device:
    """The job's group as the launcher makes it: gloo beside NCCL."""
    dist.destroy_process_group()
    torch.cuda.set_device(rank)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=world_size)
    return torch.device("cuda", rank)


def runtime_of(rank: int, world_size: int, name: str, transport: str, device: torch.device, **options):
    schedule = build_schedule(name, world_size, NUM_MICROBATCHES, STAGES_PER_RANK[name])
    lowered = lower(schedule, transport, swap=options.pop("swap", None), overlap=options.pop("overlap", None))
    last = schedule.num_stages - 1
    failing = options.pop("failing", -1)
    modules = {
        index: Block(index, index == last, fails=index == failing).to(device) for index in schedule.stages_of_rank(rank)
    }
    stages = [ModuleStage(module, index, schedule.num_stages) for index, module in modules.items()]
    return PipelineRuntime(stages, lowered, transport, dist.group.WORLD, device, **options), modules


def reference(num_stages: int, step: int, device: torch.device) -> dict[int, list[Tensor]]:
    modules = [Block(index, index == num_stages - 1).to(device) for index in range(num_stages)]
    for each in inputs_of(step, device):
        (hidden,) = each.args
        for module in modules:
            hidden = module(hidden, each.targets) if module.is_last else module(hidden)
        hidden.backward()
    return {index: [p.grad for p in module.parameters()] for index, module in enumerate(modules)}


def _gradients(rank: int, world_size: int, store: str) -> None:
    device = start(rank, world_size, store)
    for name, v in STAGES_PER_RANK.items():
        expected = [reference(world_size * v, step, device) for step in range(3)]
        for transport, lowering in product(TRANSPORTS, ({}, {"swap": 2}, {"overlap": "b_f"})):
            runtime, modules = runtime_of(rank, world_size, name, transport, device, **lowering)
            for step, grads in enumerate(expected):
                for module in modules.values():
                    module.zero_grad()
                loss = runtime.step(inputs_of(step, device))
                assert loss is None or loss.isfinite()
                for index, module in modules.items():
                    for own, single in zip(module.parameters(), grads[index], strict=True):
                        # The same kernels on the same numbers, micro-batches added in the same order.
                        assert torch.equal(own.grad, single), (name, transport, lowering, step, index)
            runtime.close()


@pytest.mark.gpu
def test_gradients_do_not_depend_on_the_transport() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(min(2, torch.cuda.device_count()), _gradients, str(Path(folder) / "store"), timeout_s=300)


def _failing(rank: int, world_size: int, store: str) -> list[tuple[str, str, float]]:
    device = start(rank, world_size, store)
    outcomes = []
    for transport in TRANSPORTS:
        runtime, _ = runtime_of(rank, world_size, "1f1b", transport, device, failing=world_size - 1)
        begin = time.monotonic()
        with pytest.raises(Exception) as raised:
            runtime.step(inputs_of(0, device))
        outcomes.append((type(raised.value).__name__, str(raised.value), time.monotonic() - begin))
        torch.cuda.synchronize()  # nothing of the failed step may still occupy the device
    return outcomes


@pytest.mark.gpu
def test_a_failure_frees_ranks_whose_streams_wait_for_it() -> None:
    with tempfile.TemporaryDirectory() as folder:
        world_size = min(2, torch.cuda.device_count())
        results = run_ranks(world_size, _failing, str(Path(folder) / "store"), timeout_s=120)
    for rank, outcomes in enumerate(results):
        for name, message, seconds in outcomes:
            assert name == ("ValueError" if rank == world_size - 1 else "PipelineError"), (rank, name, message)
            assert "no such token" in message and seconds < 10, (rank, message, seconds)


def _hanging(rank: int, world_size: int, store: str) -> tuple[str, str, float]:
    device = start(rank, world_size, store)
    runtime, _ = runtime_of(rank, world_size, "1f1b", "batch", device, timeout_s=3.0)
    if rank == world_size - 1:
        runtime.register(MetaStepType.BWD, lambda run, step: time.sleep(8))
    begin = time.monotonic()
    with pytest.raises(Exception) as raised:
        runtime.step(inputs_of(0, device))
    return type(raised.value).__name__, str(raised.value), time.monotonic() - begin


@pytest.mark.gpu
def test_a_device_that_waits_in_vain_is_reported() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("a single rank has no peer to wait for")
    with tempfile.TemporaryDirectory() as folder:
        results = run_ranks(2, _hanging, str(Path(folder) / "store"), timeout_s=120)
    name, message, seconds = results[0]
    assert name == "PipelineHang" and seconds < 20, (name, message, seconds)
    assert "ranks 0 and 1 disagree" in message, message
