"""A resume that contradicts its checkpoint is refused by the command, from the checkpoint's JSON alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from hp_train.checkpoint.fit import checkpoint_misfits
from hp_train.checkpoint.save import save_checkpoint
from hp_train.checkpoint.state import CheckpointState
from hp_train.config.schema import ModelSection, TrainerConfig
from hp_train.launch.start import _overrides_yaml, _to_yaml
from hp_train.models.llama import Llama
from tests.command import hp_train

OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def save(folder: Path, model: ModelSection, optimizer: str) -> Path:
    """Save a real model, with the optimizer's state as it is before the first step."""
    parameters = dict(Llama(model).named_parameters())
    state = CheckpointState(parameters, OPTIMIZERS[optimizer](parameters.values(), lr=0.1), {}, {"step": 1})
    return save_checkpoint(folder, 1, state, keep_last=1)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("tied", [False, True])
def test_what_was_saved_fits_and_any_other_shape_or_optimizer_does_not(
    optimizer: str, tied: bool, tmp_path: Path
) -> None:
    model = ModelSection(vocab_size=260, dim=16, num_layers=2, num_heads=4, ffn_dim=24, tie_embeddings=tied)
    assert checkpoint_misfits(tmp_path, model, optimizer) == []  # nothing saved yet
    save(tmp_path, model, optimizer)
    assert checkpoint_misfits(tmp_path, model, optimizer) == []
    for change in (
        {"vocab_size": 300}, {"dim": 32}, {"num_layers": 1}, {"num_layers": 3}, {"num_kv_heads": 2}, {"ffn_dim": 32},
        {"tie_embeddings": not tied},
    ):  # fmt: skip
        [line] = checkpoint_misfits(tmp_path, dataclasses.replace(model, **change), optimizer)
        assert "is not the model of checkpoint step_00000001" in line, change
    other = "sgd" if optimizer == "adamw" else "adamw"
    [line] = checkpoint_misfits(tmp_path, model, other)
    assert line.startswith(f"optimizer.name={other} cannot go on") and f"use {optimizer}" in line


def test_a_checkpoint_that_cannot_be_read_is_left_to_the_workers(tmp_path: Path) -> None:
    model = ModelSection(dim=16, num_layers=1, num_heads=4, ffn_dim=24)
    folder = save(tmp_path, model, "sgd")
    text = (folder / "metadata.json").read_bytes()
    (folder / "metadata.json").write_bytes(text[:-2] + b"xx")  # the same size, another checksum
    assert checkpoint_misfits(tmp_path, dataclasses.replace(model, dim=32), "adamw") == []


def test_the_command_refuses_before_torch_is_imported(tmp_path: Path) -> None:
    config = TrainerConfig()
    config.trainer.device = "cpu"
    run_dir = tmp_path / "run"
    save(run_dir / "checkpoints", config.model, "adamw")
    (run_dir / "config.yaml").write_text(_to_yaml(config))
    (run_dir / "overrides.yaml").write_text(_overrides_yaml("", [], config))
    done = hp_train("resume", "run", "model.num_layers=2", "optimizer.name=sgd", cwd=tmp_path)
    assert done.code == 2 and len(done.lines) == 2, done.stderr
    assert "model.layers.2." in done.lines[0] and "and 17 more differ" in done.lines[0]
    assert "optimizer.name=sgd" in done.lines[1] and not (run_dir / "logs").exists()
