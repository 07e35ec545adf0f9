"""Sources and documents on several meshes: the same losses by source, which add up to the loss, and over a resume."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.data.test_mix import write_megatron
from tests.distributed.ranks import run_ranks
from tests.distributed.same_numbers import TINY, make_config, run_one

ROWS = 3
SCHEDULE_FILE = "last_first.csv"
MESHES = {
    "fsdp_2": {"fsdp.dp_shard_size": 2},
    "dualpipe_v": {
        "accelerator.pp_size": 2, "pp.schedule": "dualpipe_v", "pp.stages_per_rank": 2, "trainer.micro_batch_size": 1,
    },
    "pp_data_steps": {"accelerator.pp_size": 2, "pp.data_steps": True},
    "last_micro_batch_first": {"accelerator.pp_size": 2},  # by a schedule file
}  # fmt: skip
ISOLATED = {
    "isolated_fsdp_2": {"fsdp.dp_shard_size": 2},
    "isolated_pp_2": {"accelerator.pp_size": 2, "pp.schedule": "zb_h1"},
}


def train_all(rank: int, world_size: int, folder: Path, own: Path) -> None:
    settings = {
        "trainer.max_steps": ROWS, "checkpoint.every": 2, "optimizer.lr": 1e-3,
        "data.mix": {"shakespeare": 2.0, "own": 1.0}, "data.sources": {"own": str(own)},
    }  # fmt: skip
    for name, mesh in {**MESHES, **ISOLATED}.items():
        config = make_config(TINY, settings, mesh)
        if name in ISOLATED:
            config.data.document_boundaries = "isolate"
        if name == "last_micro_batch_first":
            config.pp.schedule = f"file:{folder / SCHEDULE_FILE}"
        if name == "fsdp_2":  # stopped after step 2, and gone on with
            stopped = replace(config, trainer=replace(config.trainer, max_steps=2))
            run_one(rank, world_size, folder / name, stopped)
        run_one(rank, world_size, folder / name, config)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    """What was recorded on each mesh."""
    folder = tmp_path_factory.mktemp("runs")
    own = write_megatron(folder / "own", [[5, 6, 7, 8, 9, 10, 11] * 3] * 40)
    (folder / SCHEDULE_FILE).write_text("0F3,0F2,0F1,0F0,0B3,0B2,0B1,0B0\n1F3,1F2,1F1,1F0,1B3,1B2,1B1,1B0\n")
    run_ranks(2, train_all, folder, own)
    return {
        name: [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        for name in (*MESHES, *ISOLATED)
    }


def test_the_figures_of_each_source_on_every_mesh(rows: dict[str, list[dict]]) -> None:
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


def test_isolated_documents_give_the_same_numbers_with_and_without_a_pipeline(rows: dict[str, list[dict]]) -> None:
    for row, expected in zip(rows["isolated_pp_2"], rows["isolated_fsdp_2"], strict=True):
        assert row["source_tokens"] == expected["source_tokens"]
        assert row["source_loss"] == pytest.approx(expected["source_loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    isolated, attended = rows["isolated_fsdp_2"][0], rows["fsdp_2"][0]
    assert isolated["source_tokens"]["own"] < attended["source_tokens"]["own"], "no target crosses documents"
    assert isolated["source_loss"]["own"] != pytest.approx(attended["source_loss"]["own"], rel=1e-4)
