"""Rules on the loop: optimizer, learning rate, precision, logging. No torch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from hp_train.config.numbers import spell
from hp_train.config.rule import Rule
from hp_train.config.schema import TrainerConfig


def _betas(config: TrainerConfig) -> Iterator[str]:
    betas = config.optimizer.betas
    if len(betas) != 2:
        yield f"optimizer.betas={spell(betas)} has {len(betas)} entries; give 2, such as [0.9,0.95]"


def _tensorboard(config: TrainerConfig) -> Iterator[str]:
    if config.metrics.tensorboard and importlib.util.find_spec("tensorboard") is None:
        yield "metrics.tensorboard=true needs the package tensorboard: pip install 'hp-train[tensorboard]'"


def _wandb(config: TrainerConfig) -> Iterator[str]:
    if not config.metrics.wandb:
        return
    if importlib.util.find_spec("wandb") is None:
        yield "metrics.wandb=true needs the package wandb: pip install 'hp-train[wandb]'"
    elif os.environ.get("WANDB_MODE", "online") == "online" and not _has_wandb_key():
        yield (
            "metrics.wandb=true needs a key: run `wandb login`, set $WANDB_API_KEY, or write offline with "
            "WANDB_MODE=offline"
        )


def _has_wandb_key() -> bool:
    """Say whether W&B will find a key where it looks: in the environment, or in the netrc that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    netrc = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        return "wandb" in netrc.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def _resume(config: TrainerConfig) -> Iterator[str]:
    if config.trainer.resume == "must" and config.trainer.run_dir is None:
        yield "trainer.resume=must needs trainer.run_dir, the run to go on with; or use `hp-train resume RUN_DIR`"


RULES = (
    Rule(("optimizer.betas",), _betas),
    Rule(("metrics.tensorboard",), _tensorboard),
    Rule(("metrics.wandb",), _wandb),
    Rule(("trainer.resume", "trainer.run_dir"), _resume),
)
