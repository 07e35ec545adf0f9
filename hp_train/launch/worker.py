"""One process of a run: `python -m hp_train.launch.worker RUN_DIR/config.yaml`, under our launcher or plain torchrun.

Reads the composed config (never Hydra), ties itself to the launcher, joins the process group and calls the trainer.
Ends with status 0 when the trainer returned (done, or stopped with everything saved), else with the exit code of what
was raised, after leaving failure.json in its log folder.
"""

from __future__ import annotations

import dataclasses
import datetime
import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from hp_train.checkpoint.fence import newest_attempt
from hp_train.config.schema import TrainerConfig
from hp_train.errors import ExitCode, HpTrainError, SupersededError
from hp_train.launch import lifeline
from hp_train.launch.capsule import recorded_plugins, recorded_recipe
from hp_train.launch.devices import mesh_sizes
from hp_train.launch.failures import FAILED_MARK, Failure, record_failure
from hp_train.launch.files import damaged, write_json
from hp_train.launch.flight import collective_in_flight
from hp_train.launch.lifeline import SHOW_STACKS
from hp_train.launch.out_of_memory import advise, measure
from hp_train.launch.outcome import Cause, Outcome, write_outcome
from hp_train.launch.run_dir import rank_dir
from hp_train.launch.watchdog import BOARD, STACKS_FILE, STANDING_FILE, beside
from hp_train.topology import coordinates_of
from hp_train.training.progress import Board, Phase
from hp_train.training.run_context import RunContext, TrainOutcome

ATTEMPT = "HP_TRAIN_ATTEMPT"  # set for workers by the launcher
DEVICE = "HP_TRAIN_DEVICE"

Train = Callable[[TrainerConfig, RunContext], TrainOutcome]


def main(arguments: list[str], train: Train | None = None) -> int:
    """Run one rank to its end and return the exit status. `train` is the trainer's `train` unless given."""
    assert len(arguments) == 1, "usage: python -m hp_train.launch.worker RUN_DIR/config.yaml"
    config_path = Path(arguments[0]).absolute()
    context = _context(config_path.parent)
    lifeline.hold_on(context.stop, context.attempt_dir / FAILED_MARK, lambda: _tell_standing(context))
    faulthandler.enable()
    if BOARD in os.environ:
        _be_watched(context)
    config: TrainerConfig | None = None
    try:
        config = settle(load_config(config_path), context)
        outcome = run_rank(config, context, train)
    except BaseException as error:  # a rank's end is told whatever it was, SystemExit included
        return _account_for(error, config, context)
    if context.rank == 0:
        write_outcome(context.run_dir, outcome_of(outcome, context))
    context.progress.phase = Phase.ENDED
    return 0


def _be_watched(context: RunContext) -> None:
    """Note on the launcher's board what this process does, and answer the watchdog's signals."""
    context.progress.post_on(Board(Path(os.environ[BOARD]), int(os.environ["LOCAL_WORLD_SIZE"])), context.local_rank)
    path = beside(Path(os.environ[BOARD]), context.local_rank, STACKS_FILE)
    stacks = open(path, "w")  # noqa: SIM115: faulthandler writes to it for as long as the process lives
    faulthandler.register(SHOW_STACKS, file=stacks, all_threads=True)


def _tell_standing(context: RunContext) -> None:
    if BOARD not in os.environ:
        return  # somebody's signal, not our watchdog's
    progress = context.progress
    standing = {
        "step": progress.step,
        "phase": str(progress.phase),
        "pipeline": progress.describe_pipeline(),
        "collective": collective_in_flight(),
    }
    write_json(beside(Path(os.environ[BOARD]), context.local_rank, STANDING_FILE), standing)


def load_config(path: Path) -> TrainerConfig:
    """Return the config that the launcher wrote."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from hp_train.config.schema_tree import config_class
    from hp_train.config.yaml_text import read
    from hp_train.plugins import load_recorded

    for line in load_recorded(recorded_plugins(path)):
        print(f"hp-train: warning: {line}", file=sys.stderr)
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(config_class()), read(path.read_text())))
    except (OSError, ValueError, TypeError, YAMLError, OmegaConfBaseException) as error:
        raise damaged(path, str(error)) from error
    assert isinstance(config, TrainerConfig)
    return config


def _context(run_dir: Path) -> RunContext:
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    return RunContext(
        run_dir=run_dir,
        attempt=int(os.environ.get(ATTEMPT, 0)),  # 0 under plain torchrun, until the ranks can agree on one
        rank=rank,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        world_size=world_size,
        recipe=recorded_recipe(run_dir),
    )


def settle(config: TrainerConfig, context: RunContext) -> TrainerConfig:
    """Fill in what was left to the machine: the device that the launcher chose and the size of the mesh."""
    sizes = mesh_sizes(config, context.world_size)
    context.progress.coordinates = coordinates_of(context.rank, sizes).describe()
    config.fsdp.dp_shard_size = sizes.dp_shard
    if DEVICE in os.environ:
        config.trainer.device = os.environ[DEVICE]
    elif config.trainer.device == "auto":
        import torch

        config.trainer.device = "cuda" if torch.cuda.is_available() else "cpu"
    return config


def run_rank(config: TrainerConfig, context: RunContext, train: Train | None) -> TrainOutcome:
    """Join the process group, train and leave it; `train` is the trainer's unless given."""
    import torch
    import torch.distributed as dist

    if train is None:
        from hp_train.training.trainer import train
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "0")  # a single process without a launcher: any free port
    # The watchdog comes first, and knows more; this is for a run without our launcher.
    launcher = config.launcher
    timeout = datetime.timedelta(seconds=2 * max(launcher.first_step_timeout, launcher.failure_timeout))
    if config.trainer.device == "cuda":
        device = torch.device("cuda", context.local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, timeout=timeout)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    if context.attempt == 0:
        agreed = [newest_attempt(context.run_dir) + 1]  # rank 0's count; others may see folders their peers just made
        dist.broadcast_object_list(agreed)
        context.attempt = agreed[0]
    context.attempt_dir.mkdir(parents=True, exist_ok=True)
    outcome = train(config, context)
    dist.destroy_process_group()
    return outcome


def outcome_of(outcome: TrainOutcome, context: RunContext) -> Outcome:
    """Return what outcome.json says of a training that came to its end."""
    cause = Cause.DONE if outcome.exit_code == ExitCode.DONE else Cause.STOPPED
    return Outcome(context.attempt, cause, int(outcome.exit_code), outcome.step, last_step=outcome.step)


def failure_of(error: BaseException, context: RunContext) -> Failure:
    """Return this rank's account of what it raised."""
    return Failure(
        rank=context.rank,
        time_ns=time.time_ns(),
        type=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        coordinates=context.progress.coordinates,
        step=context.progress.step,
        phase=str(context.progress.phase),
        exit_code=int(error.exit_code) if isinstance(error, HpTrainError) else int(ExitCode.FAILED),
    )


def _account_for(error: BaseException, config: TrainerConfig | None, context: RunContext) -> int:
    """Leave this rank's account, where a launcher of ours reads it, and return the exit status."""
    if isinstance(error, SupersededError):  # the directory is another attempt's
        print(f"hp-train: {error}", file=sys.stderr)
        return int(error.exit_code)
    failure = failure_of(error, context)
    if ATTEMPT not in os.environ:
        print(failure.message if isinstance(error, HpTrainError) else failure.traceback, file=sys.stderr)
        return failure.exit_code
    folder = rank_dir(context.run_dir, context.attempt, context.rank)
    record_failure(folder, failure)
    if config is not None and failure.is_out_of_memory:
        memory = measure()
        notes = (memory.describe(), f"what would help most: {'; or '.join(advise(config, memory))}")
        record_failure(folder, dataclasses.replace(failure, notes=notes))
    return failure.exit_code


def leave(status: int) -> None:
    """End the process. After a failure at once: destructors of a broken process group may wait for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
