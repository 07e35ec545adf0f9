"""plan.json: what the launcher worked out before it started anything, for people and their scripts. No torch."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hp_train.checkpoint.size import checkpoint_bytes
from hp_train.config.schema import TrainerConfig
from hp_train.launch.devices import ProcessPlan
from hp_train.models.shapes import num_parameters
from hp_train.pipeline_plan import plan_pipeline
from hp_train.topology import BatchPlan

PLAN_FILE = "plan.json"


def describe_plan(config: TrainerConfig, processes: ProcessPlan, batch: BatchPlan) -> dict[str, Any]:
    """Return what plan.json holds: devices and mesh, batch, model, checkpoint, and the pipeline (null without one)."""
    return {
        "device": processes.device,
        "num_nodes": processes.num_nodes,
        "num_processes": processes.num_processes,  # of each node
        "mesh": asdict(processes.sizes),
        "batch": {
            **asdict(batch),
            "num_microbatches": batch.num_microbatches,
            "tokens_per_step": batch.tokens_per_step,
        },
        "num_parameters": num_parameters(config.model),
        "checkpoint_bytes": checkpoint_bytes(config.model, config.optimizer.name),
        "pipeline": _describe_pipeline(config, batch) if processes.sizes.pp > 1 else None,
    }


def _describe_pipeline(config: TrainerConfig, batch: BatchPlan) -> dict[str, Any]:
    """Return the schedule as its ranks will compare it, and [first, last + 1] of the layers of every stage."""
    from hp_train.schedule import schedule_hash

    plan = plan_pipeline(config, batch.num_microbatches)
    return {
        "schedule": config.pp.schedule,
        "schedule_hash": schedule_hash(plan.schedule, plan.transport),
        "transport": plan.transport,
        "rank_of_stage": list(plan.schedule.rank_of_stage),
        "layers_of_stage": [[layers.start, layers.stop] for layers in plan.layers_of_stage],
    }
