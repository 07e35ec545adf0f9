"""From a scheduler's job id, or what else a person types for a run, to the run's directory. No torch."""

from __future__ import annotations

import re
from pathlib import Path

from hp_train.errors import ConfigError
from hp_train.launch import slurm_tools
from hp_train.launch.find_run import find_run, folder_of_runs, list_runs

ATTEMPT_FILE = "first_attempt"  # in slurm/JOB.RESTART: number of the first attempt of this incarnation of a job
JOB_ID_FILE = "slurm/job_id"  # the newest job of a run; the job's script renews it


def find_run_or_job(text: str) -> Path:
    """Return the run that `text` stands for: a job's id, or what `find_run` takes. Raises ConfigError if none."""
    if not re.fullmatch(r"\d+(_\d+)?", text):
        return find_run(text)
    for run_dir in list_runs(folder_of_runs()):
        if job_of(run_dir) == text or any((run_dir / "slurm").glob(f"{text}.*")):
            return run_dir
    run_dir = _told_by_slurm(text)
    if run_dir is not None:
        return run_dir
    try:
        return find_run(text)  # the end of a run's id may be digits alone
    except ConfigError:
        raise ConfigError(
            f"no run in {folder_of_runs()} has a job or an id {text}; give the run's directory, or set $HP_TRAIN_RUNS"
        ) from None


def job_of(run_dir: Path) -> str | None:
    """Return the id of the newest job of a run, None if it was never submitted."""
    try:
        return (run_dir / JOB_ID_FILE).read_text().strip() or None
    except FileNotFoundError:
        return None


def _told_by_slurm(job_id: str) -> Path | None:
    """Return the folder of the job's log if a run is in it, else that of its script: SLURM shows a log's %% wrongly."""
    try:
        text = slurm_tools.ask("scontrol", "show", "job", job_id, "--oneliner")
    except slurm_tools.SlurmError:
        return None
    found = [re.search(r" StdOut=(.*)/[^/]* ", text + " "), re.search(r" Command=(.*)/[^/]* WorkDir=", text)]
    folders = [Path(match[1]) for match in found if match is not None]
    return next((folder for folder in folders if (folder / "config.yaml").is_file()), None)
