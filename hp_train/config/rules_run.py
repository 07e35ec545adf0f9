"""Rules on the loop: optimizer, learning rate, precision, logging. No torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from hp_train.config.rule import Rule
from hp_train.config.schema import TrainerConfig
from hp_train.config.schema_tree import spell


def _not_yet(config: TrainerConfig) -> Iterator[str]:
    if config.metrics.wandb:
        yield "metrics.wandb=true is not supported yet; use metrics.tensorboard=true, or read metrics.jsonl"
    if config.metrics.profile_steps:
        yield f"metrics.profile_steps={spell(config.metrics.profile_steps)} is not supported yet; use []"


def _betas(config: TrainerConfig) -> Iterator[str]:
    betas = config.optimizer.betas
    if len(betas) != 2:
        yield f"optimizer.betas={spell(betas)} has {len(betas)} entries; give 2, such as [0.9,0.95]"


def _tensorboard(config: TrainerConfig) -> Iterator[str]:
    if config.metrics.tensorboard and importlib.util.find_spec("tensorboard") is None:
        yield "metrics.tensorboard=true needs the package tensorboard: pip install 'hp-train[tensorboard]'"


def _resume(config: TrainerConfig) -> Iterator[str]:
    if config.trainer.resume == "must" and config.trainer.run_dir is None:
        yield "trainer.resume=must needs trainer.run_dir, the run to go on with; or use `hp-train resume RUN_DIR`"


RULES = (
    Rule(("metrics.wandb", "metrics.profile_steps"), _not_yet),
    Rule(("optimizer.betas",), _betas),
    Rule(("metrics.tensorboard",), _tensorboard),
    Rule(("trainer.resume", "trainer.run_dir"), _resume),
)
