"""The interpreter: runs one rank's part of a proven schedule, step by step.

Imports torch, the schedule and siblings. The program is the rank's row of the lowered schedule, one handler call per
step, and every handler can be replaced. Evaluation runs the forward half of the same program: whatever a proof says
about a schedule holds for it without the backward steps and their transfers, which go in pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hp_train.errors import ScheduleError
from hp_train.pipeline_parallel.mailbox import Inbox, Outbox, RecvInfo
from hp_train.pipeline_parallel.microbatch import StageInputs
from hp_train.pipeline_parallel.sentinel import PipelineError, PipelineHang, Sentinel, Standing
from hp_train.pipeline_parallel.stage import Stage
from hp_train.pipeline_parallel.step_run import DEFAULT_HANDLERS, Ends, Handler, StepRun
from hp_train.pipeline_parallel.trace import Recorder, join_timelines
from hp_train.pipeline_parallel.transport import Edge, Traffic, Wires, edges_of
from hp_train.schedule import MetaStep, MetaStepType, Schedule, Span, Timeline, schedule_hash, verify
from hp_train.schedule.steps import FSDP_TYPES, OVERLAP_TYPES, P2P_TYPES, RECV_TYPES

_T = MetaStepType
_FORWARD_TYPES = frozenset({_T.FWD, _T.FWD_SEND, _T.FWD_RECV, _T.DATA_LOAD, _T.DATA_SEND, _T.DATA_RECV})


class _Kinds(NamedTuple):
    send: MetaStepType
    receive: MetaStepType


_KINDS = {
    Traffic.FORWARD: _Kinds(_T.FWD_SEND, _T.FWD_RECV),
    Traffic.BACKWARD: _Kinds(_T.BWD_SEND, _T.BWD_RECV),
    Traffic.DATA: _Kinds(_T.DATA_SEND, _T.DATA_RECV),
}


@dataclass(frozen=True, slots=True)
class _Program:
    """What one rank does in a pass: its steps, and per kind and stage the micro-batches that it receives, in order."""

    steps: tuple[MetaStep, ...]
    receives: dict[tuple[MetaStepType, int], tuple[int, ...]]


class PipelineRuntime:
    """Runs the stages of one rank through a schedule.

    stages: this rank's stages, those that `schedule.rank_of_stage` places on it.
    schedule: lowered for `transport`; the proof is run again here and an unproven schedule is refused.
    group: process group of the pipeline's ranks, in order of their pipeline rank.
    timeout_s: how long a transfer may take before the run is ended as hung.
    config_digest: hash of whatever else must agree on all ranks; compared with that of the schedule.

    All ranks of the pipeline construct their runtime together. Raises ScheduleError if the proof fails, ConfigError if
    ranks come with different schedules.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: Schedule,
        transport: str,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        timeout_s: float = 600.0,
        config_digest: str = "",
    ) -> None:
        self.schedule, self.transport, self.device = schedule, transport, device
        self.pp_rank = dist.get_rank(group)
        self.verification = verify(schedule, transport)
        if not self.verification.ok:
            raise ScheduleError(*self.verification.violations)
        self._stages = {stage.stage_index: stage for stage in stages}
        placed = schedule.stages_of_rank(self.pp_rank)
        assert sorted(self._stages) == list(placed), f"rank {self.pp_rank} holds stages {placed}, not {[*self._stages]}"
        self._handlers: dict[MetaStepType, Handler] = dict(DEFAULT_HANDLERS)
        self._programs: dict[tuple[bool, int], _Program] = {}
        self._loads = schedule.has_any(frozenset({_T.DATA_LOAD})) and 0 in self._stages
        self._reduces_by_schedule = schedule.has_any(FSDP_TYPES)
        self._carries_targets = schedule.has_any(frozenset({_T.DATA_RECV}))
        self._swapped = _swapped_micro_batches(schedule.orders[self.pp_rank])
        global_ranks = dist.get_process_group_ranks(group)
        self._global_rank = global_ranks[self.pp_rank]
        self._position, self._step = -1, "start"
        self._recorder: Recorder | None = None
        self._records_next, self._num_recorded = False, 0
        self._spans: list[Span] = []
        self._wires: Wires | None = None
        self._sentinel = Sentinel(global_ranks, self.pp_rank, self._standing, self._abort_transfers)
        self._sentinel.compare(sha256((schedule_hash(schedule, transport) + config_digest).encode()).hexdigest())
        edges = edges_of(schedule)
        self._wires = Wires(transport, edges, global_ranks, self.pp_rank, device, timeout_s, self._sentinel.store)
        self._inboxes = {
            (_KINDS[edge.traffic].receive, edge.target_stage): Inbox(edge, self._wires, device, self._most_in_use(edge))
            for edge in edges
            if edge.target_rank == self.pp_rank
        }
        self._outboxes = {
            (_KINDS[edge.traffic].send, edge.source_stage): Outbox(
                edge,
                self._wires,
                # Whoever reads targets keeps them for the whole pass anyway.
                limits_open_sends=transport != "multi_stream" and edge.traffic is not Traffic.DATA,
            )
            for edge in edges
            if edge.source_rank == self.pp_rank
        }
        self._boxes = {**self._inboxes, **self._outboxes}
        kinds = (_T.FWD_RECV, _T.FWD_SEND, _T.BWD_RECV, _T.BWD_SEND)
        self._ends = {stage: Ends(*(self._boxes.get((kind, stage)) for kind in kinds)) for stage in self._stages}

    def register(self, step_type: MetaStepType, handler: Handler) -> None:
        """Run steps of this type with `handler(run, step)` from now on."""
        assert isinstance(step_type, MetaStepType), f"{step_type!r} is no MetaStepType"
        self._handlers[step_type] = handler

    def recv_infos(self, traffic: Traffic, stage_index: int) -> tuple[RecvInfo, ...]:
        """What the latest receive of a stage was set up with, per tensor; empty before the first."""
        return self._inboxes[_KINDS[traffic].receive, stage_index].infos

    def num_recv_buffers(self) -> dict[tuple[Traffic, int], int]:
        """Between steps: per receiving edge (traffic, stage), how many buffer tensors its pool has come to hold."""
        return {(inbox.edge.traffic, stage): inbox.pool.num_free for (_, stage), inbox in self._inboxes.items()}

    def step(self, micro_batches: Sequence[StageInputs | None], loss_scale: float | Tensor = 1.0) -> Tensor | None:
        """Run one training step: accumulate the gradients of `loss_scale` times the summed loss.

        micro_batches: at most as many as the schedule has; fewer run its shortened form. Under a schedule with DATA
            steps only the rank of the first stage needs the inputs, and reads each when its DATA_LOAD comes; others
            give None.
        Returns the loss sum (float64 scalar, detached) on the rank of the last stage, None elsewhere.
        Raises what a stage raises; PipelineError with the first cause on all other ranks; PipelineHang after a timeout.
        """
        grad = None
        if self.schedule.num_stages - 1 in self._stages:
            grad = torch.as_tensor(loss_scale, dtype=torch.float32, device=self.device)
        for stage in self._stages.values():
            stage.begin_step(self._swapped.get(stage.stage_index, frozenset()))
        self._recorder = Recorder(self.pp_rank, self.device) if self._records_next else None
        losses = self._run(micro_batches, True, grad)
        if self._recorder is not None:
            self._spans, self._recorder, self._records_next = self._recorder.finish(), None, False
        if not self._reduces_by_schedule:
            for stage in self._stages.values():
                stage.reduce_grad()
                stage.reshard()
        return self._sum(losses)

    def evaluate(self, micro_batches: Sequence[StageInputs | None]) -> Tensor | None:
        """Return the loss sum over any number of micro-batches, without gradients; None where another rank makes it."""
        losses: list[Tensor] = []
        size = self.schedule.num_microbatches
        with torch.no_grad():
            for start in range(0, len(micro_batches), size):
                losses += self._run(micro_batches[start : start + size], False)
        for stage in self._stages.values():
            stage.reshard()
        return self._sum(losses)

    def record_next_step(self) -> None:
        """Measure the next training step; every rank of the pipeline asks for the same one."""
        self._records_next = True

    def recorded_timeline(self) -> Timeline:
        """The measured timeline of the step that was recorded, of all ranks; every rank calls it."""
        assert self._recorder is None and self._spans, "no step has been recorded"
        self._num_recorded += 1
        spans, self._spans = self._spans, []
        store, size = self._sentinel.store, self.schedule.pp_size
        return join_timelines(spans, store, self.pp_rank, size, f"timeline_{self._num_recorded}")

    def standing(self) -> str:
        """Where this rank is in the schedule, and what it waits for; may be asked from another thread."""
        return str(self._standing())

    def close(self) -> None:
        """Let go of groups and the watching thread. The runtime is of no more use."""
        self._sentinel.close()
        self._wires.close()

    def _run(self, source: Sequence[StageInputs | None], is_training: bool, grad: Tensor | None = None) -> list[Tensor]:
        program = self._program(is_training, len(source))
        if self._loads:
            micro_batches = [_NOTHING] * len(source)
        else:
            micro_batches = [each if each is not None else _NOTHING for each in source]
        # A source that is read as the schedule goes can't be looked at beforehand: then every micro-batch has a header.
        is_uniform = isinstance(source, (list, tuple)) and _have_same_shapes(source)
        run = StepRun(
            self._stages, self._handlers, self._wires, self._ends, self._boxes, source, micro_batches, is_uniform,
            is_training, grad,
            self._boxes.get((_T.DATA_RECV, self.schedule.num_stages - 1)) if self._carries_targets else None,
        )  # fmt: skip
        try:
            self._begin(program.receives)
            self._interpret(program.steps, run)
            for outbox in self._outboxes.values():
                outbox.finish()
            self._wires.drain(lambda: self._sentinel.failure is not None)
        except Exception as error:
            self._fail(error)
        return run.losses

    def _interpret(self, program: Sequence[MetaStep], run: StepRun) -> None:
        sentinel, recorder = self._sentinel, self._recorder
        for position, step in enumerate(program):
            self._position, self._step = position, step
            if sentinel.failure is not None:
                raise RuntimeError("another rank of the pipeline has failed")
            if recorder is None:
                run.execute(step)
            else:
                recorder.measure(step, partial(run.execute, step), lambda: self._wires.waited_s)

    def _begin(self, receives: dict[tuple[MetaStepType, int], tuple[int, ...]]) -> None:
        for key, inbox in self._inboxes.items():
            inbox.begin_step(receives.get(key, ()))
        for outbox in self._outboxes.values():
            outbox.begin_step()

    def _program(self, is_training: bool, num_microbatches: int) -> _Program:
        """This rank's steps for so many micro-batches."""
        most = self.schedule.num_microbatches
        assert 0 < num_microbatches <= most, f"{num_microbatches} micro-batches; the schedule has {most}"
        key = (is_training, num_microbatches)
        if key not in self._programs:
            order = self.schedule.orders[self.pp_rank]
            steps = [part for step in order for part in _shortened(step, is_training, num_microbatches)]
            receives: dict[tuple[MetaStepType, int], list[int]] = {}
            for step in steps:
                for each in step.transfers:
                    if each.meta_type in RECV_TYPES:
                        receives.setdefault((each.meta_type, each.stage_index), []).append(each.micro_index)
            self._programs[key] = _Program(tuple(steps), {box: tuple(micros) for box, micros in receives.items()})
        return self._programs[key]

    def _sum(self, losses: list[Tensor]) -> Tensor | None:
        return torch.stack(losses).double().sum() if losses else None

    def _standing(self) -> Standing:
        waiting = self._wires.waiting if self._wires is not None else None
        standing = Standing(self.pp_rank, self._global_rank, self._position, str(self._step), self.transport)
        if waiting is None:
            return standing
        edge, micro_index = waiting
        peer = edge.target_rank if edge.source_rank == self.pp_rank else edge.source_rank
        return replace(standing, edge=str(edge), micro_index=micro_index, peer_pp_rank=peer)

    def _fail(self, error: Exception) -> None:
        """Post the error unless it only echoes another rank's, free the peers, and raise the first cause."""
        place = f"pipeline rank {self.pp_rank} (process {self._global_rank}), step {self._position} {self._step}"
        try:
            first = self._first_cause(error, place)
            self._sentinel.tell_standing()
            report = self._sentinel.explain_hang() if first["kind"] == "hang" else None
        except dist.DistError as lost:
            # Whoever hosts the board is gone, and with it what other ranks may have written there.
            self._abandon()
            error.add_note(f"raised on {place}; where the ranks post their causes can't be reached: {lost}")
            raise error from None
        self._abandon()
        if report is not None:
            raise PipelineHang(f"a pipeline transfer did not end in time\n{report}") from None
        if first["kind"] == "lost" or first["pp_rank"] != self.pp_rank:
            raise PipelineError(first["cause"]) from None
        error.add_note(f"raised on {place}")
        raise error

    def _first_cause(self, error: Exception, place: str) -> dict:
        """What the board says went wrong first; this rank's own error, if nothing stands there."""
        is_echo = self._wires.waiting is not None or self._sentinel.failure is not None
        hung = is_echo and "imed out" in str(error)
        first = self._sentinel.look(patience_s=3.0 if is_echo and not hung else 0.0)
        if first is not None:
            return first
        if hung:
            self._sentinel.post("hang", f"{place}: {error}")
        elif is_echo:
            self._sentinel.post(
                "lost",
                f"{self._standing()}; the connection broke and that rank has not said why, so its process has probably "
                f"been killed: {error}",
            )
        else:
            self._sentinel.post("error", f"{place}: {type(error).__name__}: {error}")
        return self._sentinel.failure

    def _most_in_use(self, edge: Edge) -> int:
        """For how many micro-batches an edge's receive buffers are in use at once, as proven."""
        buffers = self.verification.stage_buffers[edge.target_stage]
        return {Traffic.FORWARD: buffers.fwd, Traffic.BACKWARD: buffers.bwd, Traffic.DATA: 1}[edge.traffic]

    def _abort_transfers(self) -> None:
        if self._wires is not None:
            self._wires.abort()

    def _abandon(self) -> None:
        self._abort_transfers()
        for box in self._boxes.values():
            box.abandon()
        for stage in self._stages.values():
            stage.recover()
        self._sentinel.close()
        self._wires.close()


_NOTHING = StageInputs()


def _swapped_micro_batches(order: Sequence[MetaStep]) -> dict[int, frozenset[int]]:
    """Per stage, the micro-batches whose activations leave the device."""
    swapped: dict[int, set[int]] = {}
    for step in order:
        if step.meta_type is _T.SWAP_LAUNCH_OFFLOAD:
            swapped.setdefault(step.stage_index, set()).add(step.micro_index)
    return {stage: frozenset(micros) for stage, micros in swapped.items()}


def _shortened(step: MetaStep, is_training: bool, num_microbatches: int) -> list[MetaStep]:
    """What is left of a step when later micro-batches, or all of backward, are left out."""

    def remains(each: MetaStep) -> bool:
        if each.micro_index is None:
            return is_training
        return each.micro_index < num_microbatches and (is_training or each.meta_type in _FORWARD_TYPES)

    if step.meta_type in P2P_TYPES:
        return [step] if remains(step) else []
    transfers = tuple(each for each in step.transfers if remains(each))
    batch = [MetaStep(None, _T.BATCH_SEND_RECV, None, transfers)] if transfers else []
    if step.meta_type is _T.BATCH_SEND_RECV:
        return batch
    if step.meta_type not in OVERLAP_TYPES:
        return [replace(step, boundary_p2p=transfers or None)] if remains(step) else batch
    first, second = ([part] if remains(part) else [] for part in step.sub_steps)
    if first and second:
        return [replace(step, boundary_p2p=transfers or None)]
    return [*first, *batch, *second]


def _have_same_shapes(micro_batches: Sequence[StageInputs | None]) -> bool:
    """Whether all inputs from outside agree in shape and type from micro-batch to micro-batch."""
    shapes = [
        _shapes_of((batch.args, dict(batch.kwargs), batch.targets)) for batch in micro_batches if batch is not None
    ]
    return all(each == shapes[0] for each in shapes[1:])


def _shapes_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.shape, value.dtype)
    if isinstance(value, (tuple, list)):
        return [_shapes_of(each) for each in value]
    if isinstance(value, dict):
        return {key: _shapes_of(each) for key, each in value.items()}
    return None
