"""plan.json says what the launcher worked out, and says it as the workers will work it out again."""

from __future__ import annotations

import json

import pytest

from hp_train.checkpoint.size import checkpoint_bytes
from hp_train.commands.train import resolved
from hp_train.config.compose import compose
from hp_train.launch.devices import plan_processes
from hp_train.launch.plan_file import describe_plan
from hp_train.models.shapes import num_parameters
from hp_train.pipeline_plan import plan_pipeline
from hp_train.schedule import schedule_hash
from hp_train.topology import BatchPlan


@pytest.mark.parametrize(
    ("typed", "mesh", "num_microbatches"),
    [
        ("recipe=llama_fsdp_pp", {"pp": 2, "dp_shard": 2}, 2),
        ("recipe=llama_fsdp_pp pp=interleaved_1f1b trainer.micro_batch_size=2", {"pp": 2, "dp_shard": 2}, 4),
        ("fsdp.dp_shard_size=-1 launcher.nproc_per_node=4", {"dp_shard": 4}, 2),
    ],
)
def test_a_plan_holds_mesh_batch_and_pipeline(typed: str, mesh: dict[str, int], num_microbatches: int) -> None:
    config = resolved(compose([*typed.split(), "trainer.device=cpu"]).config)
    processes = plan_processes(config)
    trainer = config.trainer
    batch = BatchPlan(trainer.global_batch_size, processes.sizes.dp_size, trainer.micro_batch_size, trainer.seq_len)
    plan = json.loads(json.dumps(describe_plan(config, processes, batch)))
    assert plan["mesh"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1} | mesh
    assert (plan["device"], plan["num_nodes"], plan["num_processes"]) == ("cpu", 1, processes.sizes.world_size)
    assert plan["batch"]["num_microbatches"] == num_microbatches
    assert plan["batch"]["tokens_per_step"] == trainer.global_batch_size * trainer.seq_len
    assert plan["num_parameters"] == num_parameters(config.model)
    assert plan["checkpoint_bytes"] == checkpoint_bytes(config.model)
    if "pp" not in mesh:
        assert plan["pipeline"] is None
        return
    pipeline = plan_pipeline(config, num_microbatches)
    assert plan["pipeline"]["schedule_hash"] == schedule_hash(pipeline.schedule, pipeline.transport)
    layers = [layer for first, stop in plan["pipeline"]["layers_of_stage"] for layer in range(first, stop)]
    assert layers == list(range(config.model.num_layers))
    assert len(plan["pipeline"]["layers_of_stage"]) == len(plan["pipeline"]["rank_of_stage"])
