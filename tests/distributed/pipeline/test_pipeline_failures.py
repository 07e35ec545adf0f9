"""A stage that fails, ranks that disagree, a peer that never comes: every rank learns the first cause, in time."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hp_train.pipeline_parallel import ModuleStage, PipelineRuntime, StageInputs
from hp_train.schedule import MetaStepType, ScheduleError, build_schedule, lower
from tests.distributed.ranks import run_ranks

CPU = torch.device("cpu")


class Stage(nn.Module):
    """A linear stage that raises at one of its forwards or backwards."""

    def __init__(self, is_last: bool, fail_at_forward: int = -1, fail_at_backward: int = -1) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.is_last, self.fail_at_forward, self.fail_at_backward = is_last, fail_at_forward, fail_at_backward
        self.forwards, self.backwards = 0, 0

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        if self.forwards == self.fail_at_forward:
            raise ValueError("no such token")
        self.forwards += 1
        hidden = self.linear(hidden)
        hidden.register_hook(self._count_backward)
        return (hidden - targets).square().sum() if self.is_last else hidden

    def _count_backward(self, grad: Tensor) -> None:
        if self.backwards == self.fail_at_backward:
            raise ValueError("bad gradient")
        self.backwards += 1


def inputs(num: int) -> list[StageInputs]:
    return [StageInputs((torch.ones(2, 4),), {}, torch.zeros(2, 4)) for _ in range(num)]


def runtime_of(rank: int, world_size: int, module: nn.Module, transport: str, **options) -> PipelineRuntime:
    schedule = lower(build_schedule("1f1b", world_size, 6), transport)
    return PipelineRuntime(
        [ModuleStage(module, rank, world_size)], schedule, transport, dist.group.WORLD, CPU, **options
    )


def outcome_of(runtime: PipelineRuntime, num: int = 6) -> tuple[str, str, float]:
    """Name and text of what `step` raises, and the seconds until it does."""
    begin = time.monotonic()
    try:
        runtime.step(inputs(num))
    except Exception as error:
        return type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", [])]), time.monotonic() - begin
    return "none", "", time.monotonic() - begin


def _failing(rank: int, world_size: int) -> list[tuple[str, str, float]]:
    outcomes = []
    for transport, faults in (
        ("plain", {1: {"fail_at_forward": 2}}),
        ("multi_stream", {2: {"fail_at_backward": 1}}),
        ("batch", {0: {"fail_at_forward": 0}}),
    ):
        module = Stage(rank == world_size - 1, **faults.get(rank, {}))
        runtime = runtime_of(rank, world_size, module, transport)
        outcomes.append(outcome_of(runtime))
        dist.barrier()  # the group that the job itself uses is unharmed
    return outcomes


def test_the_first_cause_reaches_every_rank() -> None:
    results = run_ranks(3, _failing)
    for index, (culprit, step, text) in enumerate(
        [(1, "1F2", "no such token"), (2, "2B1", "bad gradient"), (0, "0F0", "no such token")]
    ):
        for rank in range(3):
            name, message, seconds = results[rank][index]
            assert name == ("ValueError" if rank == culprit else "PipelineError"), (rank, name, message)
            assert text in message and f"pipeline rank {culprit}" in message and step in message, message
            assert "closed" not in message and "reset" not in message, message
            assert seconds < 10, (rank, seconds)


def _hanging(rank: int, world_size: int) -> tuple[str, str, float]:
    runtime = runtime_of(rank, world_size, Stage(rank == world_size - 1), "plain", timeout_s=1.5)
    if rank == 1:
        runtime.register(MetaStepType.BWD, lambda run, step: time.sleep(5))
    return outcome_of(runtime)


def test_a_hang_says_where_every_rank_stands() -> None:
    results = run_ranks(3, _hanging)
    for rank in (0, 2):
        name, message, seconds = results[rank]
        assert name == "PipelineHang", (rank, name, message)
        assert seconds < 10
        for other in range(3):
            assert f"pipeline rank {other} (process {other}) stands on step" in message, message
        assert "1B0, not waiting for a peer" in message, message
        assert "waiting for rank 1 over plain: stage 1 -> stage 0 (backward), micro-batch 0" in message, message
        assert "ranks 0 and 1 disagree" in message, message
    assert results[1][0] in ("PipelineHang", "PipelineError"), results[1]


def _losing(rank: int, world_size: int) -> tuple[str, str, float]:
    runtime = runtime_of(rank, world_size, Stage(rank == world_size - 1), "plain")
    if rank == 1:  # all connections closed without a word: what its peers see of a process that is killed

        def vanish(run, step) -> None:
            runtime._abandon()
            time.sleep(6)

        runtime.register(MetaStepType.BWD, vanish)
    return outcome_of(runtime)


def test_a_rank_that_vanishes_is_named_on_all_others() -> None:
    results = run_ranks(3, _losing)
    for rank in (0, 2):
        name, message, seconds = results[rank]
        assert name == "PipelineError" and seconds < 10, (rank, name, message, seconds)
        assert "rank 1 over plain" in message and "probably been killed" in message, message


def _disagreeing(rank: int, world_size: int) -> str:
    schedule = lower(build_schedule("1f1b" if rank else "gpipe", world_size, 4), "plain")
    with pytest.raises(ValueError, match="different schedules or transports") as raised:
        PipelineRuntime([ModuleStage(Stage(rank == 1), rank, world_size)], schedule, "plain", dist.group.WORLD, CPU)
    return str(raised.value)


def test_ranks_with_different_schedules_stop_before_the_first_step() -> None:
    messages = run_ranks(2, _disagreeing)
    assert messages[0] == messages[1]
    assert "\n" not in messages[0]


def _unproven(rank: int, world_size: int) -> str:
    schedule = build_schedule("1f1b", world_size, 4)  # sends and receives nothing
    with pytest.raises(ScheduleError) as raised:
        PipelineRuntime([ModuleStage(Stage(rank == 1), rank, world_size)], schedule, "plain", dist.group.WORLD, CPU)
    return str(raised.value)


def test_an_unproven_schedule_is_refused() -> None:
    assert all("1F0" in message for message in run_ranks(2, _unproven))


class Odd(nn.Module):
    """A first stage whose output is what a test says."""

    def __init__(self, outputs) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.outputs = list(outputs)

    def forward(self, hidden: Tensor):
        return self.outputs.pop(0)(hidden * self.scale)


def _refused(rank: int, world_size: int) -> list[str]:
    messages = []
    for outputs in (
        [lambda h: {"hidden": h}] * 2,
        [lambda h: (h, None)] * 2,
        [lambda h: (h, 3)] * 2,
        [lambda h: h[(None,) * 7]] * 2,
        [lambda h: h, lambda h: h[:, :2]],
        [lambda h: h, lambda h: h[:1].repeat(3, 1)],
    ):
        module = Odd(outputs) if rank == 0 else Stage(is_last=True)
        schedule = lower(build_schedule("gpipe", 2, 2), "plain")
        runtime = PipelineRuntime([ModuleStage(module, rank, 2)], schedule, "plain", dist.group.WORLD, CPU)
        messages.append(outcome_of(runtime, 2)[1])
    return messages


def test_outputs_that_can_not_cross_are_refused_by_name() -> None:
    for messages in run_ranks(2, _refused):
        expected = (
            "output 0 of stage 0 is dict", "output 1 of stage 0 is NoneType", "output 1 of stage 0 is int",
            "output 0 of stage 0 has 9 dimensions", "float32[2, 2] after float32[2, 4]",
            "float32[3, 4] after float32[2, 4]",
        )  # fmt: skip
        for message, text in zip(messages, expected, strict=True):
            assert text in message, message
