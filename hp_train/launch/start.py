"""What the command calls to run: check the machine, make or reopen the run directory, launch, summarize.

torch is imported by the launchers only, after everything that can be wrong has been told.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hp_train.checkpoint.fit import checkpoint_changes, steps_misfits
from hp_train.checkpoint.layout import newest_committed
from hp_train.checkpoint.size import disk_need
from hp_train.compile.pass_config import build_pass_config_from_trainer_config
from hp_train.config.paths import overrides_with_absolute_paths, pinned_paths, with_absolute_paths
from hp_train.config.schema import TrainerConfig
from hp_train.data.index import mix_shares
from hp_train.errors import ConfigError, ExitCode
from hp_train.launch.capsule import describe_circumstances, recorded_recipe
from hp_train.launch.devices import ProcessPlan, plan_processes
from hp_train.launch.feed import Display
from hp_train.launch.files import write_json, write_text
from hp_train.launch.launch_spec import LaunchSpec
from hp_train.launch.outcome import Cause, read_outcome
from hp_train.launch.owner import Ownership, own
from hp_train.launch.plain_log import PlainLog
from hp_train.launch.run_dir import check_resume_dir, check_run_dir, create_run_dir, free_bytes
from hp_train.launch.signals import StopSignals
from hp_train.launch.summary import continue_command, summarize
from hp_train.topology import BatchPlan


def machine_faults(config: TrainerConfig, run_dir: Path | None = None) -> list[str]:
    """Return all that stands against `config` on this machine: run directory, disk, devices. Nothing is created.

    `run_dir` is given to go on with the run there; else the run is a new one.
    """
    need = disk_need(config, None if run_dir is None else run_dir / "checkpoints")
    directory = check_run_dir(config, need) if run_dir is None else check_resume_dir(run_dir, need)
    return [*directory, *plan_processes(config).faults]


def start_run(config: TrainerConfig, *, recipe: str, overrides: list[str], argv: list[str]) -> int:
    """Start a new run of a config that has passed all checks and return the exit code."""
    plan = _plan(config)
    absolute = with_absolute_paths(config)
    run_dir = create_run_dir(absolute, recipe)
    with own(run_dir) as ownership:
        config_path = write_run_files(run_dir, config, recipe=recipe, overrides=overrides, argv=argv)
        return _launch(run_dir, config_path, absolute, plan, ownership)


def write_run_files(
    run_dir: Path, config: TrainerConfig, *, recipe: str, overrides: list[str], argv: list[str], submission: int = 1
) -> Path:
    """Write what a run is made of into its directory and return the path of the config for its workers.

    submission: above 1, a further job of a run that goes on; what the run began with stays.
    """
    infix = "" if submission == 1 else f".submission_{submission}"
    config_path = run_dir / f"config{infix}.yaml"
    write_text(config_path, _to_yaml(with_absolute_paths(config)))
    if submission == 1:
        write_text(run_dir / "overrides.yaml", _overrides_yaml(recipe, overrides, config))
    write_json(run_dir / f"capsule{infix}.json", {**describe_circumstances(argv, recipe), "overrides": overrides})
    return config_path


def resume_run(run_dir: Path, config: TrainerConfig, *, overrides: list[str], argv: list[str]) -> int:
    """Go on with the run in `run_dir` under `config`, its own with changes, and return the exit code.

    A run that has taken all of its steps says so and nothing is started. Raises ConfigError if it is in use, or has
    come further than `config` lets it.
    """
    run_dir = run_dir.absolute()
    config = with_absolute_paths(config)
    outcome = read_outcome(run_dir)
    if outcome is not None and outcome.cause is Cause.DONE and outcome.step >= config.trainer.max_steps:
        print(f"run {run_dir} is finished: all {outcome.step} steps are taken")
        print(f"  go on with: {continue_command(run_dir, config, outcome)}")
        return int(ExitCode.DONE)
    too_short = steps_misfits(run_dir / "checkpoints", config)
    if too_short:
        raise ConfigError(*too_short)
    plan = _plan(config)
    with own(run_dir) as ownership:
        attempt = ownership.attempt
        config_path = run_dir / f"config.attempt_{attempt}.yaml"
        write_text(config_path, _to_yaml(config))
        circumstances = {**describe_circumstances(argv, recorded_recipe(run_dir)), "overrides": overrides}
        write_json(run_dir / f"capsule.attempt_{attempt}.json", circumstances)
        return _launch(run_dir, config_path, config, plan, ownership)


def _plan(config: TrainerConfig) -> ProcessPlan:
    plan = plan_processes(config)
    if plan.faults:
        raise ConfigError(*plan.faults)
    return plan


def _launch(run_dir: Path, config_path: Path, config: TrainerConfig, plan: ProcessPlan, ownership: Ownership) -> int:
    with StopSignals().installed() as stop:
        return run_attempts(LaunchSpec(run_dir, config_path, config, plan, stop), ownership)


def run_attempts(spec: LaunchSpec, ownership: Ownership) -> int:
    """Run the workers to their end, show them, say how it went and return the exit code."""
    from hp_train.launch.plan_file import PLAN_FILE, describe_plan  # loads the schedules, which a refusal does without

    run_dir, config, trainer = spec.run_dir, spec.config, spec.config.trainer
    batch = BatchPlan(trainer.global_batch_size, spec.plan.sizes.dp_size, trainer.micro_batch_size, trainer.seq_len)
    write_json(run_dir / "pass_config.json", dataclasses.asdict(build_pass_config_from_trainer_config(config)))
    described = describe_plan(config, spec.plan, batch)
    write_json(run_dir / PLAN_FILE, described)
    checkpoints = run_dir / "checkpoints"
    changes = [f"changed: {change}" for change in checkpoint_changes(checkpoints, config)]
    disk = disk_need(config, checkpoints).describe(free_bytes(run_dir))
    chosen = []
    if described["pipeline"] is not None and config.pp.p2p_transport == "auto":
        chosen = [f"pp.p2p_transport=auto: {described['pipeline']['transport']}"]
    origins = _origins(config, checkpoints)
    _say(batch.describe(), *spec.plan.lines, *chosen, *origins, disk, f"run directory {run_dir}", *changes)
    is_inline = config.launcher.name == "inline"
    if is_inline:  # torch is loaded here, when nothing is left to refuse
        from hp_train.launch.inline import launch_inline as launch
    else:
        from hp_train.launch.local import launch
    # A debugger wants the terminal for itself.
    end = launch(spec, ownership, _plain_log(config) if is_inline else choose_display(config))
    _say(*summarize(run_dir, config, end.outcome))
    if end.report:
        print(*end.report, sep="\n", file=sys.stderr, flush=True)
    return end.outcome.exit_code


def choose_display(config: TrainerConfig) -> Display:
    """Return the live view where stdout is a terminal, else plain lines."""
    if sys.stdout.isatty():
        from rich.console import Console

        from hp_train.launch.view import LiveView

        console = Console()
        if console.is_interactive:
            return LiveView(console, loss_means_nothing=config.data.name == "random")
    return _plain_log(config)


def _plain_log(config: TrainerConfig) -> PlainLog:
    return PlainLog(sys.stdout, config.trainer.log_every, loss_means_nothing=config.data.name == "random")


def _say(*lines: str) -> None:
    with suppress(OSError):  # a reader that went away (`| head`, a closed terminal) does not end the run
        for line in lines:
            print(line, flush=True)


def _origins(config: TrainerConfig, checkpoints: Path) -> Iterator[str]:
    """Yield where weights and samples come from, where that is not what everybody expects."""
    if config.model.pretrained is not None and newest_committed(checkpoints) is None:
        yield f"weights from {config.model.pretrained}"
    if config.data.mix:
        shares = mix_shares(config.data.mix)
        yield f"data mix {', '.join(f'{name} {share:.1%}' for name, share in shares.items())}"


def _to_yaml(config: TrainerConfig) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)


def _overrides_yaml(recipe: str, overrides: list[str], config: TrainerConfig) -> str:
    """Return what composes `config` again from any folder; `paths` are those that files named, kept apart.

    A group chosen anew brings its own paths, while what was typed holds for every recipe.
    """
    from omegaconf import OmegaConf

    typed = overrides_with_absolute_paths(overrides, config)
    return OmegaConf.to_yaml(
        OmegaConf.create({"recipe": recipe, "overrides": typed, "paths": pinned_paths(overrides, config)})
    )
