"""What needs no SLURM: the text of the job script, the decision at a job's end, reading what SLURM's commands print."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from hp_train.config.schema import ContainerSection, TrainerConfig
from hp_train.errors import ConfigError
from hp_train.launch import slurm_end, slurm_job
from hp_train.launch.outcome import Cause, Outcome, read_outcome, write_outcome
from hp_train.launch.owner import Owner
from hp_train.launch.run_dir import attempt_dir
from hp_train.launch.slurm_end import Action, JobState, decide
from hp_train.launch.slurm_script import JobPaths, job_script, sbatch_quoted
from hp_train.launch.slurm_site import describe_cluster, draft, read_partitions
from hp_train.launch.slurm_tools import Site, parse_accounting, parse_job, parse_site, parse_test_only, seconds_of
from hp_train.launch.submit import notes_for

NASTY = "a b$(touch pwned);'\"`touch pwned` & # %j"


def _config(**launcher: object) -> TrainerConfig:
    config = TrainerConfig()
    config.launcher.name = "slurm"
    for name, value in launcher.items():
        setattr(config.launcher, name, value)
    return config


def _script(config: TrainerConfig, run_dir: str = "/runs/one", recipe: str = "llama_fsdp", nproc: int = 8) -> str:
    paths = JobPaths(Path(run_dir), "config.yaml", "/venv/bin/python", Path(run_dir) / "code")
    return job_script(config, recipe, nproc, paths)


def _options(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]


VARIANTS = {
    "plain": {},
    "full": {
        "account": NASTY, "partition": "p", "qos": "q", "constraint": "a&b", "exclude": "node[1-2]",
        "dependency": "afterok:1", "modules": [NASTY, "cuda/12"], "env": [f"A={NASTY}\nB"],
        "extra_lines": ["#SBATCH --mem=10G", "ulimit -l unlimited"], "time": "36h", "cpus_per_node": 12,
        "gpu_request": "gres:h100", "signal_lead": "5m", "nodes": 64,
    },
    "array": {"array": "0-7%2", "continue_by": "resubmit"},
    "requeue": {"continue_by": "requeue"},
    "none": {"continue_by": "none"},
    "pyxis": {"container": ContainerSection("pyxis", NASTY, ["/data:/data:ro"])},
    "apptainer": {"container": ContainerSection("apptainer", NASTY, ["/data"], "/opt/python")},
}  # fmt: skip


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_scripts_pass_shellcheck(tmp_path: Path) -> None:
    """Not with NASTY: of a quoted `$(...)` shellcheck suspects that it was meant to run."""
    for name, launcher in VARIANTS.items():
        text = _script(_config(**launcher), "/runs/a b").replace(shlex.quote(NASTY), "'a b'")
        (tmp_path / f"{name}.sh").write_text(text.replace(shlex.quote(f"{NASTY}\nB"), "'a b'"))
    done = subprocess.run(["shellcheck", *sorted(tmp_path.glob("*.sh"))], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", VARIANTS)
def test_nothing_in_a_script_runs_what_stands_in_a_value(tmp_path: Path, name: str) -> None:
    """The script is run with stand-ins for SLURM's commands, in a folder whose name is hostile."""
    run_dir, tools = tmp_path / NASTY, tmp_path / "bin"
    run_dir.mkdir()
    tools.mkdir()
    for tool in ("srun", "scontrol", "squeue", "sbatch", "module", "python", "apptainer"):
        (tools / tool).write_text('#!/bin/bash\nprintf "%s\\0" "${0##*/}" "$@" >>"$LOG"; printf "\\n" >>"$LOG"\n')
        (tools / tool).chmod(0o755)
    launcher = {**VARIANTS[name], "extra_lines": []}
    (tmp_path / "job.sh").write_text(_script(_config(**launcher), str(run_dir)))
    environment = {
        "PATH": f"{tools}:/usr/bin:/bin", "LOG": str(tmp_path / "log"), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1",
        "SLURM_JOB_CPUS_PER_NODE": "72(x2),36", "SLURM_JOB_NUM_NODES": "1", "SLURM_ARRAY_TASK_ID": "3",
    }  # fmt: skip
    done = subprocess.run(["bash", tmp_path / "job.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, "nobody judged: the job failed, and did not go on"
    calls = (tmp_path / "log").read_text()
    expected = f"{run_dir}-3" if name == "array" else str(run_dir)
    assert f"hp_train.launch.slurm_job\0{expected}\0config.yaml" in calls, calls + done.stderr
    assert "--cpus-per-task=36\0--cpu-bind=none" in calls, "the smallest node's cores"
    assert "requeue" not in calls and "sbatch\0" not in calls
    assert not list(tmp_path.rglob("pwned"))


def test_options_of_the_script() -> None:
    assert _options(_script(_config(nodes=2, time="24h"))) == [
        "job-name=llama_fsdp", "nodes=2", "ntasks-per-node=1", "exclusive", "mem=0", "gpus-per-node=8", "time=24:00:00",
        "signal=B:USR1@120", "requeue", "open-mode=append", "output=/runs/one/slurm_%j.out",
    ]  # fmt: skip
    options = _options(_script(_config(**VARIANTS["full"])))
    assert {"cpus-per-task=12", "gres=gpu:h100:8", "time=1-12:00:00", "signal=B:USR1@300"} <= set(options)
    assert options[-1] == "mem=10G", "the user's own come last, where they win"
    cpu = _config(gpu_request="gres")
    cpu.trainer.device = "cpu"
    assert not any("gpu" in option for option in _options(_script(cpu)))
    assert 'output="/a %%j b/slurm_%j.out"' in _options(_script(_config(), "/a %j b"))


@pytest.mark.parametrize("path", ["/runs/a\nb", "/runs/a\\b", "/runs/\x07"])
def test_paths_that_no_script_can_carry_are_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="which SLURM's scripts cannot carry"):
        _script(_config(), path)


def test_quotes_as_sbatch_reads_them() -> None:
    assert [sbatch_quoted(text) for text in ("node[1-2]", "a b", 'a"\\')] == ["node[1-2]", '"a b"', '"a\\"\\\\"']


def _end(cause: Cause, attempt: int = 1, first: int = 1, committed: int = 8, step: int = 9) -> Outcome:
    return Outcome(attempt, cause, 1, step, first_step=first, committed_step=committed, last_step=step)


OK, SAVED, BAD = _end(Cause.DONE), _end(Cause.TIME_LIMIT), _end(Cause.USER_ERROR)
RUNNING = JobState("RUNNING")
STUCK = (_end(Cause.LOST_NODE, 1, 1, 0), _end(Cause.LOST_NODE, 2, 1, 0))
TWICE = (_end(Cause.UNKNOWN, 1), _end(Cause.UNKNOWN, 2))


@pytest.mark.parametrize(
    "outcomes, job, settings, action, words",
    [
        ((SAVED,), RUNNING, {}, Action.REQUEUE, "ended as time_limit at step 9"),
        ((_end(Cause.PREEMPTED),), RUNNING, {"continue_by": "resubmit"}, Action.RESUBMIT, "preempted"),
        ((_end(Cause.UNKNOWN),), RUNNING, {}, Action.REQUEUE, "unknown"),
        ((_end(Cause.LOST_NODE),), RUNNING, {"continue_by": "requeue"}, Action.REQUEUE, "lost_node"),
        ((OK,), RUNNING, {}, Action.END, "all steps are taken"),
        ((SAVED,), RUNNING, {"continue_by": "none"}, Action.END, "continue_by=none"),
        ((SAVED,), JobState("CANCELLED"), {}, Action.END, "cancelled"),
        ((SAVED,), JobState("CANCELLED+"), {"continue_by": "resubmit"}, Action.END, "cancelled"),
        ((SAVED,), JobState("COMPLETING", 1), {}, Action.END, "itself"),
        ((SAVED,), JobState("PENDING", 1), {}, Action.END, "itself"),
        ((SAVED,), JobState("RUNNING", 2), {"restart": 2}, Action.REQUEUE, "time_limit"),
        ((SAVED,), JobState("PREEMPTED"), {}, Action.RESUBMIT, "SLURM has ended the job"),
        ((SAVED,), JobState("TIMEOUT"), {}, Action.RESUBMIT, "TIMEOUT"),
        ((SAVED,), JobState("TIMEOUT"), {"continue_by": "requeue"}, Action.END, "cannot be queued again"),
        ((SAVED,), JobState("UNKNOWN"), {}, Action.END, "UNKNOWN"),
        ((_end(Cause.PREEMPTED),), JobState("COMPLETING"), {}, Action.END, "by its owner or by SLURM"),
        ((_end(Cause.PREEMPTED),), JobState("COMPLETING"), {"continue_by": "resubmit"}, Action.END, "by its owner"),
        ((SAVED,), JobState("COMPLETING", 0, True, "None"), {}, Action.RESUBMIT, "COMPLETING"),
        ((SAVED,), JobState("COMPLETING", 0, False, "NodeDown"), {}, Action.RESUBMIT, "COMPLETING"),
        ((_end(Cause.PREEMPTED),), JobState("COMPLETING", 0, False, "None"), {}, Action.END, "cancelled"),
        ((_end(Cause.PREEMPTED),), JobState("COMPLETING", 1, False, "None"), {}, Action.END, "itself"),
        ((SAVED,), RUNNING, {"restart": 3, "max_requeues": 3}, Action.END, "max_requeues=3"),
        ((SAVED,), RUNNING, {"continued": 4, "max_requeues": 3}, Action.END, "gone on 4 times"),
        ((BAD,), RUNNING, {}, Action.END, "user_error"),
        ((_end(Cause.DIVERGED),), RUNNING, {}, Action.END, "diverged"),
        ((_end(Cause.NON_FINITE),), RUNNING, {}, Action.END, "non_finite"),
        ((_end(Cause.STOPPED),), RUNNING, {}, Action.END, "stopped"),
        (STUCK, RUNNING, {}, Action.END, "without a newer checkpoint"),
        (TWICE, RUNNING, {}, Action.END, "the same way at step 9"),
    ],
)
def test_what_is_done_at_the_end_of_a_job(outcomes, job, settings, action, words) -> None:
    defaults = {"restart": 0, "continued": 0, "continue_by": "auto", "max_requeues": 100}
    decision = decide(outcomes, job, **{**defaults, **settings})
    assert decision.action is action and words in decision.reason, decision


def test_a_cancelled_attempt_and_one_without_progress_are_called_so() -> None:
    defaults = {"restart": 0, "continued": 0, "continue_by": "auto", "max_requeues": 100}
    assert decide((SAVED,), JobState("CANCELLED"), **defaults).cause is Cause.CANCELLED
    assert decide(STUCK, RUNNING, **defaults).cause is Cause.NO_PROGRESS
    assert decide((BAD,), RUNNING, **defaults).cause is None


@pytest.fixture
def job_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose job 7 began attempt 1 at its first start."""
    (tmp_path / "slurm/7.0").mkdir(parents=True)
    (tmp_path / "slurm/7.0/first_attempt").write_text("1")
    attempt_dir(tmp_path, 1).mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(_config())))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    monkeypatch.setenv("HP_TRAIN_INCARNATION", "7.0")
    return tmp_path


@pytest.mark.parametrize(
    "told, down, cause, node",
    [
        (None, "", Cause.UNKNOWN, ""),
        (None, "node3,node4", Cause.LOST_NODE, "node3"),
        (Cause.PREEMPTED, "node3", Cause.LOST_NODE, "node3"),  # SLURM takes a job off by the same signal
        (Cause.COMMUNICATION, "node3", Cause.LOST_NODE, "node3"),
        (Cause.STOPPED, "node3", Cause.LOST_NODE, "node3"),  # a rank of another node was told to stop
        (Cause.PREEMPTED, "", Cause.PREEMPTED, ""),
        (Cause.TIME_LIMIT, "node3", Cause.TIME_LIMIT, ""),
    ],
)
def test_a_job_that_lost_a_node_says_so(job_dir: Path, capsys, told, down: str, cause: Cause, node: str) -> None:
    if told is not None:
        write_outcome(job_dir, replace(_end(told), ended_at=9.0))
    slurm_end.main([str(job_dir), "JobState=RUNNING Restarts=0", "config.yaml", down])
    outcome = read_outcome(job_dir, 1)
    assert (outcome.cause, outcome.node) == (cause, node) and read_outcome(job_dir) == outcome
    assert capsys.readouterr().out == "requeue 1 \n"
    if told is None:
        assert (outcome.step, outcome.last_step) == (2, 2)


@pytest.mark.parametrize(
    "told, host, judged, cause, node",
    [
        (_end(Cause.STOPPED), "node3.site", False, Cause.LOST_NODE, "node3.site"),  # rank 0's word: no time in it
        (None, "node1", False, Cause.UNKNOWN, ""),
        (replace(_end(Cause.PREEMPTED), ended_at=9.0, nodes=("node1", "node3")), "", False, Cause.LOST_NODE, "node3"),
        (replace(_end(Cause.PREEMPTED), ended_at=9.0, nodes=("node1", "node3")), "", True, Cause.PREEMPTED, ""),
        (_end(Cause.DONE), "node3", False, Cause.DONE, ""),
    ],
)
def test_the_next_start_settles_what_a_killed_script_could_not(
    job_dir: Path, monkeypatch, told, host, judged, cause, node
) -> None:
    monkeypatch.setenv("HP_TRAIN_DOWN", "node3,node4")
    if told is not None:
        write_outcome(job_dir, told)
    if judged:
        (job_dir / "slurm/7.0/judged").touch()
    owner = Owner(host, "", 1, 0.0, 0.0, attempt=1) if host else None
    slurm_job._settle_the_one_before(job_dir, 1, owner)
    outcome = read_outcome(job_dir, 1)
    assert (outcome.cause, outcome.node) == (cause, node)


def test_a_script_on_a_node_that_slurm_gave_up_leaves_the_run_to_its_successor(job_dir: Path, capsys) -> None:
    (job_dir / "slurm/7.1").mkdir()
    (job_dir / "slurm/7.1/first_attempt").write_text("2")
    attempt_dir(job_dir, 2).mkdir()
    slurm_end.main([str(job_dir), "JobState=RUNNING Restarts=0", "config.yaml", ""])
    assert capsys.readouterr().out == "end 1 \n" and read_outcome(job_dir) is None


SHOWN = (
    "JobId=4711 JobName=a b UserId=u(1) JobState=PENDING Reason=Resources Dependency=(null) Requeue=1 Restarts=2 "
    "RunTime=00:00:00 TimeLimit=1-00:00:00 StartTime=2026-11-30T20:20:15 EndTime=Unknown NodeList=(null) "
    "StdOut=/a b/slurm_4711.out"
)


def test_a_job_that_only_the_accounting_knows() -> None:
    text = "4711|PREEMPTED|2026-11-30T20:20:15|2026-11-30T20:30:15|node1\n"
    text += "4711|CANCELLED by 1000|2026-11-30T21:20:15|Unknown|None assigned\n"
    job = parse_accounting(text)
    assert job is not None and (job.state, job.nodes, job.end, job.restarts) == ("CANCELLED", "", None, None)
    assert not job.is_active and parse_accounting("") is parse_accounting("\n") is None


def test_a_job_as_scontrol_shows_it() -> None:
    job = parse_job(SHOWN)
    assert (job.job_id, job.state, job.reason, job.restarts, job.nodes) == ("4711", "PENDING", "Resources", 2, "")
    assert job.start is not None and job.end is None and job.is_active
    assert JobState.parse(SHOWN) == JobState("PENDING", 2, False, "Resources")
    assert JobState.parse("") == JobState("UNKNOWN", 0)
    assert JobState.parse("JobState=COMPLETING PreemptTime=2026-11-30T20:20:15").is_preempted
    assert not JobState.parse("JobState=COMPLETING PreemptTime=None").is_preempted
    assert parse_test_only("sbatch: Job 3 to start at 2026-11-30T20:20:18 using 1 processors") == (
        "expected start 2026-11-30T20:20:18"
    )


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("2-00:00:00", 172_800),
        ("1-12", 129_600),
        ("12:00:00", 43_200),
        ("30:00", 1_800),
        ("90", 5_400),
        ("UNLIMITED", None),
    ],
)
def test_times_as_slurm_writes_them(text: str, seconds: int | None) -> None:
    assert seconds_of(text) == seconds


CONFIG = """\
Configuration data as of now
JobRequeue              = 0
KillWait                = 30 sec
PreemptMode             = REQUEUE
"""
PARTITIONS = (
    "PartitionName=main Default=YES GraceTime=0 MaxTime=1-00:00:00 PreemptMode=OFF\n"
    "PartitionName=preempt Default=NO GraceTime=45 MaxTime=UNLIMITED PreemptMode=REQUEUE\n"
)


def test_limits_of_a_site() -> None:
    assert parse_site(CONFIG, PARTITIONS, None) == Site(30, 0, "OFF", False, 86_400, "main")
    assert parse_site(CONFIG, PARTITIONS, "preempt") == Site(30, 45, "REQUEUE", False, None, "preempt")
    with pytest.raises(ConfigError, match="no partition gpu; use main, preempt"):
        parse_site(CONFIG, PARTITIONS, "main,gpu")


def test_what_a_site_means_for_a_run() -> None:
    config = _config(partition="preempt", time="12h")
    config.model.dim, config.model.num_layers = 8192, 80  # tens of billions of parameters
    notes = notes_for(config, Site(30, 45, "REQUEUE", True, None, "preempt"))
    assert notes[0].startswith("preempt: 45 s notice before a preemption, save about ")
    assert notes[0].endswith("relying on checkpoint.every_minutes=15")
    assert "launcher.signal_lead=2m is less than a save may take" in notes[1]
    small = _config(time="2h")
    assert notes_for(small, Site(30, 0, "OFF", True, None, "main")) == []
    with pytest.raises(ConfigError, match="launcher.time=2h is longer than partition main allows .01:00:00."):
        notes_for(small, Site(30, 0, "OFF", True, 3600, "main"))


SINFO = "main*|10|128|(null)\npreempt|4|96|gpu:h100:8(S:0-1)\npreempt|2|64|gpu:h100:4\n"


def test_a_launcher_option_is_drafted_from_what_the_cluster_tells() -> None:
    config = f"{CONFIG}SelectType              = select/cons_tres\n"
    config += "SLURM_VERSION           = 23.11.4\nClusterName             = alps\n"
    found = read_partitions(SINFO, PARTITIONS)
    assert describe_cluster(found, config) == [
        "SLURM 23.11.4, cluster alps: jobs are not queued again by default, KillWait 30 sec",
        "  preempt: 6 nodes x 64 cores, 8 h100 GPUs, no time limit, preempted by REQUEUE",
        "  main (default): 10 nodes x 128 cores, no GPUs, 24:00:00",
    ]
    option = yaml.safe_load("\n".join(draft(found, config)))
    assert option == {
        "name": "slurm", "partition": "preempt", "nproc_per_node": 8, "gpu_request": "gpus_per_node:h100",
        "time": "24:00:00",
    }  # fmt: skip
    assert "gpu_request: gres:h100" in draft(found, CONFIG), "without cons_tres"
