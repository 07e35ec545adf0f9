"""The training loop: builds the pieces of one worker, then steps until the end, a stop, or a fault.

Every step ends in one exchange (`_agree`): each rank tells its loss, tokens, gradient squares, waiting time, and
whether a signal or the clock asks for something; all ranks then decide alike. Nothing here knows how the model is cut.
"""

from __future__ import annotations

import json
import math
import signal
import socket
import time
from contextlib import closing
from dataclasses import dataclass

import torch

from hp_train.checkpoint.agreement import gather_all
from hp_train.checkpoint.metrics_cut import fill_val_loss, lacks_val_loss
from hp_train.config.schema import TrainerConfig
from hp_train.data.loader import Loader, MicroBatch
from hp_train.errors import ExitCode, NonFiniteError
from hp_train.models.shapes import flops_per_token
from hp_train.parallel.mesh import MeshContext
from hp_train.topology import coordinates_of
from hp_train.training import metrics
from hp_train.training.checkpointing import CheckpointSession
from hp_train.training.device_peaks import peak_flops
from hp_train.training.evaluate import Evaluator
from hp_train.training.grad_norm import clip_factor, owned_square_sum, scale_gradients
from hp_train.training.health import check_health
from hp_train.training.lr_schedule import learning_rate
from hp_train.training.metrics import MetricsRow, MetricsWriter
from hp_train.training.profile import StepProfiler
from hp_train.training.row_file import say
from hp_train.training.run_context import Phase, RunContext, TrainOutcome
from hp_train.training.setup import Worker, build_worker
from hp_train.training.source_tally import SourceTally
from hp_train.training.step import PipelineEngine
from hp_train.training.stragglers import ComputeClock, StragglerWatch


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks know alike after the exchange of one step."""

    loss_sum: float
    num_tokens: int
    grad_norm: float  # of the mean loss over the step's valid tokens
    data_wait_s: float
    peak_memory_bytes: int
    stop_signal: int  # 0, or the signal that some rank received
    save_is_due: bool
    bad_dp_ranks: tuple[int, ...]  # data-parallel ranks whose loss is not finite
    compute_s: tuple[float, ...]  # what each rank computed in this step
    by_source: tuple[tuple[float, ...], ...]  # see `source_tally`

    @property
    def loss(self) -> float:
        """Return the mean loss over the step's valid tokens; 0 when there is none."""
        return self.loss_sum / self.num_tokens if self.num_tokens else 0.0


def train(config: TrainerConfig, context: RunContext) -> TrainOutcome:
    """Train as `config` says; returns after the last step or a stop that was asked for.

    Raises NonFiniteError on every rank, before the optimizer step, when the loss or gradient norm is not finite.
    """
    context.progress.phase = Phase.BUILD
    worker = build_worker(config, context)
    return Trainer(config, context, worker).run()


class Trainer:
    """State of the loop on one rank."""

    def __init__(self, config: TrainerConfig, context: RunContext, worker: Worker) -> None:
        self.config = config
        self.context = context
        self.worker = worker
        self.mesh: MeshContext = worker.mesh
        self.is_reporter = context.rank == 0
        self.peak_flops = peak_flops(metrics.device_name(self.mesh.device)) if worker.precision == "bf16" else None
        self.profiler = StepProfiler(
            config.metrics.profile_steps,
            context.run_dir / "profile",
            context.rank,
            self.mesh.device,
            records=self.mesh.dp_rank == 0,
        )
        self.tokens_seen = 0
        self.source_tally = SourceTally(list(config.data.mix), worker)
        self.compute_clock = ComputeClock(self.mesh.device)
        self.stragglers = StragglerWatch([""], [0])
        self.sample_shift = 0  # by which samples are ahead of what steps of the present size would have read

    def run(self) -> TrainOutcome:
        """Go from the last checkpoint, or the start, to the end."""
        progress = self.context.progress
        progress.describe_pipeline = self.worker.engine.standing
        progress.phase = Phase.LOAD
        checkpoints = CheckpointSession(self.config, self.context, self.worker)
        done = checkpoints.restore()
        self.tokens_seen = checkpoints.tokens_seen
        self.total_steps = checkpoints.total_steps
        self.sample_shift = checkpoints.samples_seen - done * self.worker.batch_plan.global_batch_size
        evaluator = Evaluator(self.config, self.worker, progress)
        made_up = self._make_up_evaluation(done, evaluator, checkpoints)
        self._meet_peers()
        if self.is_reporter:
            self._describe_attempt(done, checkpoints)
        writer = MetricsWriter(self.context.run_dir, self.config) if self.is_reporter else None
        if writer is not None and made_up is not None:
            writer.show_made_up(done, made_up)
        max_steps = self.config.trainer.max_steps
        loader = Loader(self.worker.train_source, self._samples_of, self.mesh.device, done, max_steps)
        stop_signal = 0
        with closing(loader):
            while done < max_steps and not stop_signal:
                progress.step, progress.phase = done + 1, Phase.DATA
                _, micro_batches, wait_s = next(loader)
                started = time.perf_counter()
                with self.profiler.around(done + 1):
                    agreement = self._optimizer_step(done + 1, micro_batches, wait_s, checkpoints)
                step_time_s = time.perf_counter() - started + wait_s
                done += 1
                stop_signal = agreement.stop_signal
                progress.phase = Phase.EVALUATE
                is_last = done == max_steps
                # Who asks to stop may not wait: a run that goes on makes up for what is left out here.
                evaluates = self._evaluation_is_due(done) and (is_last or not stop_signal)
                val_loss = evaluator.loss() if evaluates else None
                checkpoints.watch()
                if writer is not None:
                    checkpoints.fence.check()
                    writer.write(self._row(done, agreement, val_loss, step_time_s))
                progress.phase = Phase.SAVE
                if checkpoints.saves_after(done, due=agreement.save_is_due, last=is_last, stopping=bool(stop_signal)):
                    if writer is not None:
                        writer.sync()
                    samples_seen = done * self.worker.batch_plan.global_batch_size + self.sample_shift
                    checkpoints.save(done, self.tokens_seen, samples_seen, must_succeed=is_last or bool(stop_signal))
        progress.phase = Phase.FINISH
        checkpoints.settle()
        self.worker.engine.close()
        if writer is not None:
            writer.close()
        return TrainOutcome(_exit_code(stop_signal, done == max_steps), done)

    def _meet_peers(self) -> None:
        """Learn who the other ranks are, and measure them if asked so."""
        hosts = gather_all(socket.gethostname())
        sizes, launcher = self.mesh.sizes, self.config.launcher
        stages = [coordinates_of(rank, sizes).pp for rank in range(sizes.world_size)]
        self.stragglers = StragglerWatch(hosts, stages)
        asked = launcher.health_check
        if asked is False or (asked == "auto" and len(set(hosts)) == 1):
            return
        device = self.mesh.device
        figures, slow = check_health(device, metrics.device_name(device), self.context.local_rank)
        if self.is_reporter:
            (self.context.attempt_dir / "health.json").write_text(json.dumps(figures, indent=2) + "\n")
            for line in slow:
                say(f"slow: {line}")

    def _samples_of(self, step: int) -> list[list[int]]:
        if self.config.pp.data_steps and self.mesh.coordinates.pp > 0:
            return []  # the schedule's data steps bring this rank what it needs
        return self._samples_on(step, self.mesh.dp_rank)

    def _samples_on(self, step: int, dp_rank: int) -> list[list[int]]:
        """Return the global sample indices of `step` (counted from 0) of one data-parallel rank, by micro-batch."""
        shift = self.sample_shift
        return [[sample + shift for sample in chunk] for chunk in self.worker.batch_plan.samples_of(step, dp_rank)]

    def _make_up_evaluation(self, step: int, evaluator: Evaluator, checkpoints: CheckpointSession) -> float | None:
        """Return the loss after `step`, that of the checkpoint, if its attempt was stopped before it could evaluate."""
        if step == 0 or not self._evaluation_is_due(step):
            return None
        lacks = self.is_reporter and lacks_val_loss(self.context.run_dir, step)
        if not self.mesh.gather([float(lacks)]).any():
            return None
        self.context.progress.phase = Phase.EVALUATE
        val_loss = evaluator.loss()
        if self.is_reporter:
            checkpoints.fence.check()
            fill_val_loss(self.context.run_dir, step, val_loss)
        return val_loss

    def _optimizer_step(
        self, step: int, micro_batches: list[MicroBatch], wait_s: float, checkpoints: CheckpointSession
    ) -> Agreement:
        """Run forward, backward, the exchange and the update of `step` (counted from 1)."""
        progress, plan, optimizer = self.context.progress, self.worker.batch_plan, self.worker.optimizer
        progress.phase = Phase.STEP
        optimizer.zero_grad(set_to_none=True)
        # Gradients come divided by the tokens of a full batch; padding is put right below, when the count is known.
        traces = step in self.config.pp.trace_steps and isinstance(self.worker.engine, PipelineEngine)
        if traces:
            self.worker.engine.record_next_step()
        self.compute_clock.start()
        loss_sum = self.worker.engine.train_step(micro_batches, plan.tokens_per_step)
        self.source_tally.take(self._samples_on(step - 1, self.mesh.dp_rank))
        self.worker.model.sync_tied_gradients()
        agreement = self._agree(loss_sum, micro_batches, wait_s, checkpoints)
        if traces:
            self._write_trace(step)
        progress.phase = Phase.OPTIMIZER
        if not (math.isfinite(agreement.loss_sum) and math.isfinite(agreement.grad_norm)):
            raise NonFiniteError(self._divergence(step, agreement))
        correction = plan.tokens_per_step / max(agreement.num_tokens, 1)
        clip = clip_factor(agreement.grad_norm, self.config.trainer.max_grad_norm)
        scale_gradients(self.worker.model.parameters.values(), correction * clip)
        lr = self._learning_rate(step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        self.tokens_seen += agreement.num_tokens
        return agreement

    def _write_trace(self, step: int) -> None:
        """Write the timeline of `step`; the pipelines of other data-parallel ranks measure alike and keep silent."""
        folder = self.context.run_dir / "traces"
        text = self.worker.engine.write_trace(folder / f"dp_{self.mesh.dp_rank}", step)
        if text and self.mesh.dp_rank == 0:
            print(text, flush=True)

    def _learning_rate(self, step: int) -> float:
        return learning_rate(step, self.config.lr_scheduler, self.config.optimizer.lr, self.total_steps)

    def _agree(
        self, loss_sum: torch.Tensor, micro_batches: list[MicroBatch], wait_s: float, checkpoints: CheckpointSession
    ) -> Agreement:
        """Exchange one row a rank and reduce the rows in rank order, so that all ranks hold the same bits."""
        model = self.worker.model
        squares = owned_square_sum(model.parameters, self.mesh.coordinates, model.not_owned)
        counts_tokens = self.mesh.coordinates.pp == 0
        num_tokens = sum(batch.num_targets for batch in micro_batches) if counts_tokens else 0
        rows = self.mesh.gather([
            loss_sum.item(), num_tokens, squares.item(), wait_s, metrics.peak_memory_bytes(self.mesh.device),
            self.context.stop.signal_number, checkpoints.is_due() if self.is_reporter else 0.0, self.mesh.dp_rank,
            self.compute_clock.stop(), *self.source_tally.sums(),
        ])  # fmt: skip
        losses, tokens, squares_of_ranks, waits, peaks, signals, saves, dp_ranks, computes, *by_source = rows.T.tolist()
        if self.is_reporter:
            for line in self.stragglers.add(computes):
                say(line)
        num_tokens = int(sum(tokens))
        scale = self.worker.batch_plan.tokens_per_step / max(num_tokens, 1)
        bad = {int(dp_rank) for loss, dp_rank in zip(losses, dp_ranks, strict=True) if not math.isfinite(loss)}
        return Agreement(
            loss_sum=math.fsum(losses) if not bad else math.nan,
            num_tokens=num_tokens,
            grad_norm=math.sqrt(sum(squares_of_ranks)) * scale,
            data_wait_s=max(waits),
            peak_memory_bytes=int(max(peaks)),
            stop_signal=int(max(signals)),
            save_is_due=any(saves),
            bad_dp_ranks=tuple(sorted(bad)),
            compute_s=tuple(computes),
            by_source=tuple(map(tuple, by_source)),
        )

    def _divergence(self, step: int, agreement: Agreement) -> str:
        """Return the one line that names the step and the samples in question."""
        first = self._samples_on(step - 1, 0)[0][0]
        if not agreement.bad_dp_ranks:
            last = first + self.worker.batch_plan.global_batch_size - 1
            return (
                f"gradient norm is {agreement.grad_norm} at step {step} (samples {first} to {last}), "
                f"loss {agreement.loss:.4f}; stopped before the optimizer step"
            )
        spans = []
        for dp_rank in agreement.bad_dp_ranks:
            samples = self._samples_on(step - 1, dp_rank)
            spans.append(f"{samples[0][0]} to {samples[-1][-1]}")
        return f"loss is not finite at step {step}, samples {', '.join(spans)}; stopped before the optimizer step"

    def _evaluation_is_due(self, step: int) -> bool:
        every = self.config.trainer.eval_every
        return every > 0 and (step % every == 0 or step == self.config.trainer.max_steps)

    def _row(self, step: int, agreement: Agreement, val_loss: float | None, step_time_s: float) -> MetricsRow:
        config = self.config
        per_second = agreement.num_tokens / step_time_s
        per_device = per_second / self.mesh.sizes.world_size
        mfu = None
        if self.peak_flops is not None:
            mfu = per_device * flops_per_token(config.model, config.trainer.seq_len) / self.peak_flops
        source_loss, source_tokens = self.source_tally.figures(agreement.by_source)
        return MetricsRow(
            step=step,
            loss=agreement.loss,
            val_loss=val_loss,
            grad_norm=agreement.grad_norm,
            lr=self._learning_rate(step),
            tokens=agreement.num_tokens,
            tokens_per_second=per_second,
            tokens_per_second_per_gpu=per_device,
            step_time_s=step_time_s,
            data_wait_s=agreement.data_wait_s,
            mfu=mfu,
            peak_memory_bytes=agreement.peak_memory_bytes,
            attempt=self.context.attempt,
            compute_min_s=min(agreement.compute_s),
            compute_max_s=max(agreement.compute_s),
            slowest_rank=agreement.compute_s.index(max(agreement.compute_s)),
            source_loss=source_loss,
            source_tokens=source_tokens,
        )

    def _describe_attempt(self, done: int, checkpoints: CheckpointSession) -> None:
        """Write what the views and the summary need to know of this attempt."""
        facts = {
            "device": self.mesh.device.type,
            "device_name": metrics.device_name(self.mesh.device),
            "device_memory_bytes": metrics.device_memory_bytes(self.mesh.device),
            "world_size": self.mesh.sizes.world_size,
            "mesh": self.mesh.sizes.describe(),
            "precision": self.worker.precision,
            "peak_flops": self.peak_flops,
            "num_parameters": self.worker.num_parameters,
            "first_step": done + 1,
            "max_steps": self.config.trainer.max_steps,
            "tokens_per_step": self.worker.batch_plan.tokens_per_step,
            "resumed_from": checkpoints.resumed_from,
        }
        self.context.attempt_dir.mkdir(parents=True, exist_ok=True)
        path = self.context.attempt_dir / "attempt.json"
        beside = path.with_suffix(".tmp")
        beside.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        beside.rename(path)


def _exit_code(stop_signal: int, finished: bool) -> ExitCode:
    if finished or not stop_signal:
        return ExitCode.DONE
    return ExitCode.INTERRUPTED if stop_signal == signal.SIGINT else ExitCode.REQUEUE
