"""Validation loss on held-out text: always the same samples, on every mesh."""

from __future__ import annotations

import math

from hp_train.config.schema import TrainerConfig
from hp_train.data.loader import to_micro_batch
from hp_train.training.progress import Progress
from hp_train.training.setup import Worker


class Evaluator:
    """Measures the mean loss over the first `trainer.eval_batches` global batches of the held-out part."""

    def __init__(self, config: TrainerConfig, worker: Worker, progress: Progress) -> None:
        self.worker = worker
        self.progress = progress
        self.reads_data = not config.pp.data_steps or worker.mesh.coordinates.pp == 0
        plan = worker.batch_plan
        # Beyond the last sequence the source gives rows whose targets are all ignored.
        num_batches = -(-worker.val_source.num_sequences // plan.global_batch_size) if worker.val_source else 0
        self.num_batches = min(config.trainer.eval_batches, num_batches)

    def loss(self) -> float:
        """Return nats per valid target token, the same on all ranks."""
        worker = self.worker
        mesh, plan, source = worker.mesh, worker.batch_plan, worker.val_source
        assert source is not None, "evaluation needs held-out data"
        loss_sum, num_tokens = 0.0, 0
        for step in range(self.num_batches):
            samples = plan.samples_of(step, mesh.dp_rank) if self.reads_data else []
            micro_batches = [to_micro_batch(source.batch(chunk), mesh.device) for chunk in samples]
            loss_sum += worker.engine.eval_step(micro_batches).item()
            self.progress.beat()
            num_tokens += sum(batch.num_targets for batch in micro_batches)
        counts_tokens = mesh.coordinates.pp == 0
        losses, tokens = mesh.gather([loss_sum, num_tokens if counts_tokens else 0]).T.tolist()
        return math.fsum(losses) / max(sum(tokens), 1)
