"""How much disk the checkpoints of a run will take, before anything runs. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hp_train import registry
from hp_train.checkpoint.layout import bytes_in
from hp_train.config.schema import ModelSection, TrainerConfig
from hp_train.models.shapes import num_parameters

_BYTES_PER_PARAMETER = {"adamw": 12, "sgd": 4}  # fp32 master weight, and AdamW's two fp32 moments
_MARGIN_BYTES = 1 << 20  # JSON, safetensors headers and generator states


def checkpoint_bytes(model: ModelSection, optimizer_name: str = "adamw") -> int:
    """Return the size in bytes of one checkpoint: weights and moments in fp32, each parameter once on any mesh."""
    plugged = registry.find("optimizer", optimizer_name)
    per_parameter = _BYTES_PER_PARAMETER[optimizer_name] if plugged is None else 4 + plugged.state_bytes
    return num_parameters(model) * per_parameter + _MARGIN_BYTES


@dataclass(frozen=True, slots=True)
class DiskNeed:
    """The checkpoints that a run will have on disk at once, at most."""

    bytes_each: int
    number: int
    bytes_there: int = 0  # what the run's own checkpoints take already

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all of them."""
        return self.bytes_each * self.number

    @property
    def missing_bytes(self) -> int:
        """Return the bytes that must be free on the disk now."""
        return max(0, self.total_bytes - self.bytes_there)

    def describe(self, free_bytes: int | None) -> str:
        """Return e.g. `checkpoint 96 GB x 4 = 384 GB, 2.1 TB free`."""
        free = "" if free_bytes is None else f", {size_text(free_bytes)} free"
        return f"checkpoint {size_text(self.bytes_each)} x {self.number} = {size_text(self.total_bytes)}{free}"


def disk_need(config: TrainerConfig, checkpoints_dir: Path | None = None) -> DiskNeed:
    """Return what `config` will need; `checkpoints_dir` is given to go on with a run that may have some."""
    there = 0 if checkpoints_dir is None else bytes_in(checkpoints_dir)
    return DiskNeed(checkpoint_bytes(config.model, config.optimizer.name), num_checkpoints(config), there)


def num_checkpoints(config: TrainerConfig) -> int:
    """Return how many checkpoints there will be at once, at most: those that are kept, and the one being written."""
    checkpoint, max_steps = config.checkpoint, config.trainer.max_steps
    if checkpoint.every == 0:
        return 1  # saved once, when a signal stops the run
    kept_for_good = 0 if checkpoint.keep_every is None else max_steps // checkpoint.keep_every
    saves = max_steps if checkpoint.every is None else -(-max_steps // checkpoint.every)
    if checkpoint.every is None and checkpoint.every_minutes is None:
        saves = 1  # at the end
    return min(checkpoint.keep_last + 1, saves) + kept_for_good


def size_text(num_bytes: int) -> str:
    """Return a size in the largest decimal unit of which there is at least one: `999 bytes`, `1.5 MB`, `2.1 TB`."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            value = num_bytes / size
            return f"{value:,.0f} {unit}" if value >= 10 and unit != "TB" else f"{value:,.1f} {unit}"
    return f"{num_bytes} bytes"
