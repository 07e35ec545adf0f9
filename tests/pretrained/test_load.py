"""Weights of a Hugging Face directory on every kind of mesh: each rank holds its shards' very bits, reads no more."""

from __future__ import annotations

from pathlib import Path

import torch

from hp_train.checkpoint.storage import ShardLoadPlanner
from hp_train.checkpoint.tensor_shard import shard_of
from hp_train.config.schema import ModelSection
from hp_train.pretrained.load import load_pretrained
from hp_train.training.run_context import RunContext
from hp_train.training.setup import build_worker
from tests.distributed.ranks import run_ranks
from tests.distributed.same_numbers import make_config
from tests.pretrained.directories import MODEL, TIED, random_weights, write_directory

UNTIED_MESHES = {
    "fsdp 4": {"fsdp.dp_shard_size": 4},
    "hsdp 2x2": {"fsdp.dp_mode": "hsdp", "fsdp.dp_shard_size": 2, "fsdp.dp_replicate_size": 2},
}
TIED_MESHES = {
    "pp 2 x fsdp 2": {"accelerator.pp_size": 2, "fsdp.dp_shard_size": 2},
    "torch fsdp 4": {"fsdp.dp_shard_size": 4, "fsdp.implementation": "torch"},
    "dualpipe_v on pp 2": {
        "accelerator.pp_size": 2, "fsdp.dp_shard_size": 2, "pp.schedule": "dualpipe_v", "pp.stages_per_rank": 2,
        "trainer.micro_batch_size": 1,
    },
}  # fmt: skip


def load_everywhere(rank: int, world_size: int, folder: Path) -> list[str]:
    """Load on every mesh; return what is not as it should be."""
    return [fault for tied in (False, True) for fault in load_one(rank, world_size, folder, tied)]


def load_one(rank: int, world_size: int, folder: Path, tied: bool) -> list[str]:
    model, dtype, folder = (
        (TIED, torch.bfloat16, folder / "tied") if tied else (MODEL, torch.float32, folder / "untied")
    )
    expected = {name: tensor.float() for name, tensor in random_weights(model, dtype).items()}
    found = []
    for name, mesh in (TIED_MESHES if tied else UNTIED_MESHES).items():
        keys = {f"model.{key}": getattr(model, key) for key in ModelSection.__dataclass_fields__}
        keys["model.pretrained"] = str(folder)
        config = make_config({"trainer.device": "cpu", "trainer.seq_len": 16, "trainer.global_batch_size": 8,
                              "trainer.micro_batch_size": 2}, keys, mesh)  # fmt: skip
        worker = build_worker(config, RunContext(folder, attempt=1, rank=rank, local_rank=rank, world_size=world_size))
        num_read = 0
        commit = ShardLoadPlanner.commit_tensor

        def count(planner, item, tensor, commit=commit):
            nonlocal num_read
            num_read += tensor.numel()
            return commit(planner, item, tensor)

        ShardLoadPlanner.commit_tensor = count
        load_pretrained(config.model, worker.model.parameters)
        ShardLoadPlanner.commit_tensor = commit
        held = 0
        for parameter_name, parameter in worker.model.parameters.items():
            shard = shard_of(parameter)
            held += shard.local.numel()
            whole = expected[worker.model.aliases.get(parameter_name, parameter_name)]
            part = whole[tuple(slice(at, at + size) for at, size in zip(shard.offsets, shard.local.shape, strict=True))]
            if shard.local.numel() and not torch.equal(shard.local, part):
                found.append(f"{name}, rank {rank}: {parameter_name} differs")
        if num_read > held:
            found.append(f"{name}, rank {rank}: {num_read} elements read for {held} held")
        worker.engine.close()
    return found


def test_every_mesh_holds_the_bits_of_the_files(tmp_path: Path) -> None:
    for kind, model, dtype in (("untied", MODEL, torch.float32), ("tied", TIED, torch.bfloat16)):
        folder = write_directory(tmp_path / kind, model, random_weights(model, dtype), num_files=3)
        (folder / "adapter.safetensors").write_bytes(b"not a part of the model")
    assert [line for lines in run_ranks(4, load_everywhere, tmp_path) for line in lines] == []


def test_one_process_computes_what_transformers_does(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from hp_train.models.llama import Llama

    for model, dtype, num_files in ((TIED, torch.float32, 3), (MODEL, torch.bfloat16, 1)):
        folder = write_directory(tmp_path / str(dtype), model, random_weights(model, dtype), num_files=num_files)
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ours = Llama(model)
        config = make_config({"model.pretrained": str(folder), "model.tie_embeddings": model.tie_embeddings})
        load_pretrained(config.model, dict(ours.named_parameters()))
        tokens = torch.arange(48).view(2, 24) * 5 % 260
        with torch.no_grad():
            torch.testing.assert_close(ours(tokens), reference(tokens).logits, rtol=0, atol=2e-5)
