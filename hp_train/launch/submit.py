"""From a checked config to a submitted SLURM job: run directory, code, script, `sbatch`. No torch.

The job composes nothing: it reads the config that is written here, as every worker does.
"""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hp_train.checkpoint.size import checkpoint_bytes
from hp_train.config.durations import clock_text, parse_duration
from hp_train.config.paths import with_absolute_paths
from hp_train.config.schema import TrainerConfig
from hp_train.errors import ConfigError
from hp_train.launch import slurm_tools
from hp_train.launch.devices import ProcessPlan, plan_processes
from hp_train.launch.files import write_text
from hp_train.launch.run_dir import choose_run_dir
from hp_train.launch.run_of_job import JOB_ID_FILE, job_of
from hp_train.launch.slurm_end import CANCELLED_FILE
from hp_train.launch.slurm_script import JobPaths, job_script
from hp_train.launch.slurm_tools import Site, SlurmError
from hp_train.launch.snapshot import FOLDER, HASH_FILE, checkout, code_hash, take_plugins, take_snapshot
from hp_train.launch.start import write_run_files

SCRIPT = "job.sbatch"
_SAVE_BYTES_PER_S = 1e9  # assumed of each node's way to the disk, where no save has been timed


@dataclass(frozen=True, slots=True)
class Submission:
    """One run to submit. The runs of an array are submitted together and differ in their task number."""

    config: TrainerConfig
    recipe: str
    overrides: list[str]
    task: int | None = None


def script_of(submission: Submission, run_dir: Path, config_name: str = "config.yaml") -> str:
    """Return the text of job.sbatch for a run in `run_dir` (of an array: without the task number). Nothing is made."""
    config = with_absolute_paths(submission.config)
    root = checkout()
    code = None if root is None else run_dir / FOLDER if config.launcher.snapshot else root
    data = [config.data.path, config.data.val_path, getattr(config.model, "pretrained", None)]
    folders = tuple(Path(folder) for folder in data if folder is not None)
    paths = JobPaths(run_dir, config_name, sys.executable, code, folders)
    return job_script(config, submission.recipe, plan_processes(config).num_processes, paths)


def print_script(submission: Submission, run_dir: Path | None = None) -> None:
    """Write job.sbatch to stdout, and nothing anywhere else; `run_dir` is given for a run that goes on there."""
    print(script_of(submission, run_dir or choose_run_dir(submission.config, submission.recipe)), end="")


def submit_runs(submissions: Sequence[Submission], argv: list[str]) -> str:
    """Submit one run, or those of one array, and return the job's id. Raises ConfigError if SLURM refuses.

    What was made for a job that is refused is removed again.
    """
    first = submissions[0]
    notes = site_notes(first.config)
    base = choose_run_dir(first.config, first.recipe)
    run_dirs = [base if item.task is None else base.with_name(f"{base.name}-{item.task}") for item in submissions]
    script = script_of(first, base)
    try:
        for item, run_dir in zip(submissions, run_dirs, strict=True):
            _make_run_dir(run_dir)
            _write_run(run_dir, item, script, argv)
        expected = slurm_tools.test_submission(run_dirs[0] / SCRIPT)
        job_id = slurm_tools.submit(run_dirs[0] / SCRIPT)
    except BaseException:
        for run_dir in run_dirs:
            shutil.rmtree(run_dir, ignore_errors=True)
        raise
    for item, run_dir in zip(submissions, run_dirs, strict=True):
        write_text(run_dir / JOB_ID_FILE, job_id if item.task is None else f"{job_id}_{item.task}")
    _tell(job_id, first, expected, notes, run_dirs)
    return job_id


def submit_again(item: Submission, run_dir: Path, argv: list[str]) -> str:
    """Submit a job that goes on with the run in `run_dir` under a changed config, and return its id.

    Raises ConfigError while an earlier job of the run is queued or runs, or if SLURM refuses.
    """
    standing = active_job(run_dir)
    if standing is not None:
        raise ConfigError(
            f"job {standing.job_id} of {run_dir} is {standing.state.lower()}; end it first by "
            f"`hp-train cancel {shlex.quote(str(run_dir))}`"
        )
    notes = site_notes(item.config)
    write_submission(item, run_dir, argv)
    expected = slurm_tools.test_submission(run_dir / SCRIPT)
    job_id = slurm_tools.submit(run_dir / SCRIPT)
    write_text(run_dir / JOB_ID_FILE, job_id)
    _tell(job_id, item, expected, notes, [run_dir])
    return job_id


def write_submission(item: Submission, run_dir: Path, argv: list[str]) -> None:
    """Write what a further job of a run goes by: config, code and script."""
    (run_dir / "slurm").mkdir(exist_ok=True)
    (run_dir / CANCELLED_FILE).unlink(missing_ok=True)
    number = 2 + len(list(run_dir.glob("config.submission_*.yaml")))
    recipe, overrides = item.recipe, item.overrides
    path = write_run_files(run_dir, item.config, recipe=recipe, overrides=overrides, argv=argv, submission=number)
    write_code(item.config, run_dir, run_dir / f"capsule.submission_{number}.json")
    write_text(run_dir / SCRIPT, script_of(item, run_dir, path.name))


def active_job(run_dir: Path) -> slurm_tools.Job | None:
    """Return the newest job of a run if it is queued or runs; None if there is none."""
    job_id = job_of(run_dir)
    job = slurm_tools.find_job(job_id) if job_id is not None else None
    return job if job is not None and job.is_active else None


def _tell(job_id: str, item: Submission, expected: str, notes: list[str], run_dirs: list[Path]) -> None:
    print(
        f"submitted job {job_id}: {describe(item, plan_processes(item.config))}" + (f"; {expected}" if expected else "")
    )
    for line in notes:
        print(f"  {line}")
    for run_dir in run_dirs:
        print(f"run directory {run_dir}")
    print(f"  watch it: hp-train watch {shlex.quote(str(run_dirs[0]))}", flush=True)


def _make_run_dir(run_dir: Path) -> None:
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    try:
        run_dir.mkdir()
    except FileExistsError:
        if any(run_dir.iterdir()):
            raise ConfigError(f"run directory {run_dir} is not empty; choose a new or an empty folder") from None


def make_run(run_dir: Path, item: Submission, argv: list[str]) -> None:
    """Write a new run, its code and its script into a directory that is there and empty."""
    _write_run(run_dir, item, script_of(item, run_dir), argv)


def _write_run(run_dir: Path, item: Submission, script: str, argv: list[str]) -> None:
    config = item.config
    if item.task is not None or config.trainer.run_dir is not None:
        config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, run_dir=str(run_dir)))
    write_run_files(run_dir, config, recipe=item.recipe, overrides=item.overrides, argv=argv)
    (run_dir / "slurm").mkdir()
    write_code(config, run_dir, run_dir / "capsule.json")
    write_text(run_dir / SCRIPT, script)


def write_code(config: TrainerConfig, run_dir: Path, capsule: Path) -> None:
    """Copy code and plugins into the run directory, as launcher.snapshot says, and note the code's hash."""
    shutil.rmtree(run_dir / FOLDER, ignore_errors=True)
    if config.launcher.snapshot:
        take_snapshot(run_dir)
        take_plugins(run_dir, capsule)
    write_text(run_dir / "slurm" / HASH_FILE, code_hash() + "\n")


def describe(item: Submission, plan: ProcessPlan) -> str:
    """Return e.g. `llama3_8b_fsdp, 64 x 8 GPUs, 24:00:00, partition preempt`."""
    launcher = item.config.launcher
    what = "processes" if plan.device == "cpu" or launcher.gpu_request == "none" else "GPUs"
    parts = [item.recipe or "no recipe", f"{launcher.nodes} x {plan.num_processes} {what}"]
    parts.append(clock_text(parse_duration(launcher.time)) if launcher.time else "the partition's time limit")
    parts.append(f"partition {launcher.partition}" if launcher.partition else "default partition")
    return ", ".join([*parts, *([f"array {launcher.array}"] if launcher.array else [])])


def site_notes(config: TrainerConfig) -> list[str]:
    """Return what the site's limits mean for this run. Raises ConfigError where it asks for what there is not."""
    try:
        site = slurm_tools.read_site(config.launcher.partition)
    except SlurmError as error:
        raise ConfigError(str(error)) from None
    return notes_for(config, site)


def notes_for(config: TrainerConfig, site: Site) -> list[str]:
    """Return a line for each limit of the site that matters: time for a save before the end, and requeueing."""
    launcher = config.launcher
    save_s = save_seconds(config)
    notes = []
    if site.preempt_mode not in ("OFF", ""):
        notice = site.grace_s or site.kill_wait_s or 0
        line = f"{site.partition}: {notice} s notice before a preemption, save about {save_s} s"
        notes.append(line if notice > save_s else f"{line}: relying on {_periodic_saves(config)}")
    lead = parse_duration(launcher.signal_lead)
    if save_s >= lead:
        notes.append(
            f"warning: launcher.signal_lead={launcher.signal_lead} is less than a save may take (about {save_s} s); "
            f"use launcher.signal_lead={-(-2 * save_s // 60)}m"
        )
    if launcher.time and site.max_time_s and parse_duration(launcher.time) > site.max_time_s:
        raise ConfigError(
            f"launcher.time={launcher.time} is longer than partition {site.partition} allows "
            f"({clock_text(site.max_time_s)}); use at most that: the run goes on in further jobs"
        )
    if not site.requeues and launcher.continue_by == "requeue":
        notes.append("warning: the site sets JobRequeue=0; should requeueing fail, launcher.continue_by=resubmit helps")
    return notes


def save_seconds(config: TrainerConfig) -> int:
    """Return about how long a save takes, from the size alone: every node writes its share at 1 GB/s."""
    size = checkpoint_bytes(config.model, config.optimizer.name)
    return max(1, round(size / config.launcher.nodes / _SAVE_BYTES_PER_S))


def _periodic_saves(config: TrainerConfig) -> str:
    checkpoint = config.checkpoint
    if checkpoint.every:
        return f"checkpoint.every={checkpoint.every}"
    if checkpoint.every is None and checkpoint.every_minutes is not None:
        return f"checkpoint.every_minutes={checkpoint.every_minutes:g}"
    return "nothing: set checkpoint.every or checkpoint.every_minutes"
