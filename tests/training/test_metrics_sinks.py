"""Where a step's figures go besides metrics.jsonl: device peaks for the MFU, W&B, traces of chosen steps."""

from __future__ import annotations

import dataclasses
import gzip
import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
import torch

from hp_train.config import rules_run
from hp_train.config.schema import TrainerConfig
from hp_train.config.validate import faults, warnings
from hp_train.training.device_peaks import peak_flops
from hp_train.training.metrics import MetricsRow, MetricsWriter
from hp_train.training.profile import StepProfiler
from hp_train.training.wandb_sink import WandbSink


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 9.89e14), ("NVIDIA H100 PCIe", 7.56e14),
        ("NVIDIA H200", 9.89e14), ("NVIDIA H20", 1.48e14),
        ("NVIDIA A100-SXM4-80GB", 3.12e14), ("NVIDIA A10G", 7.0e13), ("NVIDIA A10", 1.25e14), ("NVIDIA L40S", 3.62e14),
        ("NVIDIA L4", 1.21e14), ("NVIDIA GB200", 2.5e15), ("NVIDIA GH200 480GB", 9.89e14),
        ("NVIDIA GeForce RTX 4090", 1.65e14), ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("Tesla T4", None),
        ("NVIDIA H2000", None), ("cpu", None),
    ],
)  # fmt: skip
def test_a_device_is_known_by_whole_words_or_not_at_all(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


ROW = MetricsRow(3, 2.5, None, 0.5, 1e-3, 64, 640.0, 320.0, 0.1, 0.0, None, 2**20, 1, 0.02, 0.03, 1)


class _FakeRun:
    url = "there/runs/1"

    def __init__(self) -> None:
        self.rows: list[dict] = []
        self.metrics: list[tuple] = []
        self.is_finished = False

    def define_metric(self, name: str, step_metric: str) -> None:
        self.metrics.append((name, step_metric))

    def log(self, row: dict) -> None:
        self.rows.append(row)

    def finish(self) -> None:
        self.is_finished = True


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A `wandb` that keeps what it is given; while `refuses` is set, it answers as if offline or without a key."""

    class Error(Exception):
        pass

    fake = types.ModuleType("wandb")
    fake.errors = types.SimpleNamespace(Error=Error)
    fake.Settings = lambda **settings: settings
    seen = types.SimpleNamespace(calls=[], runs=[], refuses=False)

    def init(**settings: object) -> _FakeRun:
        seen.calls.append(settings)
        if seen.refuses and settings.get("mode") != "offline":
            raise Error("api_key not configured\n  (no-tty)")
        seen.runs.append(_FakeRun())
        return seen.runs[-1]

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return seen


def test_every_attempt_goes_on_with_the_same_run_at_wandb(wandb: types.SimpleNamespace, tmp_path: Path) -> None:
    config = TrainerConfig()
    config.metrics.wandb, config.metrics.wandb_project = True, "mine"
    for _ in range(2):
        writer = MetricsWriter(tmp_path, config)
        writer.write(ROW)
        writer.close()
    first, second = wandb.calls
    assert first["id"] == second["id"] and len(first["id"]) == 16 and first["resume"] == "allow"
    assert first["project"] == "mine" and first["config"]["metrics"]["wandb_project"] == "mine"
    assert Path(first["dir"]) == tmp_path
    [run, _] = wandb.runs
    assert run.metrics == [("*", "step")], "steps may go back after a checkpoint is loaded"
    assert run.rows == [{key: value for key, value in dataclasses.asdict(ROW).items() if value is not None}]
    assert run.is_finished
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [dataclasses.asdict(ROW)] * 2 and rows[0]["val_loss"] is None


def test_a_validation_loss_that_was_made_up_for_reaches_every_curve(
    wandb: types.SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scalars: list[tuple] = []
    board = types.SimpleNamespace(add_scalar=lambda *scalar: scalars.append(scalar), close=lambda: None)
    fake = types.SimpleNamespace(SummaryWriter=lambda log_dir: board)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    config = TrainerConfig()
    config.metrics.wandb = config.metrics.tensorboard = True
    writer = MetricsWriter(tmp_path, config)
    writer.show_made_up(2, 1.5)
    assert scalars == [("val_loss", 1.5, 2)] and wandb.runs[0].rows == [{"step": 2, "val_loss": 1.5}]
    writer.write(dataclasses.replace(ROW, source_loss={"books": 2.5, "code": None}))
    writer.close()
    assert ("loss", 2.5, 3) in scalars and ("source_loss/books", 2.5, 3) in scalars
    assert not any(tag in ("step", "val_loss", "source_loss/code") for tag, _, _ in scalars[1:])
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1, "its row has it already"


def test_a_run_that_wandb_refuses_is_recorded_offline_and_says_so(
    wandb: types.SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    wandb.refuses = True
    WandbSink(tmp_path, TrainerConfig()).write({"step": 1})
    assert wandb.calls[1]["mode"] == "offline" and wandb.calls[1]["id"] == wandb.calls[0]["id"]
    assert wandb.runs[0].rows == [{"step": 1}]
    assert "W&B cannot be reached (api_key not configured (no-tty)); writing offline" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "netrc", "refused"),
    [
        ({}, "", True), ({"WANDB_MODE": "offline"}, "", False), ({"WANDB_MODE": "disabled"}, "", False),
        ({"WANDB_API_KEY": "k"}, "", False), ({}, "machine api.wandb.ai login user password k", False),
    ],
)  # fmt: skip
def test_wandb_without_a_key_is_refused_before_the_start(
    environment: dict, netrc: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "netrc").write_text(netrc)
    for name, value in {"NETRC": str(tmp_path / "netrc"), **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rules_run.importlib.util, "find_spec", lambda name: importlib.util)
    config = TrainerConfig()
    config.metrics.wandb = True
    assert any("metrics.wandb=true needs a key" in fault for fault in faults(config)) == refused


def test_steps_to_profile_after_the_end_are_warned_of() -> None:
    config = TrainerConfig()
    config.metrics.profile_steps = [3, 2000]
    assert "metrics.profile_steps=[2000] has no effect: the run ends at trainer.max_steps=1000" in warnings(config)
    config.metrics.wandb_project = "x"
    assert any(line.startswith("metrics.wandb_project=x has no effect") for line in warnings(config))


def test_only_the_chosen_steps_are_profiled_and_on_ranks_that_record(tmp_path: Path) -> None:
    device = torch.device("cpu")
    for rank, records in ((0, True), (1, False)):
        profiler = StepProfiler([2], tmp_path / "profile", rank, device, records=records)
        for step in (1, 2, 3):
            with profiler.around(step):
                torch.mm(torch.ones(8, 8), torch.ones(8, 8))
    folder = tmp_path / "profile" / "step_00000002"
    assert sorted(path.name for path in folder.rglob("*")) == ["rank_0.ops.txt", "rank_0.trace.json.gz"]
    assert [path.name for path in folder.parent.iterdir()] == ["step_00000002"]
    with gzip.open(folder / "rank_0.trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert sum(event.get("name") == "aten::mm" for event in events) == 1
    tables = (folder / "rank_0.ops.txt").read_text()
    assert tables.count("aten::mm") >= 2 and "operators by their own memory" in tables


def test_a_step_that_fails_leaves_the_error_as_it_is(tmp_path: Path) -> None:
    profiler = StepProfiler([1], tmp_path, 0, torch.device("cpu"), records=True)
    with pytest.raises(ZeroDivisionError), profiler.around(1):
        raise ZeroDivisionError


@pytest.mark.gpu
def test_on_cuda_the_allocations_of_the_step_are_kept_too(tmp_path: Path) -> None:
    profiler = StepProfiler([1], tmp_path, 0, torch.device("cuda"), records=True)
    with profiler.around(1):
        torch.ones(1024, device="cuda")
    assert (tmp_path / "step_00000001" / "rank_0.memory.pickle").stat().st_size > 0
