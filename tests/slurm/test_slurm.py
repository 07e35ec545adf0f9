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
from contextlib import contextmanager
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


class Following:
    """A verb that looks at a run for as long as it goes on."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def end(self) -> str:
        """Wait for its end and return what it printed."""
        stdout, stderr = self._process.communicate(timeout=60)
        assert (self._process.returncode, stderr) == (0, "")
        return stdout


@contextmanager
def following(cluster: Cluster, *words: str) -> Iterator[Following]:
    process = start_hp_train(cluster, *words)
    try:
        yield Following(process)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


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


@pytest.mark.long
@pytest.mark.parametrize("lost", ["node1", "node2"])
def test_a_node_whose_slurmd_stays_dead_is_done_without(cluster: Cluster, folder: Path, lost: str) -> None:
    """Its tasks live on: with node1 the job's script, the launcher that leads and its worker, until they see it."""
    run_dir = folder / f"without {lost}"
    job = submit(
        cluster, run_dir, *TINY, "launcher.nodes=2", "launcher.nproc_per_node=1", "launcher.cpus_per_node=2",
        "launcher.time=10m", "trainer.max_steps=200",
    )  # fmt: skip
    wait_for_step(run_dir, 6)
    assert cluster.ask("squeue", "-h", "-j", job, "-o", "%N").strip() == "node[1-2]"
    cluster.kill_slurmd(lost)
    cluster.release(job)
    cluster.wait_for(job, "COMPLETED")
    wait_until(lambda: no_process_of(run_dir), "all processes are gone, on the lost node too")
    cluster.start_slurmd(lost)
    first = json.loads((run_dir / "logs/attempt_1/outcome.json").read_text())
    assert (first["cause"], first["node"]) == ("lost_node", lost), log_of(run_dir)
    others = [name for name in NODES if name != lost]
    assert (outcome(run_dir)["cause"], outcome(run_dir)["nodes"]) == ("done", others), log_of(run_dir)
    assert [row["step"] for row in rows(run_dir)] == list(range(1, 201))
    cluster.wait_for_idle()


@pytest.mark.long
def test_a_job_stops_itself_before_its_time_is_over(cluster: Cluster, folder: Path) -> None:
    """SLURM's warning would come too late; cancelled while it waits to go on, the attempt's end stays as it was."""
    run_dir = folder / "limited"
    words = ("launcher.time=1m", "launcher.signal_lead=1s", "trainer.max_steps=100000", "checkpoint.every=1000")
    job = submit(cluster, run_dir, *TINY, *ONE_NODE[:-1], *words)
    wait_until((run_dir / "outcome.json").exists, lambda: log_of(run_dir), patience_s=120)
    cluster.wait_for(job, "PENDING")
    assert "Restarts=1" in cluster.show(job) and "TIME LIMIT" not in log_of(run_dir), log_of(run_dir)
    assert (outcome(run_dir)["cause"], outcome(run_dir)["exit_code"]) == ("time_limit", 75)
    assert outcome(run_dir)["committed_step"] == outcome(run_dir)["step"] > 0
    assert hp_train(cluster, "cancel", job).returncode == 0
    told = hp_train(cluster, "status", job).stdout
    assert f": time limit at step {outcome(run_dir)['step']}; job {job} cancelled" in told


def test_a_preempted_job_goes_on_exactly_once(cluster: Cluster, folder: Path) -> None:
    """A job of a partition that comes first takes all nodes away, with 20 s of notice, and gives them back."""
    run_dir = folder / "preempted"
    steps = ("trainer.max_steps=300", "checkpoint.every=200")
    job = submit(cluster, run_dir, *TINY, *ONE_NODE, *steps, "launcher.partition=main")
    wait_for_step(run_dir, 3)
    urgent = cluster.ask(
        "sbatch", "--parsable", "--partition=urgent", f"--nodes={len(NODES)}", "--exclusive", "--output=/dev/null",
        "--wrap=sleep 1",
    ).strip()  # fmt: skip
    cluster.release(job)
    cluster.wait_for(job, "COMPLETED")
    assert cluster.state(urgent) == "COMPLETED"
    first = json.loads((run_dir / "logs/attempt_1/outcome.json").read_text())
    assert (first["cause"], first["exit_code"]) == ("preempted", 75), log_of(run_dir)
    assert (outcome(run_dir)["cause"], outcome(run_dir)["attempt"]) == ("done", 2), log_of(run_dir)
    assert [row["step"] for row in rows(run_dir)] == list(range(1, 301))
    assert "Restarts=1" in cluster.show(job) and cluster.ask("squeue", "-h", "-o", "%A").split() == []
    status = hp_train(cluster, "status", job).stdout  # the run is in no folder of runs: SLURM tells where
    assert re.search(r"attempt 2, goodput \d+ %, 0 samples lost$", status, re.MULTILINE), status


@pytest.mark.long
def test_a_run_goes_on_in_another_job_where_requeueing_is_forbidden(cluster: Cluster, folder: Path) -> None:
    run_dir = folder / "resubmitted"
    steps = ("trainer.max_steps=300", "checkpoint.every=200", "launcher.continue_by=resubmit")
    job = submit(cluster, run_dir, *TINY, *ONE_NODE, *steps)
    wait_for_step(run_dir, 3)
    with following(cluster, "logs", str(run_dir), "-f") as logs, following(cluster, "watch", str(run_dir)) as view:
        cluster.ask("scancel", "--signal=USR1", "--batch", job)  # what --signal=B:USR1@N sends before the limit
        wait_until(lambda: (run_dir / "slurm/job_id").read_text().strip() != job, lambda: log_of(run_dir))
        following_job = (run_dir / "slurm/job_id").read_text().strip()
        cluster.wait_for(following_job, "COMPLETED")
        seen, shown = logs.end(), view.end()
    assert "Restarts=0" in cluster.show(job) and "Requeue=0" in cluster.show(job)
    ends = [json.loads((run_dir / f"logs/attempt_{n}/outcome.json").read_text())["cause"] for n in (1, 2)]
    assert ends == ["time_limit", "done"] and [row["step"] for row in rows(run_dir)] == list(range(1, 301))
    assert cluster.ask("squeue", "-h", "-o", "%A").split() == []
    assert "hp-train: submitting again: attempt 1 ended as time_limit" in seen
    assert seen.splitlines()[-1] == "hp-train: not queued again: all steps are taken", seen
    assert "attempt 1 stopped and saved at step" in shown and "attempt 2 done at step 300" in shown, shown


@pytest.mark.long
def test_inside_an_allocation_the_run_starts_at_once_over_all_its_nodes(cluster: Cluster, folder: Path) -> None:
    run_dir = folder / "inside"
    words = [*SMALL, *TINY, f"trainer.run_dir={run_dir}", "launcher.nodes=2", "launcher.nproc_per_node=1"]
    salloc = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", "--time=10"]
    done = subprocess.run(
        [*salloc, HP_TRAIN, "submit", *words, "trainer.max_steps=10"], check=False, env=cluster.environment,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr + log_of(run_dir)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("running in job ") and any(line.startswith("step 10/10 ") for line in lines), lines
    assert outcome(run_dir)["cause"] == "done" and len(outcome(run_dir)["nodes"]) == 2
    other = subprocess.run(
        ["salloc", "--quiet", "--nodes=1", "--time=10", HP_TRAIN, "submit", *SMALL, *TINY, *words[-2:]],
        check=False, env=cluster.environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    refused = "hp-train: launcher.nodes=2 and the nodes of this allocation are 1; use launcher.nodes=1"
    assert (other.returncode, other.stderr.splitlines()[-1]) == (2, refused)


@pytest.mark.parametrize("by", ["hp-train", "scancel"])
def test_a_cancelled_job_stays_cancelled(cluster: Cluster, folder: Path, by: str) -> None:
    run_dir = folder / f"cancelled by {by}"
    job = submit(cluster, run_dir, *TINY, *ONE_NODE, "trainer.max_steps=100000")
    wait_for_step(run_dir, 2)
    if by == "scancel":
        cluster.ask("scancel", job)
    else:
        done = hp_train(cluster, "cancel", str(run_dir))
        assert done.returncode == 0 and f"cancelled job {job}" in done.stdout, done.stderr
    wait_until(lambda: "not queued again: the job was cancelled" in log_of(run_dir), lambda: log_of(run_dir))
    cluster.wait_for(job, "CANCELLED")
    assert "Restarts=0" in cluster.show(job) and cluster.ask("squeue", "-h", "-o", "%A").split() == []
    assert ": cancelled at step " in hp_train(cluster, "status", str(run_dir)).stdout
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
