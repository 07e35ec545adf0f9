"""Sharding inside stages: how many collectives a step takes, and bf16 gradients summed in fp32."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from hp_train.fully_shard import fully_shard as our_fully_shard
from hp_train.pipeline_parallel import ModuleStage, PipelineRuntime
from tests.distributed.pipeline.llama_cases import Case, batches, full_grad, lowered, make_stage, mesh_of
from tests.distributed.ranks import run_ranks

CPU = torch.device("cpu")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.gathers, self.reductions = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.gathers += "c10d" in str(func) and "allgather" in str(func)
        self.reductions += "c10d" in str(func) and "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


class Pipeline:
    """The stages of a case on this rank, sharded by `shard(module, mesh)`, and their runtime."""

    def __init__(self, case: Case, shard) -> None:
        self.case, mesh = case, mesh_of(2, 2)
        self.dp_rank = mesh["dp"].get_local_rank()
        schedule = lowered(case)
        self.modules = {
            stage: make_stage(replace(case, reshard_after_forward=None), stage, schedule.num_stages, 4, None)
            for stage in schedule.stages_of_rank(mesh["pp"].get_local_rank())
        }
        self.num_units = 0
        for module in self.modules.values():
            for part in (*module.blocks.values(), module):
                shard(part, mesh["dp"])
                self.num_units += bool(
                    part is not module or [n for n, _ in module.named_parameters() if "layers" not in n]
                )
        stages = [ModuleStage(module, stage, schedule.num_stages) for stage, module in self.modules.items()]
        self.runtime = PipelineRuntime(stages, schedule, "plain", mesh["pp"].get_group(), CPU)

    def step(self) -> None:
        self.runtime.step(batches(self.case.num_microbatches, 0, self.dp_rank, False))

    def grads(self) -> list[torch.Tensor]:
        self.step()
        self.runtime.close()
        return [full_grad(parameter).clone() for m in self.modules.values() for parameter in m.parameters()]


def _count(rank: int, world_size: int) -> list[tuple[Case, int, int, int]]:
    """Per case: units, all-gathers and reduce-scatters of a second step."""
    counts = []
    for name, stages_per_rank in (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zbv", 2)):
        for reshard, lowering in ((True, ()), (False, ()), (True, (("fsdp", 2),))):
            case = Case(name, 2, 4, stages_per_rank, reshard_after_forward=reshard, lowering=lowering)
            pipeline = Pipeline(
                case, lambda part, mesh, r=reshard: fully_shard(part, mesh=mesh, reshard_after_forward=r)
            )
            pipeline.step()
            with CollectiveCounter() as counter:
                pipeline.step()
            pipeline.runtime.close()
            counts.append((case, pipeline.num_units, counter.gathers, counter.reductions))
    return counts


def test_collectives_of_a_step() -> None:
    """U units, m micro-batches: one reduce-scatter a unit; U gathers if kept, at most U(m + 1) with resharding."""
    for counts in run_ranks(4, _count):
        for case, units, gathers, reductions in counts:
            assert reductions == units, (case, units, reductions)
            if case.reshard_after_forward and not case.lowering:
                most = (
                    units * (case.num_microbatches + 1)
                    if case.schedule != "zbv"
                    else units * (2 * case.num_microbatches)
                )
                assert units < gathers <= most, (case, units, gathers)
            else:
                assert gathers == units, (case, units, gathers)


def _sum_in_fp32(rank: int, world_size: int) -> list[str]:
    wrong = []
    for label, shard, reshards in (
        (
            "torch",
            lambda part, mesh, r: fully_shard(part, mesh=mesh, reshard_after_forward=r, mp_policy=BF16),
            (True, False),
        ),
        (
            "ours",
            lambda part, mesh, r: our_fully_shard(part, mesh=mesh, reshard_after_forward=r, mp_policy=BF16),
            (True, False),
        ),
        ("replicate", lambda part, mesh, r: replicate(part, mesh=mesh, mp_policy=BF16), (False,)),
    ):
        expected = None
        for name in ("1f1b", "zb_h1"):
            for reshard in reshards:
                grads = Pipeline(Case(name, 2, 4), lambda part, mesh, s=shard, r=reshard: s(part, mesh, r)).grads()
                expected = expected or grads
                if not all(map(torch.equal, grads, expected)):
                    wrong.append(f"{label} {name} reshard_after_forward={reshard}")
    return wrong


def test_bf16_gradients_are_summed_in_fp32_however_they_come() -> None:
    assert run_ranks(4, _sum_in_fp32) == [[]] * 4
