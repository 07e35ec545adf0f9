"""When a run saves and what it goes on from: the trainer's side of `hp_train.checkpoint`."""

from __future__ import annotations

import time

from hp_train.checkpoint.asynchronous import AsyncSaver
from hp_train.checkpoint.metrics_cut import cut_metrics

from hp_train.checkpoint.load import find_checkpoint, load_checkpoint
from hp_train.checkpoint.save import save_checkpoint
from hp_train.checkpoint.state import CheckpointState
from hp_train.config.schema import TrainerConfig
from hp_train.training.run_context import RunContext
from hp_train.training.setup import Worker


class CheckpointSession:
    """Restores a run once, then decides after every step whether to save."""

    def __init__(self, config: TrainerConfig, context: RunContext, worker: Worker) -> None:
        self.config = config.checkpoint
        self.context = context
        self.worker = worker
        self.folder = context.run_dir / "checkpoints"
        self.seed = config.trainer.seed
        self.total_steps = config.lr_scheduler.total_steps or config.trainer.max_steps
        self._keeps_total_steps = config.lr_scheduler.total_steps is None
        self.tokens_seen = 0
        self.resumed_from: str | None = None
        self._saver = AsyncSaver(self.folder, keep_last=self.config.keep_last) if self.config.async_save else None
        self._last_save = time.monotonic()
        self._saved_step = 0

    def restore(self) -> int:
        """Load the newest valid checkpoint, if there is one, and return the step it was taken after; else 0.

        metrics.jsonl is cut to that step, so that every step has one row.
        """
        path = find_checkpoint(self.folder)
        step = 0
        if path is not None:
            progress = load_checkpoint(path, self._state({}))
            step = self._saved_step = progress["step"]
            self.tokens_seen = progress["tokens_seen"]
            if self._keeps_total_steps:
                self.total_steps = progress["total_steps"]
            self.resumed_from = path.name
        if self.context.rank == 0:
            cut_metrics(self.context.run_dir, step, self.context.attempt)
        self._last_save = time.monotonic()
        return step

    def is_due(self) -> bool:
        """Say whether the clock asks for a save; read on rank 0 only, whose word counts for all."""
        minutes = self.config.every_minutes
        return self.config.every != 0 and minutes is not None and time.monotonic() - self._last_save >= minutes * 60

    def after_step(self, step: int, tokens_seen: int, *, due: bool, last: bool, stopping: bool) -> None:
        """Save if the schedule, the clock, the end or a stop asks for it."""
        every = self.config.every
        scheduled = bool(every) and step % every == 0
        if not (stopping or (every != 0 and (due or last or scheduled))):
            return
        self.tokens_seen = tokens_seen
        state = self._state({
            "step": step, "tokens_seen": tokens_seen, "total_steps": self.total_steps, "seed": self.seed,
        })  # fmt: skip
        if self._saver is not None and not (last or stopping):
            self._saver.save(step, state)
        else:
            self.close()
            save_checkpoint(self.folder, step, state, keep_last=self.config.keep_last)
        self._last_save = time.monotonic()

    def close(self) -> None:
        """Wait for a save that is still being written; collective, so not for the path of an error."""
        if self._saver is not None:
            self._saver.wait()

    def _state(self, progress: dict) -> CheckpointState:
        model = self.worker.model
        return CheckpointState(model.parameters, self.worker.optimizer, model.aliases, progress)
