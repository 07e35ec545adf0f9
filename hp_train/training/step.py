"""One optimizer step's forward and backward passes: the seam that every engine fits.

The trainer knows `StepEngine` alone. Gradients are left in `.grad`: the derivative of (loss sum of the global batch) /
`token_count`, summed over micro-batches and data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from hp_train.data.loader import MicroBatch, document_mask
from hp_train.parallel.mesh import MeshContext
from hp_train.parallel.parallelize import ParallelModel
from hp_train.pipeline_parallel.microbatch import StageInputs
from hp_train.pipeline_parallel.runtime import PipelineRuntime
from hp_train.pipeline_parallel.stage import ModuleStage
from hp_train.pipeline_parallel.trace import write_trace
from hp_train.pipeline_plan import PipelinePlan
from hp_train.schedule import MetaStepType


class StepEngine(Protocol):
    """Runs the micro-batches of one rank; every rank calls it at the same point."""

    def train_step(self, micro_batches: Sequence[MicroBatch], token_count: int) -> torch.Tensor:
        """Accumulate gradients; return this rank's loss sum, a scalar, 0 where another stage holds the loss."""
        ...

    def eval_step(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Return this rank's loss sum without gradients."""
        ...

    def loss_order(self, num_microbatches: int) -> Sequence[int]:
        """Return the micro-batches in the order in which `train_step` computes their losses."""
        ...

    def standing(self) -> str:
        """Return where in its schedule this rank is, for who asks from another thread; empty without a schedule."""
        ...

    def close(self) -> None:
        """Let go of groups and threads, before the process group goes."""
        ...


class DataParallelEngine:
    """Forward and backward of a whole model, micro-batch after micro-batch (gradient accumulation).

    Sharded gradients are reduced after every micro-batch, so that no rank holds a whole gradient; replicated ones
    once, after the last. The sharding engine averages over `dp_size` ranks: the loss is multiplied by it beforehand.
    """

    def __init__(self, module: nn.Module, dp_size: int, *, reduce_every_microbatch: bool) -> None:
        self.module = module
        self.dp_size = dp_size
        self.reduce_every_microbatch = reduce_every_microbatch

    def train_step(self, micro_batches: Sequence[MicroBatch], token_count: int) -> torch.Tensor:
        """Accumulate gradients over `micro_batches`; see `StepEngine`."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=micro_batches[0].tokens.device)
        for index, batch in enumerate(micro_batches):
            self._mark_last(index == len(micro_batches) - 1)
            loss = self._loss(batch)
            (loss * (self.dp_size / token_count)).backward()
            loss_sum += loss.detach()
        return loss_sum

    @torch.no_grad()
    def eval_step(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Return the loss sum of `micro_batches`; see `StepEngine`."""
        return torch.stack([self._loss(batch).double() for batch in micro_batches]).sum()

    def loss_order(self, num_microbatches: int) -> Sequence[int]:
        """Return them as they are given; see `StepEngine`."""
        return range(num_microbatches)

    def standing(self) -> str:
        """Follow no schedule; see `StepEngine`."""
        return ""

    def close(self) -> None:
        """Hold nothing; see `StepEngine`."""

    def _loss(self, batch: MicroBatch) -> torch.Tensor:
        return self.module(
            batch.tokens, positions=batch.positions, attention_mask=batch.attention_mask, targets=batch.targets
        )

    def _mark_last(self, is_last: bool) -> None:
        if self.dp_size == 1 or not hasattr(self.module, "set_is_last_backward"):
            return
        self.module.set_is_last_backward(is_last)
        if self.reduce_every_microbatch:
            self.module.set_requires_all_reduce(is_last)
        else:
            self.module.set_requires_gradient_sync(is_last)


class _DocumentStage(ModuleStage):
    """A stage that makes the attention mask of a micro-batch as its forward begins: S times as large as the ids."""

    def forward(
        self, micro_index: int, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], targets: Any
    ) -> tuple[torch.Tensor, ...]:
        """See `pipeline_parallel.stage.Stage`."""
        document_ids = kwargs.get("document_ids")  # there are none where data steps bring the inputs
        mask = None if document_ids is None else document_mask(document_ids)
        kwargs = {"positions": kwargs.get("positions"), "attention_mask": mask}
        return super().forward(micro_index, inputs, kwargs, targets)


class PipelineEngine:
    """Runs the micro-batches through a pipeline by a proven schedule."""

    def __init__(self, runtime: PipelineRuntime, plan: PipelinePlan, dp_size: int) -> None:
        self.runtime = runtime
        self.plan = plan
        self.dp_size = dp_size

    def train_step(self, micro_batches: Sequence[MicroBatch], token_count: int) -> torch.Tensor:
        """Accumulate gradients over `micro_batches`; see `StepEngine`."""
        loss_sum = self.runtime.step(self._inputs(micro_batches), self.dp_size / token_count)
        return torch.zeros(()) if loss_sum is None else loss_sum

    def eval_step(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Return the loss sum of `micro_batches`; see `StepEngine`."""
        loss_sum = self.runtime.evaluate(self._inputs(micro_batches))
        return torch.zeros(()) if loss_sum is None else loss_sum

    def loss_order(self, num_microbatches: int) -> Sequence[int]:
        """Return the order of the last stage's forwards, which a person's own schedule may choose; see `StepEngine`."""
        schedule = self.plan.schedule
        steps = [part for step in schedule.orders[schedule.rank_of_stage[-1]] for part in step.computes]
        last = schedule.num_stages - 1
        return [step.micro_index for step in steps if (step.type, step.stage_index) == (MetaStepType.FWD, last)]

    def record_next_step(self) -> None:
        """Measure when each step of the schedule runs, in the next `train_step`."""
        self.runtime.record_next_step()

    def write_trace(self, folder: Path, step: int) -> str:
        """Write the recorded step's measured and planned timelines into `folder`; return what to print. Collective."""
        measured = self.runtime.recorded_timeline()
        return write_trace(self.plan.schedule, measured, folder, step) if self.runtime.pp_rank == 0 else ""

    def standing(self) -> str:
        """Return the step of the schedule, and the transfer waited for; see `StepEngine`."""
        return self.runtime.standing()

    def close(self) -> None:
        """Close the runtime; see `StepEngine`."""
        self.runtime.close()

    def _inputs(self, micro_batches: Sequence[MicroBatch]) -> list[StageInputs | None]:
        if not micro_batches:  # the schedule's data steps bring this rank what it needs
            return [None] * self.plan.schedule.num_microbatches
        return [
            StageInputs(
                args=(batch.tokens,),
                kwargs={"positions": batch.positions, "document_ids": batch.document_ids},
                targets=batch.targets,
            )
            for batch in micro_batches
        ]


def build_engine(model: ParallelModel, mesh: MeshContext, plan: PipelinePlan | None, config_digest: str) -> StepEngine:
    """Return the engine that steps this rank's share of the model; collective over all ranks.

    Ranks of a pipeline refuse to start together unless their `config_digest` is the same.
    """
    dp_size = mesh.sizes.dp_size
    if plan is None:
        return DataParallelEngine(model.stages[0], dp_size, reduce_every_microbatch=mesh.sizes.dp_shard > 1)
    num_stages = plan.schedule.num_stages
    stages = [_DocumentStage(module, index, num_stages) for index, module in model.stages.items()]
    runtime = PipelineRuntime(
        stages, plan.schedule, plan.transport, mesh.pp_group, mesh.device, config_digest=config_digest
    )
    return PipelineEngine(runtime, plan, dp_size)
