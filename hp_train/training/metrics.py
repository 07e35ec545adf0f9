"""One row of figures an optimizer step, and where rows go: metrics.jsonl always, TensorBoard and W&B on request.

Rows hold every key of `MetricsRow`, null where a figure is absent; floats in full precision. Only rank 0 writes.
"""

from __future__ import annotations

import dataclasses
import json
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hp_train.config.schema import TrainerConfig
from hp_train.training.row_file import RowFile
from hp_train.training.wandb_sink import WandbSink


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """What is recorded of one optimizer step."""

    step: int
    loss: float  # nats per valid target token
    val_loss: float | None  # nats per valid target token of the held-out part
    grad_norm: float  # before clipping
    lr: float
    tokens: int  # valid target tokens of this step, whole job
    tokens_per_second: float
    tokens_per_second_per_gpu: float
    step_time_s: float  # without evaluation and saving
    data_wait_s: float  # of it, the longest wait for data of any rank
    mfu: float | None  # model FLOPs over the device's peak; None where the peak is unknown
    peak_memory_bytes: int  # the largest of any rank since the start
    attempt: int  # that took the step
    compute_min_s: float  # what the fastest rank computed in this step; see `stragglers.ComputeClock`
    compute_max_s: float  # what the slowest rank computed
    slowest_rank: int
    source_loss: dict[str, float | None] | None = (
        None  # by source of data.mix: nats per valid token, None where it had none
    )
    source_tokens: dict[str, int] | None = None  # valid target tokens; both None without a mix


class MetricsWriter:
    """Appends rows to `metrics.jsonl` in the run directory, each in one write so that a reader sees whole lines."""

    def __init__(self, run_dir: Path, config: TrainerConfig) -> None:
        self._file = RowFile(run_dir / "metrics.jsonl")
        self._board = None
        self._wandb = WandbSink(run_dir, config) if config.metrics.wandb else None
        if config.metrics.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # an optional extra; validation has checked for it

            self._board = SummaryWriter(log_dir=str(run_dir / "tensorboard"))

    def write(self, row: MetricsRow) -> None:
        """Append one row."""
        figures = dataclasses.asdict(row)
        self._file.append(json.dumps(figures))
        self._show(row.step, figures)

    def show_made_up(self, step: int, val_loss: float) -> None:
        """Show elsewhere a validation loss that was put into its row later; see `metrics_cut.fill_val_loss`."""
        self._show(step, {"step": step, "val_loss": val_loss})

    def _show(self, step: int, figures: dict[str, Any]) -> None:
        """Send figures to TensorBoard, one curve for each source of a mix, and to W&B."""
        if self._wandb is not None:
            self._wandb.write(figures)
        if self._board is None:
            return
        for name, value in figures.items():
            parts = (
                {f"{name}/{part}": figure for part, figure in value.items()}
                if isinstance(value, dict)
                else {name: value}
            )
            for tag, figure in parts.items():
                if tag != "step" and figure is not None:
                    self._board.add_scalar(tag, figure, step)

    def sync(self) -> None:
        """Bring the rows to the disk; before a checkpoint, which must not be newer than they are."""
        self._file.sync()

    def close(self) -> None:
        """Flush and close everything."""
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.close()


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory this process has held on its device; on the CPU, its peak resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_name(device: torch.device) -> str:
    """Return the name of the accelerator, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def device_memory_bytes(device: torch.device) -> int | None:
    """Return the memory of the accelerator; None on the CPU, whose memory is shared."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
