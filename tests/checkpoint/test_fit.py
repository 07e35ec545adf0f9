"""A resume that contradicts its checkpoint is refused by the command, from the checkpoint's JSON alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from hp_train.checkpoint.fit import checkpoint_changes, checkpoint_misfits, identity, steps_misfits
from hp_train.checkpoint.save import save_checkpoint
from hp_train.checkpoint.state import CheckpointState
from hp_train.checkpoint.storage import SavePolicy
from hp_train.config.schema import ModelSection, TrainerConfig
from hp_train.launch.start import _overrides_yaml, _to_yaml
from hp_train.models.llama import Llama
from tests.command import hp_train

OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def save(folder: Path, model: ModelSection, optimizer: str) -> Path:
    """Save a real model, with the optimizer's state as it is before the first step."""
    parameters = dict(Llama(model).named_parameters())
    state = CheckpointState(parameters, OPTIMIZERS[optimizer](parameters.values(), lr=0.1), {}, {"step": 1})
    return save_checkpoint(folder, 1, state, SavePolicy(1))


def misfits(folder: Path, model: ModelSection, optimizer: str) -> list[str]:
    config = TrainerConfig()
    config.model, config.optimizer.name = model, optimizer
    return checkpoint_misfits(folder, config)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("tied", [False, True])
def test_what_was_saved_fits_and_any_other_shape_or_optimizer_does_not(
    optimizer: str, tied: bool, tmp_path: Path
) -> None:
    model = ModelSection(vocab_size=260, dim=16, num_layers=2, num_heads=4, ffn_dim=24, tie_embeddings=tied)
    assert misfits(tmp_path, model, optimizer) == []  # nothing saved yet
    save(tmp_path, model, optimizer)
    assert misfits(tmp_path, model, optimizer) == []
    for change in (
        {"vocab_size": 300}, {"dim": 32}, {"num_layers": 1}, {"num_layers": 3}, {"num_kv_heads": 2}, {"ffn_dim": 32},
        {"tie_embeddings": not tied},
    ):  # fmt: skip
        [line] = misfits(tmp_path, dataclasses.replace(model, **change), optimizer)
        assert "is not the model of checkpoint step_00000001" in line, change
    other = "sgd" if optimizer == "adamw" else "adamw"
    [line] = misfits(tmp_path, model, other)
    assert line.startswith(f"optimizer.name={other} cannot go on") and f"use {optimizer}" in line


def test_what_changes_with_a_meaning_is_said_and_what_has_none_is_refused(tmp_path: Path) -> None:
    config = TrainerConfig()
    config.model = ModelSection(dim=16, num_layers=1, num_heads=4, ffn_dim=24)
    parameters = dict(Llama(config.model).named_parameters())
    progress = {"step": 10, "samples_seen": 80, "total_steps": 1000, **identity(config)}
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1)
    save_checkpoint(tmp_path, 10, CheckpointState(parameters, optimizer, {}, progress), SavePolicy(1))
    assert checkpoint_misfits(tmp_path, config) == checkpoint_changes(tmp_path, config) == []
    config.trainer.global_batch_size, config.lr_scheduler.total_steps = 16, 2000
    batch, schedule = checkpoint_changes(tmp_path, config)
    assert batch.startswith("trainer.global_batch_size 8 -> 16 from step 11 on: its first sample is 80")
    assert schedule.startswith("lr_scheduler.total_steps 1000 -> 2000 from step 11 on")
    config.lr_scheduler.total_steps, config.trainer.max_steps = None, 4000
    assert "lowest value from step 1000 on" in checkpoint_changes(tmp_path, config)[1]
    assert checkpoint_misfits(tmp_path, config) == []
    config.trainer.seed, config.trainer.seq_len, config.data.name, config.trainer.max_steps = 5, 64, "random", 9
    seed, length, data = checkpoint_misfits(tmp_path, config)
    assert seed.startswith("trainer.seed=5 puts samples into another order") and "use 0, or start a new run" in seed
    assert length.startswith("trainer.seq_len=64") and data.startswith("data.* is not what checkpoint step_00000010")
    [steps] = steps_misfits(tmp_path, config)
    assert steps == "trainer.max_steps=9 lies before step 10 of checkpoint step_00000010; use 10 or more"
    config.trainer.max_steps = 10
    assert steps_misfits(tmp_path, config) == steps_misfits(tmp_path / "none", config) == []


def test_a_checkpoint_that_cannot_be_read_is_left_to_the_workers(tmp_path: Path) -> None:
    model = ModelSection(dim=16, num_layers=1, num_heads=4, ffn_dim=24)
    folder = save(tmp_path, model, "sgd")
    text = (folder / "metadata.json").read_bytes()
    (folder / "metadata.json").write_bytes(text[:-2] + b"xx")  # the same size, another checksum
    assert misfits(tmp_path, dataclasses.replace(model, dim=32), "adamw") == []


def test_the_command_refuses_before_torch_is_imported(tmp_path: Path) -> None:
    config = TrainerConfig()
    config.trainer.device = "cpu"
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    save(run_dir / "checkpoints", config.model, "adamw")
    (run_dir / "config.yaml").write_text(_to_yaml(config))
    (run_dir / "overrides.yaml").write_text(_overrides_yaml("", [], config))
    done = hp_train("resume", "run", "model.num_layers=2", "optimizer.name=sgd", cwd=tmp_path)
    assert done.code == 2 and len(done.lines) == 2, done.stderr
    assert "model.layers.2." in done.lines[0] and "and 17 more differ" in done.lines[0]
    assert "optimizer.name=sgd" in done.lines[1] and not (run_dir / "logs").exists()
