"""From a config to everything one worker trains with: mesh, model, engine, optimizer, data."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

import torch

from hp_train.compile.pass_config import PassConfig, build_pass_config_from_trainer_config, resolve_degrees
from hp_train.config.schema import TrainerConfig
from hp_train.data.source import TokenSource, open_data
from hp_train.models.shapes import num_parameters
from hp_train.parallel.mesh import MeshContext
from hp_train.parallel.parallelize import ParallelModel, build_model
from hp_train.pipeline_plan import plan_pipeline
from hp_train.topology import BatchPlan, MeshSizes
from hp_train.training.optimizer import build_optimizer
from hp_train.training.run_context import RunContext
from hp_train.training.step import StepEngine, build_engine


@dataclass(frozen=True, slots=True)
class Worker:
    """The pieces of one rank."""

    mesh: MeshContext
    model: ParallelModel
    engine: StepEngine
    optimizer: torch.optim.Optimizer
    batch_plan: BatchPlan
    train_source: TokenSource
    val_source: TokenSource | None
    num_parameters: int  # of the whole model
    precision: str  # fp32 or bf16


def build_worker(config: TrainerConfig, context: RunContext) -> Worker:
    """Build everything, weights initialised; collective over all ranks of the default process group."""
    device = training_device(config.trainer.device, context.local_rank)
    if config.trainer.deterministic:
        _be_deterministic()
    pass_config = resolve_degrees(build_pass_config_from_trainer_config(config), context.world_size)
    mesh = MeshContext.build(mesh_sizes(pass_config), device)
    context.progress.coordinates = mesh.coordinates.describe()
    precision = resolve_precision(config.trainer.precision, device)
    plan = BatchPlan(
        config.trainer.global_batch_size, mesh.sizes.dp_size, config.trainer.micro_batch_size, config.trainer.seq_len
    )
    pipeline = plan_pipeline(config, plan.num_microbatches) if mesh.sizes.pp > 1 else None
    model = build_model(config, pass_config, mesh, pipeline, precision)
    engine = build_engine(model, mesh, pipeline, _digest(config))
    optimizer = build_optimizer(model.parameters, config.optimizer, device)
    evaluates = config.trainer.eval_every > 0
    return Worker(
        mesh=mesh,
        model=model,
        engine=engine,
        optimizer=optimizer,
        batch_plan=plan,
        train_source=_open(config, "train"),
        val_source=_open(config, "val") if evaluates else None,
        num_parameters=num_parameters(config.model),
        precision=precision,
    )


def mesh_sizes(pass_config: PassConfig) -> MeshSizes:
    """Return the mesh that a resolved `pass_config` asks for."""
    return MeshSizes(
        pp=pass_config.pp_degree,
        dp_replicate=pass_config.dp_replicate_degree,
        dp_shard=pass_config.fsdp_degree,
        tp=pass_config.tp_size,
    )


def training_device(choice: str, local_rank: int) -> torch.device:
    """Return this worker's device; `auto` is CUDA where torch can use it."""
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def resolve_precision(choice: str, device: torch.device) -> str:
    """Return fp32 or bf16; `auto` is bf16 on CUDA."""
    return choice if choice != "auto" else {"cuda": "bf16", "cpu": "fp32"}[device.type]


def _digest(config: TrainerConfig) -> str:
    return hashlib.sha256(repr(config).encode()).hexdigest()


def _open(config: TrainerConfig, split: str) -> TokenSource:
    return open_data(
        config.data, seq_len=config.trainer.seq_len, seed=config.trainer.seed, split=split,
        vocab_size=config.model.vocab_size,
    )  # fmt: skip


def _be_deterministic() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
