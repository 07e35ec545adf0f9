"""When a run saves and what it goes on from: the trainer's side of `hp_train.checkpoint`."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

from hp_train.checkpoint import rng
from hp_train.checkpoint.agreement import gather_all
from hp_train.checkpoint.asynchronous import AsyncSaver
from hp_train.checkpoint.fence import Fence
from hp_train.checkpoint.fit import identity, order_misfits
from hp_train.checkpoint.inspection import slowest_save_s
from hp_train.checkpoint.load import find_checkpoint, load_checkpoint
from hp_train.checkpoint.metrics_cut import cut_metrics
from hp_train.checkpoint.save import save_checkpoint
from hp_train.checkpoint.state import CheckpointState
from hp_train.checkpoint.storage import SavePolicy
from hp_train.config.schema import TrainerConfig
from hp_train.errors import CheckpointError, ConfigError
from hp_train.pretrained.load import load_pretrained
from hp_train.training.row_file import warn
from hp_train.training.run_context import RunContext
from hp_train.training.setup import Worker


class CheckpointSession:
    """Restores a run once, then decides after every step whether to save."""

    def __init__(self, config: TrainerConfig, context: RunContext, worker: Worker) -> None:
        self.config = config.checkpoint
        self.context = context
        self.worker = worker
        self.folder = context.run_dir / "checkpoints"
        self.fence = Fence(context.run_dir, context.attempt)
        self.total_steps = config.lr_scheduler.total_steps or config.trainer.max_steps
        self.tokens_seen = 0
        self.samples_seen = 0  # also the global index of the next sample
        self.resumed_from: str | None = None
        self._whole_config = config
        self._identity: dict[str, Any] = {}
        self._policy = SavePolicy(
            self.config.keep_last, self.config.keep_every, context.attempt, self.fence, context.progress.beat
        )
        # A save in the background says nothing of whether training gets on.
        in_background = dataclasses.replace(self._policy, on_progress=lambda: None)
        self._saver = AsyncSaver(self.folder, in_background) if self.config.async_save else None
        self._last_save = time.monotonic()
        self._has_warned = False

    def restore(self) -> int:
        """Load the newest valid checkpoint and return the step it was taken after; 0 without one. Collective.

        Without one the weights are the initial ones, or are loaded from `model.pretrained`. metrics.jsonl is cut to
        that step, so that every step has one row. Raises ConfigError when there must be a checkpoint and none holds,
        or when the next samples would not be the next; SupersededError on rank 0 when a newer attempt has taken over.
        """
        rng.start_anew(self._whole_config.trainer.seed, self.context.rank, step=0)
        self._identity = gather_all(identity(self._whole_config) if self.context.rank == 0 else None)[0]
        path = find_checkpoint(self.folder)
        step = 0
        if path is not None:
            step = self._go_on_from(path)
        elif self._whole_config.trainer.resume == "must":
            raise ConfigError(f"trainer.resume=must, and no checkpoint in {self.folder} is complete and undamaged")
        elif self._whole_config.model.pretrained is not None:
            load_pretrained(self._whole_config.model, self.worker.model.parameters)
        if self.context.rank == 0:
            self.fence.check()  # loading takes a while, and the rows may be another attempt's by now
            cut_metrics(self.context.run_dir, step, self.context.attempt)
        self._last_save = time.monotonic()
        return step

    def _go_on_from(self, path: Path) -> int:
        progress = load_checkpoint(path, self._state({}))
        faults = order_misfits(path.name, progress, self._whole_config)
        if faults:
            raise ConfigError(*faults)
        states = rng.read_states(path, self.context.rank, self.context.world_size)
        if states is not None:
            rng.restore(states, self.worker.mesh.device)
        else:
            rng.start_anew(self._whole_config.trainer.seed, self.context.rank, progress["step"])
        self.tokens_seen, self.samples_seen = progress["tokens_seen"], progress["samples_seen"]
        if self._whole_config.lr_scheduler.total_steps is None:
            self.total_steps = progress["total_steps"]
        self.resumed_from = path.name
        return progress["step"]

    def is_due(self) -> bool:
        """Say whether the clock asks for a save; read on rank 0 only, whose word counts for all."""
        minutes = self.config.every_minutes
        return self.config.every != 0 and minutes is not None and time.monotonic() - self._last_save >= minutes * 60

    def saves_after(self, step: int, *, due: bool, last: bool, stopping: bool) -> bool:
        """Say whether the schedule, the clock, the end or a stop asks for a save."""
        every, keep_every = self.config.every, self.config.keep_every
        if stopping or every == 0:
            return stopping
        scheduled = any(number is not None and step % number == 0 for number in (every, keep_every))
        return due or last or scheduled

    def save(self, step: int, tokens_seen: int, samples_seen: int, *, must_succeed: bool) -> None:
        """Save the state after `step`: in the background if asked so and the run goes on, else at once. Collective.

        A save that fails is warned of and tried again at the next occasion, unless this one must succeed or
        checkpoint.on_failure says to stop: then CheckpointError is raised, on every rank. One that the end of the job
        would cut short is not begun: what it writes in vain, the save before it has whole.
        """
        if not self._ends_in_time(step):
            return
        self.tokens_seen, self.samples_seen = tokens_seen, samples_seen
        progress = {
            "step": step, "tokens_seen": tokens_seen, "samples_seen": samples_seen, "total_steps": self.total_steps,
            **self._identity, "mesh": self.worker.mesh.sizes.describe(), "world_size": self.context.world_size,
            "run": {"name": self.context.run_dir.name, "recipe": self.context.recipe, "attempt": self.context.attempt},
        }  # fmt: skip
        state = self._state(progress, rng.capture(self.context.rank, self.worker.mesh.device))
        self.settle()
        try:
            if self._saver is not None and not must_succeed:
                self._saver.save(step, state)
            else:
                save_checkpoint(self.folder, step, state, self._policy)
        except CheckpointError as error:
            self._bear(error, must_succeed)
        self._last_save = time.monotonic()

    def _ends_in_time(self, step: int) -> bool:
        """Say whether the slowest save seen would end before the job does ($HP_TRAIN_END, seconds since the epoch)."""
        end = float(os.environ.get("HP_TRAIN_END") or 0)
        if not end:
            return True
        left_s, slowest_s = end - time.time(), slowest_save_s(self.folder) if self.context.rank == 0 else 0.0
        ends_in_time = bool(self.worker.mesh.gather([float(left_s > slowest_s)])[0])  # rank 0's word counts for all
        if not ends_in_time and self.context.rank == 0:
            warn(
                f"no save is begun after step {step}: the job ends in {max(left_s, 0):.0f} s, a save has taken "
                f"{slowest_s:.0f} s; the run goes on from its last checkpoint"
            )
        return ends_in_time

    def watch(self) -> None:
        """Warn on rank 0 as soon as a save in the background has failed; `settle` decides what follows from it."""
        if self._saver is None or self.context.rank != 0 or self._has_warned:
            return
        error = self._saver.peek_error()
        if isinstance(error, CheckpointError):
            self._warn(error)
            self._has_warned = True

    def settle(self) -> None:
        """Wait for a save that is still being written; collective, so not for the path of an error."""
        if self._saver is None:
            return
        try:
            self._saver.wait()
        except CheckpointError as error:
            self._bear(error, must_succeed=False)
        self._has_warned = False

    def _bear(self, error: CheckpointError, must_succeed: bool) -> None:
        if must_succeed or self.config.on_failure == "stop":
            raise error
        if self.context.rank == 0 and not self._has_warned:
            self._warn(error)

    def _warn(self, error: CheckpointError) -> None:
        warn(f"{error}; training goes on, and what it does from here on is not saved until a save succeeds")

    def _state(self, progress: dict, states: dict | None = None) -> CheckpointState:
        model = self.worker.model
        return CheckpointState(model.parameters, self.worker.optimizer, model.aliases, progress, states or {})
