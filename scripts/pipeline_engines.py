"""What scripts/bench_pipeline.py times: one Llama under hp-train's runtime, torch's pipelining, and the least loop."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from hp_train.config.schema import ModelSection
from hp_train.models.llama import Llama
from hp_train.pipeline_parallel import ModuleStage, PipelineRuntime, StageInputs
from hp_train.schedule import Schedule, build_schedule, lower, verify

PP_SIZE, VOCAB = 2, 256
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """A model and a micro-batch, with the ratios asked for."""

    dim: int
    num_layers: int
    seq_len: int
    rows: int
    bounds: tuple[tuple[str, float], ...]

    def section(self) -> ModelSection:
        return ModelSection(
            vocab_size=VOCAB, dim=self.dim, num_layers=self.num_layers, num_heads=4, num_kv_heads=4,
            ffn_dim=self.dim * 3, max_seq_len=self.seq_len,
        )  # fmt: skip


SHAPES = {
    64: Shape(64, 4, 32, 1, (("gpipe", 0.92), ("1f1b", 0.92), ("interleaved_1f1b", 0.92))),
    256: Shape(256, 4, 128, 2, (("gpipe", 0.92), ("1f1b", 1.00), ("interleaved_1f1b", 1.00))),
}


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def batch_of(shape: Shape, num_microbatches: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    tokens = torch.randint(VOCAB, (shape.rows * num_microbatches, shape.seq_len + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def schedule_of(name: str, num_microbatches: int) -> Schedule:
    stages_per_rank = 2 if name.startswith("interleaved") else 1
    return build_schedule(name, PP_SIZE, num_microbatches, stages_per_rank)


def modules_of(shape: Shape, schedule: Schedule, rank: int) -> dict[int, nn.Module]:
    per_stage = shape.num_layers // schedule.num_stages
    torch.manual_seed(3)
    return {
        stage: Llama(
            shape.section(), layers=range(stage * per_stage, (stage + 1) * per_stage), embedding=stage == 0,
            head=stage == schedule.num_stages - 1,
        )
        for stage in schedule.stages_of_rank(rank)
    }  # fmt: skip


class Ours:
    """hp-train's runtime over one transport."""

    def __init__(self, shape: Shape, name: str, num_microbatches: int, rank: int, transport: str = "plain") -> None:
        schedule = schedule_of(name, num_microbatches)
        self.modules = modules_of(shape, schedule, rank)
        stages = [ModuleStage(m, s, schedule.num_stages, loss_fn=loss_of) for s, m in self.modules.items()]
        self.runtime = PipelineRuntime(stages, lower(schedule, transport), transport, dist.group.WORLD, CPU)
        tokens, targets = batch_of(shape, num_microbatches)
        is_first, is_last = 0 in self.modules, schedule.num_stages - 1 in self.modules
        self.inputs = [  # each rank holds what its stages read, as with torch's engine
            StageInputs((x,) if is_first else (), {}, y if is_last else None)
            for x, y in zip(tokens.split(shape.rows), targets.split(shape.rows), strict=True)
        ]

    def step(self) -> Tensor | None:
        return self.runtime.step(self.inputs)

    def close(self) -> None:
        self.runtime.close()


class Torchs:
    """torch.distributed.pipelining with outputs not collected, so that it does no work that we leave out."""

    def __init__(self, shape: Shape, name: str, num_microbatches: int, rank: int) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

        schedule = schedule_of(name, num_microbatches)
        self.modules = modules_of(shape, schedule, rank)
        stages = [PipelineStage(m, s, schedule.num_stages, CPU) for s, m in self.modules.items()]
        kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved_1f1b": ScheduleInterleaved1F1B}[name]
        over = stages if name.startswith("interleaved") else stages[0]
        self.schedule = kind(over, num_microbatches, loss_fn=loss_of, scale_grads=False)
        tokens, targets = batch_of(shape, num_microbatches)
        self.args = (tokens,) if 0 in self.modules else ()
        is_last = schedule.num_stages - 1 in self.modules
        self.kwargs = {"target": targets, "return_outputs": False} if is_last else {"return_outputs": False}
        self.is_last = is_last

    def step(self) -> Tensor | None:
        losses: list[Tensor] = []
        self.schedule.step(*self.args, **self.kwargs, **({"losses": losses} if self.is_last else {}))
        return torch.stack(losses).double().sum() if losses else None

    def close(self) -> None:
        pass


class Least:
    """The least that the schedule, autograd and gloo allow: a loop for this one model that checks and keeps nothing.

    One stage a rank. Shapes are known, nobody else may send, a failure hangs. What an engine takes beyond this is its
    own; what torch takes beyond this is all that can be won.
    """

    def __init__(self, shape: Shape, name: str, num_microbatches: int, rank: int) -> None:
        schedule = schedule_of(name, num_microbatches)
        self.modules = modules_of(shape, schedule, rank)
        (self.module,) = self.modules.values()
        self.order = [(step.meta_type.name, step.micro_index) for step in schedule.orders[rank]]
        tokens, targets = batch_of(shape, num_microbatches)
        self.tokens, self.targets = tokens.split(shape.rows), targets.split(shape.rows)
        self.rank, self.num_microbatches = rank, num_microbatches
        store = dist.PrefixStore(f"least {name} {shape.dim} {num_microbatches}", dist.group.WORLD.get_group_store())
        groups = [
            dist.ProcessGroupGloo(dist.PrefixStore(way, store), rank, PP_SIZE, timedelta(seconds=60))
            for way in ("forward", "backward")
        ]
        self.group_out, self.group_in = groups if rank == 0 else reversed(groups)
        needed = verify(lower(schedule, "plain"), "plain").recv_buffers[rank]
        self.buffers = [torch.empty(shape.rows, shape.seq_len, shape.dim) for _ in range(needed)]
        self.loss_grad = torch.tensor(1.0)

    def step(self) -> Tensor | None:
        peer, is_first = 1 - self.rank, self.rank == 0
        self.free, self.num_posted = list(self.buffers), 0
        self.posted: deque[tuple[Tensor, dist.Work]] = deque()
        self.sent: deque[tuple[Tensor, dist.Work]] = deque()
        edges, inputs, losses = {}, {}, []
        self._post(peer)
        for kind, micro_index in self.order:
            if kind == "FWD" and is_first:
                output = self.module(self.tokens[micro_index])
                edges[micro_index] = get_gradient_edge(output)
                self._send(output.detach(), peer)
                del output
            elif kind == "FWD":
                inputs[micro_index] = self._take().detach().requires_grad_()
                loss = loss_of(self.module(inputs[micro_index]), self.targets[micro_index])
                edges[micro_index] = get_gradient_edge(loss)
                losses.append(loss.detach())
                del loss
            elif is_first:
                grad = self._take()
                self._backward(edges.pop(micro_index), grad)
                self.free.append(grad)
                self._post(peer)
            else:
                self._backward(edges.pop(micro_index), self.loss_grad)
                received = inputs.pop(micro_index)
                self._send(received.grad, peer)
                self.free.append(received.detach())
                del received
                self._post(peer)
        for _, work in self.sent:
            work.wait()
        return torch.stack(losses).double().sum() if losses else None

    def close(self) -> None:
        pass

    def _backward(self, edge: GradientEdge, grad: Tensor) -> None:
        _engine_run_backward((edge,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True)

    def _post(self, peer: int) -> None:
        while self.free and self.num_posted < self.num_microbatches:
            buffer = self.free.pop()
            self.posted.append((buffer, self.group_in.recv([buffer], peer, 0)))
            self.num_posted += 1

    def _take(self) -> Tensor:
        buffer, work = self.posted.popleft()
        work.wait()
        return buffer

    def _send(self, tensor: Tensor, peer: int) -> None:
        self.sent.append((tensor, self.group_out.send([tensor], peer, 0)))
        if len(self.sent) > 1:
            self.sent.popleft()[1].wait()
