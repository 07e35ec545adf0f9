"""`hp-train [train]`: check everything, then start the run. No torch until nothing is left to refuse."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from hp_train.checkpoint.fit import checkpoint_misfits
from hp_train.checkpoint.layout import newest_committed
from hp_train.config.compose import Composition
from hp_train.config.faults import is_unknown
from hp_train.config.rules_batch import known_num_microbatches
from hp_train.config.schema import TrainerConfig
from hp_train.config.schema_tree import LEAVES
from hp_train.config.validate import faults, warnings
from hp_train.errors import ConfigError, ExitCode
from hp_train.launch.devices import plan_processes
from hp_train.launch.run_dir import holds_run
from hp_train.launch.start import machine_faults, resume_run, start_run

_MACHINE_READS = ("accelerator.", "fsdp.", "model.", "launcher.", "optimizer.name", "trainer.device", "trainer.run")


def run(jobs: Sequence[Composition], argv: list[str]) -> int:
    """Check all jobs, then run one after the other; return the worst exit code."""
    check(jobs)
    worst = 0
    for job in jobs:
        warn(job.config, job.notes)
        code = _start(job, argv)
        worst = max(worst, code)
        if code in (ExitCode.INTERRUPTED, ExitCode.REQUEUE):
            break  # who stopped this job did not ask for the next
    return worst


def check(jobs: Sequence[Composition]) -> None:
    """Raise ConfigError with all that is wrong with any of the jobs."""
    found: list[str] = []
    for job in jobs:
        run_dir = run_to_go_on_with(job.config)
        faults_of_job = job_faults(job, run_dir)
        if run_dir is not None and not faults_of_job:
            faults_of_job = checkpoint_misfits(run_dir / "checkpoints", job.config)
        found.extend(_with_job(message, job, jobs) for message in faults_of_job)
    if found:
        raise ConfigError(*dict.fromkeys(found))


def _start(job: Composition, argv: list[str]) -> int:
    run_dir = run_to_go_on_with(job.config)
    if job.config.launcher.name == "slurm":
        from hp_train.commands.submit import start  # only runs that are submitted pay for it

        return start(job, argv, run_dir)
    if run_dir is not None:
        return resume_run(run_dir, job.config, overrides=list(job.overrides), argv=argv)
    return start_run(job.config, recipe=job.recipe or "", overrides=list(job.overrides), argv=argv)


def run_to_go_on_with(config: TrainerConfig) -> Path | None:
    """Return the folder of the run that trainer.resume says to go on with, None to start a new one.

    Raises ConfigError when there must be one and is none.
    """
    trainer = config.trainer
    if trainer.resume not in ("auto", "must") or trainer.run_dir is None:
        return None
    run_dir = Path(trainer.run_dir).expanduser().absolute()
    if trainer.resume == "must" and newest_committed(run_dir / "checkpoints") is None:
        raise ConfigError(
            f"trainer.resume=must, and trainer.run_dir={trainer.run_dir} holds no complete checkpoint; use auto to "
            "begin at step 1"
        )
    return run_dir if holds_run(run_dir) else None


def _with_job(message: str, job: Composition, jobs: Sequence[Composition]) -> str:
    return message if len(jobs) == 1 else f"{message} (job {' '.join(job.overrides)})"


def job_faults(job: Composition, run_dir: Path | None = None) -> list[str]:
    """Return all that is wrong with a job, here, on this machine; `run_dir` is given to go on with a run."""
    found = job.messages
    unsound = [key for key in LEAVES if key.startswith(_MACHINE_READS) and is_unknown(key, job.unknown)]
    if not unsound:
        # a count of processes that is not the mesh's has been told; devices are judged by the mesh
        launcher = dataclasses.replace(job.config.launcher, nproc_per_node="auto") if found else job.config.launcher
        found += machine_faults(dataclasses.replace(job.config, launcher=launcher), run_dir)
    if not found:
        found = faults(resolved(job.config)) or _pipeline_faults(resolved(job.config))
    if not found and job.config.model.pretrained is not None and not _has_checkpoint(run_dir):
        from hp_train.pretrained.fit import misfits  # only runs that start from weights pay for it

        found = misfits(job.config.model)
    return list(dict.fromkeys(found))


def _has_checkpoint(run_dir: Path | None) -> bool:
    """Say whether a run goes on from a checkpoint of its own, and so needs no weights from elsewhere."""
    if run_dir is None:
        return False
    return newest_committed(run_dir / "checkpoints") is not None


def resolved(config: TrainerConfig) -> TrainerConfig:
    """Return `config` with `fsdp.dp_shard_size=-1` replaced by what this machine has."""
    if config.fsdp.dp_shard_size != -1:
        return config
    dp_shard_size = plan_processes(config).sizes.dp_shard
    return dataclasses.replace(config, fsdp=dataclasses.replace(config.fsdp, dp_shard_size=dp_shard_size))


def _pipeline_faults(config: TrainerConfig) -> list[str]:
    """Return why the schedule is refused; it is proven here, before any worker starts."""
    if config.accelerator.pp_size == 1:
        return []
    from hp_train.pipeline_plan import plan_pipeline

    num_microbatches = known_num_microbatches(config)
    assert num_microbatches is not None, "the rules on mesh and batch have passed"
    try:
        plan_pipeline(config, num_microbatches)
    except ConfigError as error:
        return list(error.messages)
    return []


def warn(config: TrainerConfig, notes: Sequence[str] = ()) -> None:
    """Tell `notes`, which settings have no effect in this run, and what is likely a mistake."""
    found = [*notes, *warnings(config)]
    if config.model.pretrained is not None:
        from hp_train.pretrained.fit import tokenizer_warnings

        found += tokenizer_warnings(config)
    for message in found:
        print(f"hp-train: warning: {message}", file=sys.stderr)
