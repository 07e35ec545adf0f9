"""Does a checkpoint hold this model and this optimizer's state? Told from its JSON alone, before any worker. No torch.

The workers compare every tensor again as they load (`checkpoint.load`); here a contradiction costs a second.
"""

from __future__ import annotations

from pathlib import Path

from hp_train.checkpoint.layout import METADATA, newest_committed, read_json, read_manifest
from hp_train.config.schema import ModelSection
from hp_train.errors import CheckpointError
from hp_train.models.shapes import parameter_shapes

_MODEL, _OPTIMIZER = "model.", "optimizer."  # before a parameter's name in the names of `checkpoint.state`


def checkpoint_misfits(checkpoints_dir: Path, model: ModelSection, optimizer_name: str) -> list[str]:
    """Return why the newest complete checkpoint cannot go on as `model` under `optimizer_name`, one line each.

    Nothing where there is no checkpoint. One that cannot be read is left to the workers, which take an older one.
    """
    folder = newest_committed(checkpoints_dir)
    if folder is None:
        return []
    try:
        tensors = read_json(folder, read_manifest(folder), METADATA)["tensors"]  # type: ignore[index]
        saved = {name: tuple(map(int, tensor["shape"])) for name, tensor in tensors.items()}
    except (CheckpointError, KeyError, TypeError, AttributeError, ValueError):
        return []
    return [*_model_misfits(folder, saved, model), *_optimizer_misfits(folder, saved, optimizer_name)]


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
    saved_by = "adamw" if any(name.startswith(_OPTIMIZER) for name in saved) else "sgd"  # sgd keeps no state
    if saved_by == optimizer_name:
        return []
    return [
        f"optimizer.name={optimizer_name} cannot go on from checkpoint {folder.name}, which {saved_by} saved; "
        f"use {saved_by}, or start a new run"
    ]


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))
