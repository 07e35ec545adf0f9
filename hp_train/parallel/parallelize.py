"""From a config to a model that is cut over the mesh.

The order is visible in `_cut`: activation checkpointing, compile, sharding, memory, weights. Model files know nothing
of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hp_train import registry
from hp_train.compile.pass_config import PassConfig
from hp_train.config.schema import TrainerConfig
from hp_train.models.initial_weights import initialize
from hp_train.models.llama import Llama
from hp_train.models.shapes import EMBEDDING_NAME, HEAD_NAME
from hp_train.parallel.activation import apply_activation_checkpointing, compile_blocks
from hp_train.parallel.mesh import MeshContext
from hp_train.parallel.sharding import shard_model
from hp_train.parallel.tied import TiedEmbeddings
from hp_train.pipeline_plan import PipelinePlan


@dataclass(frozen=True, slots=True)
class ParallelModel:
    """This rank's share of the model."""

    stages: dict[int, Llama]  # by stage index; {0: the whole model} without a pipeline
    parameters: dict[str, nn.Parameter]  # by Hugging Face name, over all stages held here, shared ones once
    aliases: dict[str, str]  # tied copy -> its original, the same on every rank
    tied: TiedEmbeddings | None

    @property
    def not_owned(self) -> frozenset[str]:
        """Return the names that the norm and the checkpoint leave to the stage that holds the original."""
        return frozenset(self.aliases)

    def sync_tied_gradients(self) -> None:
        """Sum the gradients of tied copies over the stages that hold them."""
        if self.tied is not None:
            self.tied.sync_gradients(self.parameters)


def build_model(
    config: TrainerConfig, pass_config: PassConfig, mesh: MeshContext, plan: PipelinePlan | None, precision: str
) -> ParallelModel:
    """Build, cut and initialise this rank's stages; collective over all ranks."""
    layers_of_stage = (range(config.model.num_layers),) if plan is None else plan.layers_of_stage
    # Once, not for each stage: ranks may hold different numbers of them, and making a mesh is collective.
    data_parallel_mesh = mesh.data_parallel_mesh(at_least_one=precision == "bf16")
    stages = {}
    for stage in [0] if plan is None else plan.stages_of(mesh.coordinates.pp):
        part = _part(config, layers_of_stage, stage)
        stages[stage] = _cut(part, config, pass_config, data_parallel_mesh, mesh.device, precision)
    parameters = {name: parameter for stage in stages.values() for name, parameter in stage.named_parameters()}
    tied, aliases = None, {}
    if config.model.tie_embeddings and plan is not None:
        rank_of_stage = plan.schedule.rank_of_stage
        tied = TiedEmbeddings(mesh, rank_of_stage[0], rank_of_stage[-1])
        aliases = {HEAD_NAME: EMBEDDING_NAME}
    return ParallelModel(stages, parameters, aliases, tied)


def _part(config: TrainerConfig, layers_of_stage: tuple[range, ...], stage: int) -> Llama:
    """Return the stage's part of the model on the meta device."""
    plugged = registry.find("model", config.model.name)
    has_head = stage == len(layers_of_stage) - 1
    with torch.device("meta"):
        part = (Llama if plugged is None else registry.resolve(plugged.build))(
            config.model,
            layers=layers_of_stage[stage],
            embedding=stage == 0,
            head=has_head,
            loss_chunk_tokens=config.trainer.loss_chunk_tokens,
        )
        loss = registry.find("loss", config.trainer.loss)
        if loss is not None and has_head:
            part.lm_head.loss = registry.resolve(loss.build)(registry.settings_of(loss, config))
    return part


def _cut(
    model: Llama,
    config: TrainerConfig,
    pass_config: PassConfig,
    data_parallel_mesh: DeviceMesh | None,
    device: torch.device,
    precision: str,
) -> Llama:
    """Apply everything that changes how `model` runs but not what it computes, then give it memory and weights."""
    apply_activation_checkpointing(model, config.activation_checkpoint.mode, config.activation_checkpoint.every)
    if config.trainer.compile:
        compile_blocks(model)
    if data_parallel_mesh is not None:
        shard_model(
            model,
            data_parallel_mesh,
            implementation=config.fsdp.implementation,
            reshard_after_forward=pass_config.fsdp_reshard_after_forward,
            precision=precision,
        )
    model.to_empty(device=device)
    if config.model.pretrained is None:  # else every weight is loaded, from there or from a checkpoint
        initialize(model, config.trainer.seed)
    return model
