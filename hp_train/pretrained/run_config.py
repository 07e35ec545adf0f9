"""The config that a run is under now, read from its directory. No torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hp_train.config.schema import TrainerConfig
from hp_train.errors import ConfigError


def newest_config(run_dir: Path) -> TrainerConfig:
    """Return the config of the run's last attempt. Raises ConfigError when it cannot be used, or is of no Llama."""
    attempts = sorted(run_dir.glob("config.attempt_*.yaml"), key=lambda path: int(path.stem.rpartition("_")[2]))
    path = attempts[-1] if attempts else run_dir / "config.yaml"
    try:
        written = OmegaConf.load(path)
        _leave_out_plugins(written)
        tree = OmegaConf.merge(OmegaConf.structured(TrainerConfig), written)
        config = OmegaConf.to_object(tree)
    except (OSError, OmegaConfBaseException, YAMLError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be used: {' '.join(str(error).split())}") from error
    assert isinstance(config, TrainerConfig)
    if config.model.name != "llama":
        raise ConfigError(
            f"run {run_dir} trains model.name={config.model.name}, not a Llama; only those can be used here"
        )
    return config


def _leave_out_plugins(written: DictConfig) -> None:
    """Take the settings of plugins away: what is read here is our own, and needs none of their code."""
    for section in dataclasses.fields(TrainerConfig):
        known = {field.name for field in dataclasses.fields(section.default_factory)}
        for name in [name for name in written[section.name] if name not in known]:
            if OmegaConf.is_dict(written[section.name][name]):
                del written[section.name][name]
