"""Runs in a real SLURM: trained on two nodes, interrupted in every way, continued once, ended for good.

All jobs share one cluster and are kept small: two cores start every process of them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.slurm.cluster import Cluster, wait_until, why_not

pytestmark = pytest.mark.slurm
HP_TRAIN = Path(sys.executable).with_name("hp-train")
MUST_RUN = "HP_TRAIN_REQUIRE_SLURM"  # set by CI: a skip there would hide that nothing was tested
SMALL = (  # a tenth of a second a step: long enough to hit a run in the middle of one
    "recipe=llama_ddp", "trainer.device=cpu", "trainer.log_every=5", "trainer.eval_every=0", "checkpoint.every=4",
    "lr_scheduler.warmup_steps=2", "launcher.health_check=false",
)  # fmt: skip
TINY = ("model.dim=32", "model.num_heads=2", "model.num_kv_heads=1", "model.ffn_dim=64", "trainer.seq_len=16")
ONE_NODE = ("fsdp.dp_replicate_size=1", "launcher.nproc_per_node=1", "launcher.cpus_per_node=2", "launcher.time=10m")
NODES = ("node1", "node2", "node10")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    reason = why_not()
    if reason is not None:
        assert not os.environ.get(MUST_RUN), f"CI must run these tests: {reason}"
        pytest.skip(reason)
    started = Cluster(tmp_path_factory.mktemp("slurm"), NODES)
    try:
        started.start()
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where runs go: a name that a shell would take apart."""
    return tmp_path_factory.mktemp("runs") / "a $(touch pwned) 'b\"; %j"


def hp_train(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    process = start_hp_train(cluster, *words)
    stdout, stderr = process.communicate(timeout=120)
    return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)


def start_hp_train(cluster: Cluster, *words: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in cluster.environment.items() if not name.startswith("HP_TRAIN")}
    return subprocess.Popen(
        [HP_TRAIN, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def submit(cluster: Cluster, run_dir: Path, *words: str) -> str:
    done = hp_train(cluster, "submit", *SMALL, f"trainer.run_dir={run_dir}", *words)
    assert done.returncode == 0, done.stderr
    return re.search(r"submitted job (\d+): llama_ddp", done.stdout)[1]


def log_of(run_dir: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(run_dir.glob("slurm_*.out")))


def rows(run_dir: Path) -> list[dict]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_step(run_dir: Path, step: int) -> None:
    wait_until(lambda: len(rows(run_dir)) >= step, lambda: f"step {step}: {log_of(run_dir)}", patience_s=90)


def outcome(run_dir: Path) -> dict:
    return json.loads((run_dir / "outcome.json").read_text())


def no_process_of(run_dir: Path) -> bool:
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return not any(str(run_dir / "config.yaml") in command for command in commands)


@pytest.mark.long
def test_a_run_survives_a_requeue_a_power_cut_and_its_time_limit(cluster: Cluster, folder: Path) -> None:
    """Losses equal those of the run that nothing disturbed, bit by bit, and ranks follow nodes on every attempt."""
    run_dir, calm = folder / "disturbed", folder / "calm"
    layout = ("launcher.nproc_per_node=1", "launcher.cpus_per_node=2", "trainer.max_steps=40")
    job = submit(cluster, run_dir, "launcher.nodes=2", "launcher.time=10m", *layout)
    calm_run = start_hp_train(cluster, *SMALL, f"trainer.run_dir={calm}", "trainer.max_steps=40")

    wait_for_step(run_dir, 6)
    cluster.kill_slurmd("node1")  # its tasks never notice
    cluster.ask("scontrol", "requeue", job)
    cluster.start_slurmd("node1")
    cluster.release(job)

    wait_for_step(run_dir, 14)
    assert cluster.ask("squeue", "-h", "-j", job, "-o", "%N").strip() == "node[1-2]"
    cluster.cut("node2")
    cluster.release(job)  # SLURM queues it again by itself: no node, no script
    wait_for_step(run_dir, 22)
    assert cluster.ask("squeue", "-h", "-j", job, "-o", "%N").strip() == "node[1,10]"  # in the order of numbers
    cluster.ask("scancel", "--signal=USR1", "--batch", job)  # what --signal=B:USR1@N sends before the limit
    cluster.release(job)
    cluster.boot("node2")
    cluster.wait_for(job, "COMPLETED")
    assert calm_run.wait(timeout=60) == 0, calm_run.communicate()[1]

    assert outcome(run_dir)["cause"] == "done" and outcome(run_dir)["attempt"] == 4, log_of(run_dir)
    kept = ("step", "loss", "grad_norm", "lr")
    assert [[row[key] for key in kept] for row in rows(run_dir)] == [[row[key] for key in kept] for row in rows(calm)]
    ended = json.loads((run_dir / "logs/attempt_3/outcome.json").read_text())
    assert (ended["cause"], ended["exit_code"], ended["nodes"]) == ("time_limit", 75, ["node1", "node10"])
    assert "queueing the job again" in log_of(run_dir)
    status = hp_train(cluster, "status", str(run_dir)).stdout
    assert re.search(r"attempt 4, goodput \d+ %, 0 samples lost", status), status
    assert no_process_of(run_dir)


def test_a_cancelled_job_stays_cancelled(cluster: Cluster, folder: Path) -> None:
    run_dir = folder / "cancelled"
    job = submit(cluster, run_dir, *TINY, *ONE_NODE, "trainer.max_steps=100000")
    wait_for_step(run_dir, 2)
    done = hp_train(cluster, "cancel", str(run_dir))
    assert done.returncode == 0 and f"cancelled job {job}" in done.stdout, done.stderr
    wait_until(lambda: "not queued again: the job was cancelled" in log_of(run_dir), lambda: log_of(run_dir))
    cluster.wait_for(job, "CANCELLED")
    assert "Restarts=0" in cluster.show(job) and cluster.ask("squeue", "-h", "-o", "%A").split() == []
    assert outcome(run_dir)["cause"] == "cancelled"
    wait_until(lambda: no_process_of(run_dir), "all processes are gone")


def test_a_mistake_that_only_the_node_shows_fails_the_job_once(cluster: Cluster, folder: Path) -> None:
    run_dir = folder / "mistaken"
    words = ("trainer.device=cuda", "launcher.gpu_request=none")  # asks SLURM for no GPU, and then wants one
    job = submit(cluster, run_dir, *TINY, *ONE_NODE, *words)
    cluster.wait_for(job, "FAILED")
    assert "ExitCode=2:0" in cluster.show(job) and "Restarts=0" in cluster.show(job), log_of(run_dir)
    refused = next(line for line in log_of(run_dir).splitlines() if "not queued again" in line)
    assert "to this job" in refused and "launcher.gpu_request=none" in refused


def test_an_array_has_a_run_directory_for_each_task(cluster: Cluster, folder: Path) -> None:
    run_dir = folder / "array"
    seed = "trainer.seed=${oc.env:SLURM_ARRAY_TASK_ID,0}"
    job = submit(cluster, run_dir, *TINY, *ONE_NODE, "launcher.array=0-1", seed, "trainer.max_steps=3")
    ends = [run_dir.with_name(f"array-{task}") for task in (0, 1)]
    wait_until(lambda: all((end / "outcome.json").exists() for end in ends), lambda: log_of(ends[0]) + log_of(ends[1]))
    assert [outcome(end)["cause"] for end in ends] == ["done", "done"]
    assert rows(ends[0])[0]["loss"] != rows(ends[1])[0]["loss"], "each task has its own seed"
    assert (ends[1] / "slurm/job_id").read_text().strip() and job


@pytest.mark.parametrize(
    "words",
    [
        ("launcher.nodes=4",),
        ("launcher.partition=nowhere",),
        ("launcher.nodes=2", "launcher.cpus_per_node=64"),
    ],
)
def test_what_slurm_would_refuse_leaves_one_line_and_no_folder(cluster: Cluster, folder: Path, words) -> None:
    copies = {"launcher.nodes=4": 4, "launcher.nodes=2": 2}.get(words[0], 1)
    done = hp_train(
        cluster, "submit", *SMALL, f"trainer.run_dir={folder / 'refused'}", f"fsdp.dp_replicate_size={copies}",
        "launcher.nproc_per_node=1", *words,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert sum("warning" not in line for line in done.stderr.splitlines()) == 1, done.stderr
    assert not (folder / "refused").exists()


def test_no_name_or_path_has_run_anything(cluster: Cluster, folder: Path) -> None:
    assert not [*folder.parent.rglob("pwned"), *Path.cwd().glob("pwned")]
