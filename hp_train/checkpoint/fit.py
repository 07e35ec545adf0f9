"""Can a run go on from a checkpoint under a changed config? Told from its JSON alone, before any worker. No torch.

Where a change has no meaning it is refused; where it has one it is said in words. The workers compare every tensor
again as they load (`checkpoint.load`); here a contradiction costs a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hp_train import registry
from hp_train.checkpoint.layout import METADATA, PROGRESS, newest_committed, read_json, read_manifest
from hp_train.config.schema import ModelSection, TrainerConfig
from hp_train.data.index import describe_source
from hp_train.errors import CheckpointError, ConfigError
from hp_train.models.shapes import parameter_shapes

_MODEL, _OPTIMIZER = "model.", "optimizer."  # before a parameter's name in the names of `checkpoint.state`


def identity(config: TrainerConfig) -> dict[str, Any]:
    """Return what a checkpoint must say of the run, so that going on can be judged."""
    trainer = config.trainer
    try:
        fingerprint = describe_source(config.data).fingerprint
    except ConfigError:  # told where data is checked
        fingerprint = ""
    return {
        "seed": trainer.seed,
        "seq_len": trainer.seq_len,
        "global_batch_size": trainer.global_batch_size,
        "data": {
            "name": config.data.name,
            "fingerprint": fingerprint,
            "document_boundaries": config.data.document_boundaries,
        },
    }


def checkpoint_misfits(checkpoints_dir: Path, config: TrainerConfig) -> list[str]:
    """Return why the newest complete checkpoint cannot go on under `config`, one line each.

    Nothing where there is no checkpoint. One that cannot be read is left to the workers, which take an older one.
    """
    folder = newest_committed(checkpoints_dir)
    if folder is None:
        return []
    try:
        manifest = read_manifest(folder)
        tensors = read_json(folder, manifest, METADATA)["tensors"]  # type: ignore[index]
        saved = {name: tuple(map(int, tensor["shape"])) for name, tensor in tensors.items()}
        progress: dict[str, Any] = read_json(folder, manifest, PROGRESS)  # type: ignore[assignment]
    except (CheckpointError, KeyError, TypeError, AttributeError, ValueError):
        return []
    found = [*_model_misfits(folder, saved, config.model), *_optimizer_misfits(folder, saved, config.optimizer.name)]
    return [*found, *order_misfits(folder.name, progress, config)]


def steps_misfits(checkpoints_dir: Path, config: TrainerConfig) -> list[str]:
    """Return why a run that is not finished has no step left to take under `config`, one line or none."""
    folder = newest_committed(checkpoints_dir)
    max_steps = config.trainer.max_steps
    try:
        step = 0 if folder is None else read_manifest(folder).step
    except CheckpointError:  # taken away this very moment
        return []
    if folder is None or step <= max_steps:
        return []
    return [f"trainer.max_steps={max_steps} lies before step {step} of checkpoint {folder.name}; use {step} or more"]


def order_misfits(name: str, progress: dict[str, Any], config: TrainerConfig) -> list[str]:
    """Return which settings would make the next samples other than the next ones, one line each."""
    now = identity(config)
    found = []
    for key, why in (("seed", "puts samples into another order"), ("seq_len", "cuts the text into other samples")):
        if key in progress and progress[key] != now[key]:
            found.append(
                f"trainer.{key}={now[key]} {why} than checkpoint {name}, which trainer.{key}={progress[key]} saved; "
                f"use {progress[key]}, or start a new run"
            )
    before, after = progress.get("data"), now["data"]
    if isinstance(before, dict) and before != after:
        changed = "document_boundaries" if before.get("fingerprint") == after["fingerprint"] else "*"
        found.append(
            f"data.{changed} is not what checkpoint {name} was trained on (data={before.get('name')}, "
            f"document_boundaries={before.get('document_boundaries')}): its next samples are not there; give data.* "
            "the values it was saved with, or start a new run"
        )
    return found


def checkpoint_changes(checkpoints_dir: Path, config: TrainerConfig) -> list[str]:
    """Return what will be different from the newest complete checkpoint on, and has a meaning; one line each."""
    folder = newest_committed(checkpoints_dir)
    if folder is None:
        return []
    try:
        progress: Any = read_json(folder, read_manifest(folder), PROGRESS)
        return progress_changes(progress, config)
    except (CheckpointError, KeyError, TypeError, AttributeError, ValueError):
        return []


def progress_changes(progress: dict[str, Any], config: TrainerConfig) -> list[str]:
    """Return what `config` changes for a run that has come as far as `progress` says."""
    found = []
    step, size = progress["step"], config.trainer.global_batch_size
    if progress.get("global_batch_size", size) != size:
        found.append(
            f"trainer.global_batch_size {progress['global_batch_size']} -> {size} from step {step + 1} on: its first "
            f"sample is {progress['samples_seen']}, the next that was not read; the learning rate goes by steps, as "
            "before"
        )
    total = config.lr_scheduler.total_steps
    if total is not None and total != progress["total_steps"]:
        found.append(
            f"lr_scheduler.total_steps {progress['total_steps']} -> {total} from step {step + 1} on: the learning rate "
            "jumps to the new curve"
        )
    elif config.trainer.max_steps > progress["total_steps"] and config.lr_scheduler.name != "constant":
        found.append(
            f"the learning rate has its lowest value from step {progress['total_steps']} on, as the schedule was "
            "stretched at the start; lr_scheduler.total_steps stretches it anew"
        )
    return found


def _model_misfits(folder: Path, saved: dict[str, tuple[int, ...]], model: ModelSection) -> list[str]:
    held = {name.removeprefix(_MODEL): shape for name, shape in saved.items() if name.startswith(_MODEL)}
    wanted = parameter_shapes(model)
    different = [name for name in wanted if wanted[name] != held.get(name)]
    different += [name for name in held if name not in wanted]
    if not different:
        return []
    name = different[0]
    rest = f", and {len(different) - 1} more differ" if len(different) > 1 else ""
    here, there = _shape(wanted.get(name)), _shape(held.get(name))
    return [
        f"model.* is not the model of checkpoint {folder.name}: {name} is {there} in it and {here} here{rest}; "
        "give model.* the values it was saved with, or start a new run"
    ]


def _optimizer_misfits(folder: Path, saved: dict[str, tuple[int, ...]], optimizer_name: str) -> list[str]:
    if registry.find("optimizer", optimizer_name) is not None:
        return []  # its state has names of its own, which the workers compare
    saved_by = "adamw" if any(name.startswith(_OPTIMIZER) for name in saved) else "sgd"  # sgd keeps no state
    if saved_by == optimizer_name:
        return []
    return [
        f"optimizer.name={optimizer_name} cannot go on from checkpoint {folder.name}, which {saved_by} saved; "
        f"use {saved_by}, or start a new run"
    ]


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))
