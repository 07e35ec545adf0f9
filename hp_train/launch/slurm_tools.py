"""Calls of SLURM's commands, and reading what they print. No torch.

Every call has a time limit: SLURM's clients wait for a controller that is down. Parsers are functions of a text alone.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hp_train.errors import ConfigError, HpTrainError

_PATIENCE_S = 30


class SlurmError(HpTrainError):
    """A command of SLURM's failed or did not answer."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job as the scheduler knows it now."""

    job_id: str
    state: str
    reason: str = ""
    start: float | None = None  # seconds since the epoch; expected while pending
    end: float | None = None
    nodes: str = ""
    restarts: int | None = 0  # None where only the accounting knows the job

    @property
    def is_active(self) -> bool:
        """Say whether it will run, runs, or still ends."""
        return self.state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "STOPPED")


@dataclass(frozen=True, slots=True)
class Site:
    """What a cluster and a partition let a job do; None where it is not limited or not told."""

    kill_wait_s: int | None = None  # between SIGTERM and SIGKILL
    grace_s: int | None = None  # notice before a preemption
    preempt_mode: str = "OFF"
    requeues: bool = True  # JobRequeue: jobs may be queued again unless they say otherwise
    max_time_s: int | None = None
    partition: str = ""


def missing_tools() -> str | None:
    """Return why SLURM cannot be used here, None if it can."""
    if shutil.which("sbatch") is None:
        return "launcher=slurm needs SLURM's commands, and there is no sbatch here; submit from a login node"
    return None


def ask(*command: str) -> str:
    """Return what a command of SLURM's prints. Raises SlurmError with what it says."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except FileNotFoundError:
        raise SlurmError(f"there is no {command[0]} here; run this on a node of the SLURM cluster") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} did not answer in {_PATIENCE_S} s; is the SLURM controller up?") from None
    if done.returncode != 0:
        raise SlurmError(f"{command[0]}: {_last_words(done.stderr) or f'exit code {done.returncode}'}")
    return done.stdout


def _last_words(text: str) -> str:
    lines = [re.sub(r"^\w+: (error: )?", "", line).strip() for line in text.splitlines() if line.strip()]
    return "; ".join(dict.fromkeys(lines))


def submit(script: Path) -> str:
    """Submit a script and return the job's id. Raises ConfigError with SLURM's reason if it is refused."""
    try:
        return ask("sbatch", "--parsable", str(script)).strip().partition(";")[0]
    except SlurmError as error:
        raise ConfigError(f"the job was refused: {error}") from None


def test_submission(script: Path) -> str:
    """Have SLURM look at a script without submitting it; return the expected start in words. Raises ConfigError."""
    command = ("sbatch", "--test-only", str(script))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"sbatch --test-only did not answer in {_PATIENCE_S} s; is the SLURM controller up?"
        ) from None
    if done.returncode != 0:
        raise ConfigError(f"the job would be refused: sbatch: {_last_words(done.stderr)}")
    return parse_test_only(done.stderr)


def parse_test_only(text: str) -> str:
    """Return when a job would start from what `sbatch --test-only` says: `expected start 2026-11-30T20:20:18`."""
    found = re.search(r"Job \d+ to start at (\S+)", text)
    return f"expected start {found[1]}" if found else ""


def find_job(job_id: str) -> Job | None:
    """Return a job that SLURM still knows; None when it is forgotten or was never known."""
    try:
        return parse_job(ask("scontrol", "show", "job", job_id, "--oneliner"))
    except SlurmError as error:
        if "Invalid job id" in str(error):
            return _find_in_accounting(job_id)
        raise


def _find_in_accounting(job_id: str) -> Job | None:
    """Return a job that the controller has forgotten from the cluster's accounting; None where there is none."""
    form = "--format=JobIDRaw,State,Start,End,NodeList"
    try:
        text = ask("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job_id}", form)
    except SlurmError:  # no accounting on this cluster
        return None
    return parse_accounting(text)


def parse_accounting(text: str) -> Job | None:
    """Read the last line of `sacct --parsable2`: id, state, start, end, nodes; None if it tells of no job."""
    fields = text.strip().rpartition("\n")[2].split("|")
    if len(fields) != 5:
        return None
    job_id, state, start, end, nodes = fields
    return Job(
        job_id=job_id,
        state=state.partition(" ")[0] or "UNKNOWN",  # `CANCELLED by 1000`
        start=_time_of(start),
        end=_time_of(end),
        nodes=nodes.replace("None assigned", ""),
        restarts=None,
    )


def parse_job(text: str) -> Job:
    """Read the first job of `scontrol show job --oneliner`."""
    line = text.splitlines()[0]
    job_id = field_of(line, "JobId") or ""
    return Job(
        job_id=job_id,
        state=field_of(line, "JobState") or "UNKNOWN",
        reason=(field_of(line, "Reason") or "").replace("None", ""),
        start=_time_of(field_of(line, "StartTime")),
        end=_time_of(field_of(line, "EndTime")),
        nodes=(field_of(line, "NodeList") or "").replace("(null)", ""),
        restarts=int(field_of(line, "Restarts") or 0),
    )


def field_of(line: str, name: str) -> str | None:
    """Return the value of `Name=value` in a line of scontrol's; None if it is not there."""
    found = re.search(rf"(?:^|\s){re.escape(name)}=(\S*)", line)
    return found[1] if found else None


def _time_of(text: str | None) -> float | None:
    try:
        return datetime.datetime.fromisoformat(text or "").timestamp()
    except ValueError:  # Unknown, N/A
        return None


def read_site(partition: str | None) -> Site:
    """Return the limits of the cluster and of a partition; None is the default one."""
    return parse_site(ask("scontrol", "show", "config"), ask("scontrol", "show", "partition", "--oneliner"), partition)


def parse_site(config: str, partitions: str, partition: str | None) -> Site:
    """Read `scontrol show config` and `scontrol show partition --oneliner`. Raises ConfigError for an unknown one."""
    settings = dict(re.findall(r"^(\w+)\s+= (.*?)\s*$", config, flags=re.MULTILINE))
    by_name = {field_of(line, "PartitionName") or "": line for line in partitions.splitlines() if line.strip()}
    chosen = partition or next((name for name, line in by_name.items() if field_of(line, "Default") == "YES"), "")
    if partition is not None:  # several may be named; the first one's limits are told
        unknown = [name for name in partition.split(",") if name not in by_name]
        if unknown:
            raise ConfigError(f"launcher.partition={partition}: no partition {unknown[0]}; use {', '.join(by_name)}")
        chosen = partition.split(",")[0]
    line = by_name.get(chosen, "")
    return Site(
        kill_wait_s=_leading_number(settings.get("KillWait", "")),
        grace_s=_leading_number(field_of(line, "GraceTime") or ""),
        preempt_mode=(field_of(line, "PreemptMode") or settings.get("PreemptMode", "OFF")).upper(),
        requeues=settings.get("JobRequeue", "1") != "0",
        max_time_s=seconds_of(field_of(line, "MaxTime") or ""),
        partition=chosen,
    )


def _leading_number(text: str) -> int | None:
    found = re.match(r"\d+", text)
    return int(found[0]) if found else None


def seconds_of(text: str) -> int | None:
    """Return SLURM's times in seconds: `2-00:00:00`, `12:00:00`, `30:00` (minutes, seconds), `90` (minutes)."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if found is None:  # UNLIMITED, INFINITE, NONE
        return None
    days = int(found[1] or 0)
    parts = [int(part) for part in found.groups()[1:] if part is not None]
    if found[1] is not None or len(parts) == 3:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def cancel(job_id: str) -> None:
    """End a job for good. Raises SlurmError."""
    ask("scancel", job_id)


def in_allocation() -> bool:
    """Say whether this process runs inside a job's allocation, such as `salloc` gives, but not under our own script."""
    return bool(os.environ.get("SLURM_JOB_ID")) and "HP_TRAIN_INCARNATION" not in os.environ
