"""A small Llama cut over a pipeline, and the same whole: what the distributed pipeline tests compare.

Every rank computes the single-process reference for itself, so that nothing but the pipeline communicates. A case is
a value; `run_case` trains it for a few SGD steps and returns the worst relative gradient error of any parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hp_train.config.schema import ModelSection
from hp_train.fully_shard import fully_shard as our_fully_shard
from hp_train.models.llama import Llama
from hp_train.pipeline_parallel import ModuleStage, PipelineRuntime, StageInputs
from hp_train.schedule import build_schedule, lower

VOCAB, SEQ, LR = 61, 12, 0.1


@dataclass(frozen=True)
class Case:
    """One way to cut and run the model."""

    schedule: str
    pp_size: int
    num_microbatches: int
    stages_per_rank: int = 1
    transport: str = "plain"
    tied: bool = False
    layer_split: tuple[int, ...] | None = None  # layers per stage; None: as even as can be
    reshard_after_forward: bool | None = None  # None: not sharded
    engine: str = "torch"  # which fully_shard
    lowering: tuple[tuple[str, object], ...] = ()  # keywords of `lower`
    ragged: bool = False  # the last micro-batch has fewer rows
    num_steps: int = 3


def model_section(tied: bool, num_layers: int) -> ModelSection:
    return ModelSection(
        name="test", vocab_size=VOCAB, dim=16, num_layers=num_layers, num_heads=2, num_kv_heads=1, ffn_dim=24,
        tie_embeddings=tied, max_seq_len=SEQ + 4,
    )  # fmt: skip


def batches(num: int, step: int, dp_rank: int, ragged: bool) -> list[StageInputs]:
    """Micro-batches of two rows; targets have some ignored places, other lengths in other steps."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * dp_rank)
    length = SEQ - 2 * (step % 2)
    made = []
    for index in range(num):
        rows = 1 if ragged and index == num - 1 else 2
        tokens = torch.randint(VOCAB, (rows, length + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100
        positions = torch.arange(length).expand(rows, length)
        made.append(StageInputs((tokens[:, :-1],), {"positions": positions, "attention_mask": None}, targets))
    return made


def full_model(tied: bool, num_layers: int) -> Llama:
    torch.manual_seed(7)
    return Llama(model_section(tied, num_layers))


@lru_cache
def reference(tied: bool, num_layers: int, num: int, dp_size: int, ragged: bool, num_steps: int):
    """Per step, the loss and the gradient of every parameter of the undivided model."""
    model = full_model(tied, num_layers)
    history = []
    for step in range(num_steps):
        model.zero_grad()
        micro_batches = [each for dp in range(dp_size) for each in batches(num, step, dp, ragged)]
        tokens = sum(int((each.targets != -100).sum()) for each in micro_batches)
        total = 0.0
        for each in micro_batches:
            loss = model(*each.args, **each.kwargs, targets=each.targets)
            (loss / tokens).backward()
            total += loss.item()
        history.append((total, tokens, {name: p.grad.clone() for name, p in model.named_parameters()}))
        with torch.no_grad():
            for p in model.parameters():
                p -= LR * p.grad
    return history


def split_layers(num_layers: int, num_stages: int, layer_split: tuple[int, ...] | None) -> list[range]:
    counts = layer_split or [num_layers // num_stages + (s < num_layers % num_stages) for s in range(num_stages)]
    starts = [sum(counts[:s]) for s in range(num_stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def make_stage(case: Case, stage: int, num_stages: int, num_layers: int, mesh) -> Llama:
    module = Llama(
        model_section(case.tied, num_layers), layers=split_layers(num_layers, num_stages, case.layer_split)[stage],
        embedding=stage == 0, head=stage == num_stages - 1,
    )  # fmt: skip
    whole = full_model(case.tied, num_layers).state_dict()
    module.load_state_dict({name: whole[name] for name in module.state_dict()})
    if case.reshard_after_forward is not None:
        for block in module.blocks.values():
            shard(block, mesh, case)
        shard(module, mesh, case)
    return module


def shard(module, mesh, case: Case) -> None:
    apply = fully_shard if case.engine == "torch" else our_fully_shard
    apply(module, mesh=mesh, reshard_after_forward=case.reshard_after_forward)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def full_grad(parameter: torch.Tensor) -> torch.Tensor:
    grad = parameter.grad
    assert grad is not None, "a parameter has no gradient"
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def add_tied_gradients(case: Case, modules: dict[int, Llama], num_stages: int, group) -> None:
    """What the trainer does for tied weights: both copies get the sum of their gradients."""
    ends = [modules[0].model.embed_tokens.weight] if 0 in modules else []
    ends += [modules[num_stages - 1].lm_head.weight] if num_stages - 1 in modules else []
    ends = list({id(each): each for each in ends}.values())
    shape = ends[0].grad.to_local() if ends and isinstance(ends[0].grad, DTensor) else ends[0].grad if ends else None
    total = torch.zeros(VOCAB, 16)
    if shape is not None:
        total = sum(full_grad(each) for each in ends)
    dist.all_reduce(total, group=group)
    for each in ends:
        if isinstance(each, DTensor):
            from torch.distributed.tensor import distribute_tensor

            each.grad = distribute_tensor(total, each.device_mesh, each.placements)
        else:
            each.grad = total.clone()


def lowered(case: Case):
    schedule = build_schedule(case.schedule, case.pp_size, case.num_microbatches, case.stages_per_rank)
    return lower(schedule, case.transport, **dict(case.lowering))


_meshes: dict[tuple[int, int], object] = {}


def mesh_of(pp_size: int, dp_size: int):
    key = (pp_size, dp_size)
    if key not in _meshes:
        _meshes[key] = init_device_mesh("cpu", key, mesh_dim_names=("pp", "dp"))
    return _meshes[key]


def run_case(case: Case) -> float:
    """The worst error of any gradient over all steps, relative to the gradient's norm; losses are asserted."""
    dp_size = dist.get_world_size() // case.pp_size
    mesh = mesh_of(case.pp_size, dp_size)
    group, dp_rank = mesh["pp"].get_group(), mesh["dp"].get_local_rank()
    schedule = lowered(case)
    num_layers = sum(case.layer_split) if case.layer_split else max(4, schedule.num_stages)
    modules = {
        stage: make_stage(case, stage, schedule.num_stages, num_layers, mesh["dp"])
        for stage in schedule.stages_of_rank(mesh["pp"].get_local_rank())
    }
    stages = [ModuleStage(module, stage, schedule.num_stages) for stage, module in modules.items()]
    runtime = PipelineRuntime(stages, schedule, case.transport, group, torch.device("cpu"), timeout_s=30)
    history = reference(case.tied, num_layers, case.num_microbatches, dp_size, case.ragged, case.num_steps)
    worst = 0.0
    for step, (ref_loss, tokens, ref_grads) in enumerate(history):
        for module in modules.values():
            module.zero_grad()
        inputs = batches(case.num_microbatches, step, dp_rank, case.ragged)
        if dict(case.lowering).get("data") and 0 not in modules:
            inputs = [None] * case.num_microbatches  # all that this rank needs comes over the wires
        loss = runtime.step(inputs, 1.0 / tokens)
        if loss is not None:
            total = loss.clone()
            dist.all_reduce(total, group=mesh["dp"].get_group())
            assert abs(total.item() - ref_loss) <= 1e-6 * abs(ref_loss), (case, step, total.item(), ref_loss)
        if case.tied:
            add_tied_gradients(case, modules, schedule.num_stages, group)
        for module in modules.values():
            for name, parameter in module.named_parameters():
                key = name if name in ref_grads else "model.embed_tokens.weight"
                error = (full_grad(parameter) - ref_grads[key]).norm() / ref_grads[key].norm()
                worst = max(worst, error.item())
                with torch.no_grad():
                    parameter -= LR * parameter.grad
    runtime.close()
    return worst
