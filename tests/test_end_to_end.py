"""The real command, from the shell: trains on four processes, is stopped, goes on, and says how it went."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hp_train.training.metrics import MetricsRow

HP_TRAIN = Path(sys.executable).with_name("hp-train")
SMALL = [
    "recipe=llama_fsdp_pp", "model.dim=32", "model.num_heads=2", "model.num_kv_heads=1", "model.ffn_dim=64",
    "trainer.seq_len=16", "trainer.device=cpu", "trainer.log_every=1", "trainer.eval_every=4", "trainer.eval_batches=1",
    "lr_scheduler.warmup_steps=2", "lr_scheduler.total_steps=12",
]  # fmt: skip


def command(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HP_TRAIN, *words], cwd=cwd, capture_output=True, text=True, timeout=180)


def rows(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of 12 steps that nothing disturbs, started in another folder whose name has a space."""
    folder = tmp_path_factory.mktemp("a folder")
    words = ("trainer.run_dir=straight", "trainer.max_steps=12", "metrics.profile_steps=[2]", "pp.p2p_transport=auto")
    done = command(*SMALL, *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "straight", done.stdout + done.stderr


def test_a_run_prints_what_it_does(straight: tuple[Path, str]) -> None:
    run_dir, printed = straight
    lines = [line for line in printed.splitlines() if "warning" not in line]
    assert lines[0] == "batch 16 sequences = 2 data-parallel x 4 micro-batch x 2 micro-batches; 256 tokens a step"
    assert "pp.p2p_transport=auto: multi_stream" in lines
    assert sum(line.startswith("step ") for line in lines) == 12
    assert any(line.startswith("step 8/12 loss ") and " val " in line and " eta " in line for line in lines)
    assert f"hp-train resume {run_dir.name}" in printed or "hp-train resume" in printed
    losses = [row["loss"] for row in rows(run_dir)]
    assert losses[-1] < losses[0]
    assert (run_dir / "config.yaml").exists() and (run_dir / "pass_config.json").exists()
    plan = json.loads((run_dir / "plan.json").read_text())
    assert plan["num_processes"] == 4 and plan["pipeline"]["layers_of_stage"] == [[0, 2], [2, 4]]


def test_a_run_records_every_figure_and_the_steps_to_profile(straight: tuple[Path, str]) -> None:
    run_dir, _ = straight
    recorded = rows(run_dir)
    assert all(list(row) == [field.name for field in dataclasses.fields(MetricsRow)] for row in recorded)
    assert all(0 < row["compute_min_s"] <= row["compute_max_s"] and row["slowest_rank"] in range(4) for row in recorded)
    traced = sorted(path.name for path in (run_dir / "profile" / "step_00000002").glob("*.trace.json.gz"))
    assert traced == ["rank_0.trace.json.gz", "rank_2.trace.json.gz"], "one data-parallel rank of each stage"
    assert json.loads((run_dir / "logs" / "attempt_1" / "attempt.json").read_text())["peak_flops"] is None


@pytest.mark.long
def test_a_run_stopped_by_sigterm_goes_on_as_if_it_had_not_been(straight: tuple[Path, str], tmp_path: Path) -> None:
    run_dir = tmp_path / "stopped"
    process = subprocess.Popen(
        [HP_TRAIN, *SMALL, f"trainer.run_dir={run_dir}", "trainer.max_steps=12"], cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    wait_for_step(run_dir, 3, process)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 75, printed
    assert "and saving" in printed
    stopped_at = len(rows(run_dir))
    assert 3 <= stopped_at < 12
    resumed = command("resume", str(run_dir), cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    kept = ("step", "loss", "grad_norm", "lr")  # a stop leaves out the evaluation that may be due at its step
    assert [[row[key] for key in kept] for row in rows(run_dir)] == [
        [row[key] for key in kept] for row in rows(straight[0])
    ]
    again = command("resume", str(run_dir), cwd=tmp_path)
    assert again.returncode == 0 and "finished" in again.stdout + again.stderr


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen) -> None:
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not (metrics.exists() and metrics.read_text().count("\n") >= step):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.02)
