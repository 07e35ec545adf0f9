"""The same numbers on every mesh: each way to cut the work against one process, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.ranks import run_ranks
from tests.distributed.same_numbers import ADAMW, SGD, TINY, Numbers, differences, make_config, run_one

MESHES = {
    "ddp 2": (2, {"fsdp.dp_mode": "ddp", "fsdp.dp_replicate_size": 2}),
    "fsdp 2": (2, {"fsdp.dp_shard_size": 2}),
    "fsdp 4": (4, {"fsdp.dp_shard_size": 4}),
    "hsdp 2x2": (4, {"fsdp.dp_mode": "hsdp", "fsdp.dp_shard_size": 2, "fsdp.dp_replicate_size": 2}),
    "pp 2 gpipe": (2, {"accelerator.pp_size": 2, "pp.schedule": "gpipe"}),
    "pp 2 1f1b": (2, {"accelerator.pp_size": 2, "pp.schedule": "1f1b"}),
    "pp 2 x fsdp 2": (4, {"accelerator.pp_size": 2, "fsdp.dp_shard_size": 2}),
    "pp 4": (4, {"accelerator.pp_size": 4}),
    "accumulation 4": (1, {"trainer.micro_batch_size": 2}),
}
ONE_PROCESS = {"trainer.micro_batch_size": 8}
VARIANTS = {"packed, untied": (False, False), "padded, untied": (True, False), "packed, tied": (False, True), "padded, tied": (True, True)}


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token folder of documents from 3 to 40 tokens, so that most sequences of 16 are padded."""
    from hp_train.data.prepare import prepare

    folder = tmp_path_factory.mktemp("documents")
    lines = ['{"text": "%s"}' % ("abcdefghij klmnopqrst uvwxyz 0123456789"[: 3 + 7 * i % 37] * 1) for i in range(400)]
    (folder / "lines.jsonl").write_text("\n".join(lines) + "\n")
    prepare([folder / "lines.jsonl"], folder / "tokens")
    return folder / "tokens"


def settings(variant: str, documents: Path) -> dict:
    padded, tied = VARIANTS[variant]
    data = {"data.name": "tokens", "data.path": str(documents), "data.document_boundaries": "pad"} if padded else {}
    return {**TINY, **data, "model.tie_embeddings": tied}


def train_all(rank: int, world_size: int, root: Path, mesh: dict, documents: Path) -> dict[str, tuple] | None:
    """Run every variant under AdamW and SGD; numbers by variant on rank 0."""
    results = {}
    for variant in VARIANTS:
        base = settings(variant, documents)
        runs = [
            run_one(rank, world_size, root / variant / name, make_config(base, optimizer, mesh))
            for name, optimizer in (("adamw", ADAMW), ("sgd", SGD))
        ]
        results[variant] = tuple(runs)
    return results if rank == 0 else None


@pytest.fixture(scope="module")
def reference(documents: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Numbers, Numbers]]:
    return run_ranks(1, train_all, tmp_path_factory.mktemp("one"), ONE_PROCESS, documents)[0]


@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_gives_the_numbers_of_one_process(
    name: str, reference: dict[str, tuple[Numbers, Numbers]], documents: Path, tmp_path: Path
) -> None:
    world_size, mesh = MESHES[name]
    results = run_ranks(world_size, train_all, tmp_path, mesh, documents)[0]
    for variant, (adamw, sgd) in results.items():
        expected_adamw, expected_sgd = reference[variant]
        assert differences(expected_adamw, adamw, sgd=False) == [], variant
        assert differences(expected_sgd, sgd, sgd=True) == [], variant
