"""What trainer.resume makes of a folder that holds a run, and of one that holds none."""

from __future__ import annotations

from pathlib import Path

import pytest

from hp_train.commands.train import run_to_go_on_with
from hp_train.config.schema import TrainerConfig
from hp_train.config.validate import faults, warnings
from hp_train.errors import ConfigError
from tests.checkpoint.whole_runs import save_steps


def _config(resume: str, run_dir: Path | None) -> TrainerConfig:
    config = TrainerConfig()
    config.trainer.resume, config.trainer.run_dir = resume, None if run_dir is None else str(run_dir)
    return config


def test_a_run_is_gone_on_with_only_if_asked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no complete checkpoint; use auto"):
        run_to_go_on_with(_config("must", tmp_path))
    assert run_to_go_on_with(_config("auto", tmp_path)) is None  # nothing there yet: a new run
    (tmp_path / "config.yaml").write_text("{}")
    assert run_to_go_on_with(_config("auto", tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match="trainer.resume=must"):
        run_to_go_on_with(_config("must", tmp_path))
    save_steps(tmp_path / "checkpoints", 4)
    assert run_to_go_on_with(_config("must", tmp_path)) == tmp_path
    assert run_to_go_on_with(_config("never", tmp_path)) is None  # and the folder is then refused as occupied


def test_without_a_folder_there_is_nothing_to_go_on_with() -> None:
    assert any("trainer.resume=must needs trainer.run_dir" in fault for fault in faults(_config("must", None)))
    assert any("trainer.resume=auto has no effect" in warning for warning in warnings(_config("auto", None)))
    assert not any("trainer.resume" in warning for warning in warnings(_config("never", None)))
