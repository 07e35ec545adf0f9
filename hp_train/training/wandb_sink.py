"""Rows to Weights & Biases: one run there for all attempts here. Needs the optional package `wandb`; for rank 0 only.

The id is made once and kept in `<run>/wandb.json`: a resumed run goes on in the same curves. $WANDB_MODE=offline
writes into the run directory alone, for `wandb sync` later; so does a run that the server cannot be reached from.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import sys
from pathlib import Path
from typing import Any

from hp_train.config.schema import TrainerConfig

ID_FILE = "wandb.json"


class WandbSink:
    """One attempt's connection to the run at W&B."""

    def __init__(self, run_dir: Path, config: TrainerConfig) -> None:
        import wandb  # an optional extra; validation has checked for it

        settings = {
            "project": config.metrics.wandb_project,
            "id": run_id(run_dir),
            "name": f"{run_dir.parent.name}/{run_dir.name}",
            "dir": str(run_dir),
            "config": dataclasses.asdict(config),
            "resume": "allow",
            # The output of ranks is in their logs already, and a summary of figures in ours.
            "settings": wandb.Settings(console="off", quiet=True),
        }
        try:
            self._run = wandb.init(**settings)
        except wandb.errors.Error as error:
            reason = " ".join(str(error).split())
            print(
                f"W&B cannot be reached ({reason}); writing offline into {run_dir / 'wandb'}",
                file=sys.stderr,
                flush=True,
            )
            self._run = wandb.init(**settings, mode="offline")
        print(f"W&B: {self._run.url or f'offline, in {run_dir}/wandb'}", flush=True)
        # Steps are a column, not W&B's own count: that may not go back, as steps do after a checkpoint is loaded.
        self._run.define_metric("*", step_metric="step")

    def write(self, figures: dict[str, Any]) -> None:
        """Send one row; figures that are None are left out."""
        self._run.log({name: value for name, value in figures.items() if value is not None})

    def close(self) -> None:
        """Send what is left and end this attempt's part of the run."""
        self._run.finish()


def run_id(run_dir: Path) -> str:
    """Return the id of the run at W&B, made and written down at the first call."""
    path = run_dir / ID_FILE
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["id"])
    except FileNotFoundError:
        made = secrets.token_hex(8)
    path.write_text(json.dumps({"id": made}) + "\n", encoding="utf-8")
    return made
