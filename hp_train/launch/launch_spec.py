"""What a launcher needs to know of a run, the same for all of its attempts. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hp_train.config.schema import TrainerConfig
from hp_train.launch.devices import ProcessPlan
from hp_train.launch.signals import StopSignals

if TYPE_CHECKING:  # it imports torch
    from hp_train.launch.nodes import NodeGroup

WORKER = ("-m", "hp_train.launch.worker")


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """One launcher's share of a run."""

    run_dir: Path
    config_path: Path  # what the workers read
    config: TrainerConfig
    plan: ProcessPlan
    stop: StopSignals  # installed already
    group: NodeGroup | None = None  # the launchers of all nodes, where there are several
    worker: tuple[str, ...] = WORKER  # what Python is given to run one rank; the config's path follows
