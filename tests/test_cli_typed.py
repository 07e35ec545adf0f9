"""Overrides as a person types them, through the real command and a real shell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hp_train import cli
from hp_train.commands import train as train_command
from tests.command import hp_train

PLAIN = "a=b #c @d *e %f ,g [h {i ]j }k ~n"


def test_each_kind_of_value_is_taken_as_typed(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    done = hp_train(
        "--cfg", "job", f"trainer.run_name={PLAIN}", "trainer.run_dir=/data/my runs/x=1,y=[2]",
        "data.path=~/tokens, all",
        "trainer.max_steps=1e5", "optimizer.lr=1e-3", "pp.layer_split=8-8", "optimizer.betas=0.9-0.95",
        "trainer.compile=TRUE", "launcher.time=1-00:00:00", "data.val_path=null", "model.rope_scaling={factor:4}",
        "fsdp.reshard_after_forward=false", "launcher.nproc_per_node=2", "trainer.runs_root='null'",
        cwd=tmp_path, env={"HOME": str(tmp_path / "home")},
    )  # fmt: skip
    assert (done.code, done.stderr) == (0, "")
    printed = yaml.safe_load(done.stdout)
    trainer = printed["trainer"]
    assert (trainer["run_name"], trainer["run_dir"]) == (PLAIN, "/data/my runs/x=1,y=[2]")
    assert (trainer["max_steps"], trainer["compile"], trainer["runs_root"]) == (100_000, True, "null")
    assert printed["data"]["path"] in ("~/tokens, all", f"{tmp_path}/home/tokens, all")
    assert (printed["optimizer"]["lr"], printed["optimizer"]["betas"]) == (1e-3, [0.9, 0.95])
    assert (printed["pp"]["layer_split"], printed["model"]["rope_scaling"]["factor"]) == ([8, 8], 4.0)
    assert (printed["launcher"]["time"], printed["launcher"]["nproc_per_node"]) == ("1-00:00:00", 2)
    assert printed["fsdp"]["reshard_after_forward"] is False and printed["data"]["val_path"] is None


def test_a_shell_hands_over_the_quoted_and_the_plain(tmp_path: Path) -> None:
    words = "--cfg job -p pp pp.layer_split=8-8 'trainer.run_name=it is 50%' \"pp.trace_steps=[1, 2]\""
    command = f"{sys.executable} -m hp_train {words}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    printed = yaml.safe_load(done.stdout)
    assert (printed["layer_split"], printed["trace_steps"]) == ([8, 8], [1, 2])


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list:
    calls: list = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_command, "start_run", lambda config, **more: calls.append((config, more)) or 0)
    return calls


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["hp-train", *arguments])
    return cli.main()


def test_commas_separate_jobs_only_where_several_were_asked_for(started: list, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "trainer.run_name=a,b", "trainer.device=cpu") == 0
    names = "trainer.run_name=x=1,y 2,'z,z'"
    assert run(monkeypatch, "--multirun", names, "trainer.seed=range(2,4)", "trainer.device=cpu") == 0
    found = [(config.trainer.run_name, config.trainer.seed) for config, _ in started]
    assert found == [("a,b", 0), *((name, seed) for name in ("x=1", "y 2", "z,z") for seed in (2, 3))]
