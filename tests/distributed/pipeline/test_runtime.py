"""What the interpreter does besides gradients: evaluation, short batches, buffers, edges, handlers, traces."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hp_train.pipeline_parallel import ModuleStage, PipelineRuntime, StageInputs
from hp_train.pipeline_parallel.trace import largest_gaps, write_trace
from hp_train.pipeline_parallel.transport import Traffic
from hp_train.schedule import MetaStepType, Schedule, build_schedule, lower
from hp_train.schedule.text import parse_schedule
from tests.distributed.ranks import run_ranks

CPU = torch.device("cpu")


class Stage(nn.Module):
    """A linear stage that passes on what a test needs beside its hidden states, and keeps what it was given."""

    def __init__(self, index: int, is_last: bool, keeps_inputs: bool = False) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.linear = nn.Linear(4, 4)
        self.is_first, self.is_last, self.keeps_inputs = index == 0, is_last, keeps_inputs
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.grad_modes: list[bool] = []

    def forward(
        self,
        hidden: Tensor,
        mask: Tensor | None = None,
        count: Tensor | None = None,
        scale: Tensor | None = None,
        *,
        shift: Tensor,
        targets: Tensor | None = None,
    ):
        self.grad_modes.append(torch.is_grad_enabled())
        if self.keeps_inputs:
            self.kept.append((hidden, hidden.detach().clone()))
        if self.is_first:
            mask, count, scale = hidden[:, 0] > 0, torch.tensor(len(hidden)), self.linear.weight.sum()
        hidden = self.linear(hidden + shift) * scale
        if self.is_last:
            return (hidden * mask[:, None] / count - targets).square().sum()
        return hidden.t().contiguous().t(), mask, count, scale  # the first is not contiguous


def inputs_of(num: int, rows: int = 3) -> list[StageInputs]:
    generator = torch.Generator().manual_seed(num)
    return [
        StageInputs(
            (torch.randn(rows, 4, generator=generator),), {"shift": torch.full((1, 4), 0.1 * index)},
            torch.randn(rows, 4, generator=generator),
        )
        for index in range(num)
    ]  # fmt: skip


def whole_loss(modules: list[Stage], inputs: list[StageInputs]) -> Tensor:
    total = torch.zeros(())
    for each in inputs:
        values = each.args
        for module in modules:
            values = module(*values, **each.kwargs, **({"targets": each.targets} if module.is_last else {}))
        total = total + values
    return total


def runtime_of(
    rank: int, world_size: int, name: str, num: int, transport: str = "plain", data: bool = False, **module_options
):
    """`runtime_for` a schedule that is built and lowered for the test."""
    stages_per_rank = 2 if name in ("zbv", "interleaved_1f1b", "interleaved_zb") else 1
    schedule = lower(build_schedule(name, world_size, num, stages_per_rank), transport, data=data)
    return runtime_for(schedule, rank, transport, **module_options)


def runtime_for(schedule: Schedule, rank: int, transport: str, **module_options):
    """A runtime and its stages' modules, and all modules of the pipeline as one process would have them."""
    last = schedule.num_stages - 1
    whole = [Stage(index, index == last) for index in range(schedule.num_stages)]
    modules = {index: Stage(index, index == last, **module_options) for index in schedule.stages_of_rank(rank)}
    stages = [ModuleStage(module, index, schedule.num_stages) for index, module in modules.items()]
    return PipelineRuntime(stages, schedule, transport, dist.group.WORLD, CPU, timeout_s=30), modules, whole


def _worker(rank: int, world_size: int, folder: str) -> None:
    for check in (
        tuples_cross_and_gradients_are_right, evaluation_needs_no_gradients, fewer_micro_batches_than_the_schedule_has,
        buffers_number_the_peak_in_flight, kept_inputs_are_not_overwritten, edges_say_who_sends_and_what_returns,
        handlers_can_be_replaced, lambda *args: a_step_can_be_recorded(*args, Path(folder)),
    ):  # fmt: skip
        check(rank, world_size)
        dist.barrier()


def tuples_cross_and_gradients_are_right(rank: int, world_size: int) -> None:
    for name, transport in (("1f1b", "plain"), ("zbv", "batch"), ("interleaved_1f1b", "multi_stream")):
        runtime, modules, whole = runtime_of(rank, world_size, name, 4, transport)
        for rows in (3, 5, 2):  # the shapes of a step are its own
            inputs = inputs_of(4, rows)
            for module in (*modules.values(), *whole):
                module.zero_grad()
            loss = runtime.step(inputs, 0.5)
            expected = whole_loss(whole, inputs)
            (expected * 0.5).backward()
            if loss is not None:
                torch.testing.assert_close(loss.float(), expected.detach(), rtol=1e-6, atol=0)
            for index, module in modules.items():
                for own, single in zip(module.parameters(), whole[index].parameters(), strict=True):
                    torch.testing.assert_close(
                        own.grad, single.grad, rtol=1e-5, atol=1e-6 * single.grad.abs().max().item()
                    )
        runtime.close()


def evaluation_needs_no_gradients(rank: int, world_size: int) -> None:
    for name, transport in (("1f1b", "plain"), ("zbv", "batch"), ("gpipe", "boundary"), ("zbv", "boundary")):
        runtime, modules, whole = runtime_of(rank, world_size, name, 4, transport)
        for num in (1, 4, 9):  # fewer than the schedule has, as many, more
            inputs = inputs_of(num)
            loss = runtime.evaluate(inputs)
            if loss is not None:
                torch.testing.assert_close(loss.float(), whole_loss(whole, inputs).detach(), rtol=1e-6, atol=0)
        for module in modules.values():
            assert not any(module.grad_modes)
            assert all(parameter.grad is None for parameter in module.parameters())
        runtime.close()


def fewer_micro_batches_than_the_schedule_has(rank: int, world_size: int) -> None:
    for name, transport in (("1f1b", "plain"), ("interleaved_1f1b", "boundary")):
        runtime, modules, whole = runtime_of(rank, world_size, name, 6, transport)
        inputs = inputs_of(3)
        runtime.step(inputs)
        whole_loss(whole, inputs).backward()
        for index, module in modules.items():
            torch.testing.assert_close(module.linear.weight.grad, whole[index].linear.weight.grad, rtol=1e-5, atol=1e-5)
        runtime.close()


def _worker_of_three(rank: int, world_size: int) -> list[float]:
    """Of each step, the loss in parts of what one process gets, where it is made."""
    return targets_travel_far_ahead(rank, world_size) + members_of_a_batch_wait_for_each_other(rank)


def targets_travel_far_ahead(rank: int, world_size: int) -> list[float]:
    """More receives are due than are in use."""
    losses = []
    for name, transport in (("gpipe", "plain"), ("interleaved_1f1b", "plain"), ("interleaved_zb", "boundary")):
        runtime, _, whole = runtime_of(rank, world_size, name, 6, transport, data=True)
        inputs = inputs_of(6)
        for _ in range(2):
            loss = runtime.step(inputs)
            if loss is not None:
                losses.append(loss.item() / whole_loss(whole, inputs).item())
        runtime.close()
    return losses


# Stages 0 and 2 on rank 2, stages 1 and 4 on rank 0, stage 3 on rank 1. Rank 0's batch takes in 4RECV_F0 from rank 1,
# which gets what that is made of from rank 2 only after rank 2 has sent 0SEND_F1 and 0SEND_F2, each by itself.
BATCH_OF_TWO_SENDERS = (
    "1RECV_F0 1F0 1SEND_F0 (4RECV_F0;1RECV_F1;1RECV_F2)BATCH_SEND_RECV 4F0 1F1 1SEND_F1 4RECV_F1 4F1 1F2 1SEND_F2 "
    "4RECV_F2 4F2 4B0 4SEND_B0 1RECV_B0 1B0 1SEND_B0 4B1 4SEND_B1 1RECV_B1 1B1 1SEND_B1 4B2 4SEND_B2 1RECV_B2 1B2 "
    "1SEND_B2",
    "3RECV_F0 3F0 3SEND_F0 3RECV_F1 3F1 3SEND_F1 3RECV_F2 3F2 3SEND_F2 3RECV_B0 3B0 3SEND_B0 3RECV_B1 3B1 3SEND_B1 "
    "3RECV_B2 3B2 3SEND_B2",
    "0F0 0SEND_F0 2RECV_F0 2F0 0F1 0F2 0SEND_F1 0SEND_F2 2SEND_F0 2RECV_F1 2F1 2SEND_F1 2RECV_F2 2F2 2SEND_F2 2RECV_B0 "
    "2B0 2SEND_B0 0RECV_B0 0B0 2RECV_B1 2B1 2SEND_B1 0RECV_B1 0B1 2RECV_B2 2B2 2SEND_B2 0RECV_B2 0B2",
)


def members_of_a_batch_wait_for_each_other(rank: int) -> list[float]:
    """With headers of their own too, when all but the first can be posted only once another has come."""
    schedule = parse_schedule("\n".join(row.replace(" ", ",") for row in BATCH_OF_TWO_SENDERS), "batch")
    runtime, _, whole = runtime_for(schedule, rank, "batch")
    losses = []
    for rows in ((3, 3, 3), (3, 2, 4), (1, 1, 5)):
        inputs = [inputs_of(1, num)[0] for num in rows]
        loss = runtime.step(inputs)
        if loss is not None:
            losses.append(loss.item() / whole_loss(whole, inputs).item())
    runtime.close()
    return losses


def test_three_ranks_receive_ahead_and_in_batches() -> None:
    losses = run_ranks(3, _worker_of_three, timeout_s=120)
    assert [each for of_rank in losses for each in of_rank] == pytest.approx([1.0] * 9, rel=1e-6)


def buffers_number_the_peak_in_flight(rank: int, world_size: int) -> None:
    tensors_across = {Traffic.FORWARD: 4, Traffic.BACKWARD: 2}  # hidden, mask, count, scale; hidden and scale return
    for name, transport in (("gpipe", "plain"), ("1f1b", "plain"), ("1f1b", "multi_stream"), ("zbv", "batch")):
        runtime, _, _ = runtime_of(rank, world_size, name, 8, transport)
        for _ in range(3):
            runtime.step(inputs_of(8))
        for (traffic, stage), held in runtime.num_recv_buffers().items():
            if traffic is not Traffic.DATA:
                proven = runtime.verification.stage_buffers[stage]
                most = proven.fwd if traffic is Traffic.FORWARD else proven.bwd
                assert held <= most * tensors_across[traffic], (name, transport, traffic, stage, held, proven)
                assert held > 0
        runtime.close()


def kept_inputs_are_not_overwritten(rank: int, world_size: int) -> None:
    runtime, modules, _ = runtime_of(rank, world_size, "1f1b", 4, keeps_inputs=True)
    for _ in range(3):
        runtime.step(inputs_of(4))
    for module in modules.values():
        assert all(torch.equal(kept, copy) for kept, copy in module.kept)
    runtime.close()


def edges_say_who_sends_and_what_returns(rank: int, world_size: int) -> None:
    runtime, _, _ = runtime_of(rank, world_size, "gpipe", 2)
    runtime.step(inputs_of(2))
    if rank == 0:
        hidden, mask, count, scale = runtime.recv_infos(Traffic.BACKWARD, 0)
        assert [info.requires_grad for info in (hidden, mask, count, scale)] == [True, False, False, True]
        assert (
            mask.buffer is None and count.buffer is None and hidden.buffer.shape == (3, 4) and scale.buffer.shape == ()
        )
        assert hidden.peer_global_rank == 1
    else:
        hidden, mask, count, scale = runtime.recv_infos(Traffic.FORWARD, 1)
        assert [info.requires_grad for info in (hidden, mask, count, scale)] == [True, False, False, True]
        assert [info.buffer.dtype for info in (mask, count)] == [torch.bool, torch.int64]
        assert hidden.peer_global_rank == 0
    runtime.close()


def handlers_can_be_replaced(rank: int, world_size: int) -> None:
    schedule = lower(build_schedule("1f1b", world_size, 6), "plain", overlap="b_f")
    modules = {rank: Stage(rank, rank == world_size - 1)}
    runtime = PipelineRuntime([ModuleStage(modules[rank], rank, world_size)], schedule, "plain", dist.group.WORLD, CPU)
    seen: list[str] = []

    def forward_first(run, step) -> None:
        seen.append(str(step))
        backward, forward = step.sub_steps
        run.execute(forward)
        run.execute(backward)

    runtime.register(MetaStepType.OVERLAP_B_F, forward_first)
    runtime.step(inputs_of(6))
    expected = [str(step) for step in schedule.orders[rank] if step.type is MetaStepType.OVERLAP_B_F]
    assert seen == expected and (seen or rank != 0)
    runtime.close()


def a_step_can_be_recorded(rank: int, world_size: int, folder: Path) -> None:
    runtime, _, _ = runtime_of(rank, world_size, "zbv", 4)
    runtime.step(inputs_of(4))
    runtime.record_next_step()
    runtime.step(inputs_of(4))
    timeline = runtime.recorded_timeline()
    assert [tuple(span.step for span in row) for row in timeline.spans] == list(runtime.schedule.orders)
    assert timeline.start_s == 0 and all(span.end_s >= span.start_s for row in timeline.spans for span in row)
    gaps = largest_gaps(timeline)
    assert len(gaps) == 3 and gaps[0].duration_s >= gaps[1].duration_s >= gaps[2].duration_s
    if rank == 0:
        text = write_trace(runtime.schedule, timeline, folder, 10)
        assert text.count("\n") == 3 and str(gaps[0]) in text
        assert all((folder / f"pipeline_step_10.{kind}.svg").stat().st_size for kind in ("measured", "planned"))
        events = json.loads((folder / "pipeline_step_10.json").read_text())["traceEvents"]
        names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
        assert names == {"measured", "planned"}
        assert sum(event["ph"] == "X" and event["pid"] == 0 for event in events) == sum(map(len, timeline.spans))
    runtime.close()


class Nothing:
    """A stage that computes nothing: what remains is the interpreter."""

    def __init__(self, stage_index: int, num_stages: int) -> None:
        self.stage_index, self.num_stages = stage_index, num_stages
        self.output = (torch.zeros(1, requires_grad=True),)

    def forward(self, micro_index, inputs, kwargs, targets):
        return self.output

    def backward(self, micro_index, output_grads):
        return output_grads

    def begin_step(self, swapped) -> None: ...

    def reduce_grad(self) -> None: ...

    def reshard(self) -> None: ...


def _overhead(rank: int, world_size: int) -> float:
    schedule = lower(build_schedule("interleaved_1f1b", 1, 64, 4), "plain")
    runtime = PipelineRuntime([Nothing(stage, 4) for stage in range(4)], schedule, "plain", dist.group.WORLD, CPU)
    inputs, times = [StageInputs((torch.zeros(1),), {}, None)] * 64, []
    for _ in range(30):
        begin = time.perf_counter()
        runtime.step(inputs)
        times.append((time.perf_counter() - begin) / len(schedule.orders[0]))
    runtime.close()
    return min(times)


def test_the_interpreter_takes_less_than_40_microseconds_a_step() -> None:
    """The best of many passes: a busy machine must not decide."""
    (seconds,) = run_ranks(1, _overhead)
    assert seconds < 40e-6, seconds


def test_the_runtime_on_two_processes(tmp_path: Path) -> None:
    run_ranks(2, _worker, str(tmp_path))
