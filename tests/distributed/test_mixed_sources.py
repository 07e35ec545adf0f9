"""A mix of sources on three meshes: the same losses by source, which add up to the loss, and over a resume."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.data.test_mix import write_megatron
from tests.distributed.ranks import run_ranks
from tests.distributed.same_numbers import TINY, make_config, run_one

ROWS = 3
MESHES = {
    "fsdp_2": {"fsdp.dp_shard_size": 2},
    "dualpipe_v": {"accelerator.pp_size": 2, "pp.schedule": "dualpipe_v", "pp.stages_per_rank": 2, "trainer.micro_batch_size": 1},
    "pp_data_steps": {"accelerator.pp_size": 2, "pp.data_steps": True},
}  # fmt: skip


def train_all(rank: int, world_size: int, folder: Path, own: Path) -> None:
    for name, mesh in MESHES.items():
        config = make_config(TINY, {"trainer.max_steps": ROWS, "checkpoint.every": 2, "optimizer.lr": 1e-3,
                                    "data.mix": {"shakespeare": 2.0, "own": 1.0}, "data.sources": {"own": str(own)}}, mesh)  # fmt: skip
        if name == "fsdp_2":  # stopped after step 2, and gone on with
            stopped = replace(config, trainer=replace(config.trainer, max_steps=2))
            run_one(rank, world_size, folder / name, stopped)
        run_one(rank, world_size, folder / name, config)


def test_the_figures_of_each_source_on_every_mesh(tmp_path: Path) -> None:
    own = write_megatron(tmp_path / "own", [[5, 6, 7, 8] * 20] * 10)
    run_ranks(2, train_all, tmp_path, own)
    rows = {
        name: [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in MESHES
    }
    reference = rows["pp_data_steps"]
    assert len(reference) == ROWS
    for row in reference:
        assert row["source_tokens"]["shakespeare"] + row["source_tokens"]["own"] == row["tokens"] == 8 * 16
        assert row["source_tokens"]["own"] in (2 * 16, 3 * 16)
        total = sum(row["source_loss"][name] * row["source_tokens"][name] for name in row["source_loss"])
        assert total / row["tokens"] == pytest.approx(row["loss"], rel=1e-6)
    assert reference[0]["source_loss"]["own"] != pytest.approx(reference[0]["source_loss"]["shakespeare"], rel=1e-3)
    for name in MESHES:
        for row, expected in zip(rows[name], reference, strict=True):
            assert row["source_tokens"] == expected["source_tokens"]
            assert row["source_loss"] == pytest.approx(expected["source_loss"], rel=1e-5)
