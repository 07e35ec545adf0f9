"""Inside an allocation that is there already (`salloc`): run the job's script now, and show the run live. No torch."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
from pathlib import Path

from hp_train.errors import ConfigError, ExitCode
from hp_train.launch.outcome import Cause, read_outcome, write_outcome
from hp_train.launch.run_dir import create_run_dir
from hp_train.launch.submit import SCRIPT, Submission, make_run, write_submission
from hp_train.launch.watch import watch


def run_here(item: Submission, argv: list[str], run_dir: Path | None = None) -> int:
    """Run over all nodes of this allocation and return the run's exit code; Ctrl-C saves and stops.

    Raises ConfigError if the allocation has another number of nodes than the run.
    """
    launcher = item.config.launcher
    there = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    if there != launcher.nodes:
        raise ConfigError(
            f"launcher.nodes={launcher.nodes} and the nodes of this allocation are {there}; use launcher.nodes={there}"
        )
    if launcher.array is not None:
        raise ConfigError(
            f"launcher.array={launcher.array}: an allocation runs one run; leave it out, or submit from outside"
        )
    # The allocation is the user's: the script never queues it again.
    config = dataclasses.replace(item.config, launcher=dataclasses.replace(launcher, continue_by="none"))
    item = dataclasses.replace(item, config=config)
    if run_dir is None:
        run_dir = create_run_dir(item.config, item.recipe)
        make_run(run_dir, item, argv)
    else:
        write_submission(item, run_dir, argv)
    job_id = os.environ["SLURM_JOB_ID"]
    shutil.rmtree(run_dir / "slurm" / f"{job_id}.0", ignore_errors=True)  # of an earlier start in this allocation
    log = run_dir / f"slurm_{job_id}.out"
    with open(log, "a") as output:
        script = subprocess.Popen(
            ["bash", str(run_dir / SCRIPT)], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    print(f"running in job {job_id}: {run_dir}\n  its log: {log}", flush=True)
    return _show(run_dir, script)


def _show(run_dir: Path, script: subprocess.Popen) -> int:
    """Show the run until its script has ended; the first Ctrl-C has it save and stop, the second ends the view."""
    asked = False
    while True:
        try:
            watch(run_dir, is_over=lambda: script.poll() is not None)
            script.wait()
            break
        except KeyboardInterrupt:
            if asked:
                raise
            asked = True
            print("saving and stopping; Ctrl-C again leaves the view", flush=True)
            script.send_signal(signal.SIGUSR1)
    outcome = read_outcome(run_dir)
    if outcome is None:
        print(f"hp-train: the run left no word of its end; see {run_dir}", flush=True)
        return int(ExitCode.FAILED)
    if asked and outcome.cause is Cause.TIME_LIMIT:  # as its launchers took the signal that was passed on
        outcome = dataclasses.replace(outcome, cause=Cause.STOPPED, exit_code=int(ExitCode.INTERRUPTED))
        write_outcome(run_dir, outcome)
    return outcome.exit_code
