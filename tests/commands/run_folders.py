"""Makes directories of runs that never ran, with everything a real one leaves that the verbs read."""

from __future__ import annotations

import json
import os
from pathlib import Path

from omegaconf import OmegaConf

from hp_train.config.compose import compose
from hp_train.config.schema_tree import GROUPS
from hp_train.launch.outcome import Cause, Outcome, write_outcome
from hp_train.training.metrics import MetricsRow

FACTS = {
    "device": "cpu", "device_name": "cpu", "device_memory_bytes": None, "world_size": 4, "mesh": "pp 2 x dp_shard 2",
    "precision": "fp32", "num_parameters": 530_016, "first_step": 1, "max_steps": 60, "tokens_per_step": 2048,
    "resumed_from": None,
}  # fmt: skip


def saved_config(trainer: str) -> str:
    """The text of a run's config.yaml: every group, defaults in all but one."""
    return "".join(f"{group}: {trainer if group == 'trainer' else '{}'}\n" for group in GROUPS)


def row(step: int, loss: float, val_loss: float | None = None) -> dict:
    """One line of metrics.jsonl, every key there."""
    values = {field: None for field in MetricsRow.__dataclass_fields__}
    values.update(
        step=step, loss=loss, val_loss=val_loss, grad_norm=0.5, lr=1e-3, tokens=2048, tokens_per_second=8000.0,
        tokens_per_second_per_gpu=2000.0, step_time_s=0.25, data_wait_s=0.001, peak_memory_bytes=3 * 2**28,
    )  # fmt: skip
    return values


def make_run(
    folder: Path, losses: list[float], *, cause: Cause | None = Cause.DONE, at: float = 1e9, **sections: dict
) -> Path:
    """Write a run of one attempt; `sections` are config values by group. cause=None: it left no word of its end."""
    typed = [f"{group}.{key}={value}" for group, keys in sections.items() for key, value in keys.items()]
    typed.append("trainer.device=cpu")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(compose(typed).config)))
    (folder / "overrides.yaml").write_text(json.dumps({"recipe": "", "overrides": typed, "paths": []}))
    (folder / "capsule.json").write_text(json.dumps({"recipe": "", "host": "here", "python": "3.11.2", "versions": {}}))
    logs = folder / "logs" / "attempt_1"
    logs.mkdir(parents=True)
    (logs / "attempt.json").write_text(json.dumps(FACTS))
    rows = [row(step, loss, loss + 0.1 if step % 10 == 0 else None) for step, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(values) + "\n" for values in rows))
    if cause is not None:
        write_outcome(folder, Outcome(1, cause, 0, len(losses), last_step=len(losses)))
    for path in (folder / "config.yaml", folder / "logs"):
        os.utime(path, (at, at))
    return folder
