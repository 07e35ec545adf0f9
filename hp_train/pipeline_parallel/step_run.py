"""One run through a rank's program: the values between its steps, and what the default handlers do with them.

Imports torch and siblings. A handler is a function of the run and the step; `DEFAULT_HANDLERS` has one per
MetaStepType. Values wait under (stage, micro-batch) between the step that makes them and the one that uses them; what
crosses ranks waits in an Inbox or goes out through an Outbox.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hp_train.pipeline_parallel.header import layouts_of
from hp_train.pipeline_parallel.mailbox import Inbox, Outbox
from hp_train.pipeline_parallel.microbatch import StageInputs
from hp_train.pipeline_parallel.stage import Grads, Stage
from hp_train.pipeline_parallel.transport import Wires
from hp_train.schedule import MetaStep, MetaStepType
from hp_train.schedule.steps import P2P_TYPES, RECV_TYPES, SEND_TYPES

_T = MetaStepType
Handler = Callable[["StepRun", MetaStep], None]
Place = tuple[int, int]  # stage, micro-batch

TRANSFER_TYPES = P2P_TYPES | {_T.BATCH_SEND_RECV}


@dataclass(frozen=True, slots=True)
class Ends:
    """What the values of a stage come in and go out by; None where a neighbour is on this rank, or there is none."""

    activations_in: Inbox | None = None
    activations_out: Outbox | None = None
    grads_in: Inbox | None = None
    grads_out: Outbox | None = None


@dataclass(slots=True)
class StepRun:
    """The state of one pass over the program, training or evaluation.

    ends: those of each stage on this rank.
    boxes: what each kind of send or receive of a stage goes through, those of data as well.
    source: what comes from outside, by micro-batch; DATA_LOAD steps read it, or all of it is read at the start.
    micro_batches: what has been read so far; empty inputs where other ranks read.
    is_uniform: whether all micro-batches have inputs of the same shapes, so that one header serves the whole pass.
    is_training: whether outputs keep their graphs and gradients come back.
    loss_grad: gradient of each micro-batch's loss, a scalar tensor; None where no loss is made, and in evaluation.
    """

    stages: dict[int, Stage]
    handlers: dict[MetaStepType, Handler]
    wires: Wires
    ends: dict[int, Ends]
    boxes: dict[tuple[MetaStepType, int], Inbox | Outbox]
    source: Sequence[StageInputs | None]
    micro_batches: list[StageInputs]
    is_uniform: bool
    is_training: bool
    loss_grad: Tensor | None
    receives_targets: Inbox | None = None  # on the last stage's rank, if the schedule carries targets
    losses: list[Tensor] = field(default_factory=list)
    to_post: list[Inbox] = field(default_factory=list)  # that may have a receive to post: due, or with a buffer free
    activations: dict[Place, tuple[Any, ...]] = field(default_factory=dict)  # from a stage on this rank
    output_grads: dict[Place, Grads] = field(default_factory=dict)  # from a stage on this rank

    def execute(self, step: MetaStep) -> None:
        """Run one step with whatever handler its type has; receives that are due are posted before it."""
        if self.to_post and step.meta_type not in TRANSFER_TYPES:
            self.post_ahead()
        self.handlers[step.meta_type](self, step)

    def forward(self, stage_index: int, micro_index: int) -> None:
        """Run a stage forward and put its outputs where the next stage, or the loss, finds them."""
        stage, ends, batch = self.stages[stage_index], self.ends[stage_index], self.micro_batches[micro_index]
        is_last = stage_index == stage.num_stages - 1
        if ends.activations_in is not None:
            inputs = _leaves_of(ends.activations_in, micro_index)
        else:
            inputs = self.activations.pop((stage_index, micro_index)) if stage_index else batch.args
        outputs = stage.forward(micro_index, inputs, batch.kwargs, self._targets_of(micro_index) if is_last else None)
        del inputs
        if is_last:
            self._note_loss(outputs)
        elif ends.activations_out is None:
            self.activations[stage_index + 1, micro_index] = tuple(_as_leaf(each) for each in outputs)
        else:
            layouts = layouts_of(outputs, f"stage {stage_index}")
            ends.activations_out.put(micro_index, outputs, layouts)
            if self.is_training:
                ends.grads_in.expect(micro_index, layouts)
                self._may_post_ahead(ends.grads_in)
        if not self.is_training:
            self._release(ends.activations_in, micro_index)

    def backward(self, stage_index: int, micro_index: int) -> None:
        """Run a stage's whole backward and hand the gradients of its inputs on."""
        stage, ends = self.stages[stage_index], self.ends[stage_index]
        arrived = self._grads_of(stage, ends, micro_index)
        self._hand_back(stage_index, ends, micro_index, stage.backward(micro_index, arrived), arrived)
        del arrived
        self._release(ends.activations_in, micro_index)
        self._release(ends.grads_in, micro_index)

    def backward_input(self, stage_index: int, micro_index: int) -> None:
        """Run the half of a stage's backward that the previous stage waits for."""
        stage, ends = self.stages[stage_index], self.ends[stage_index]
        arrived = self._grads_of(stage, ends, micro_index)
        self._hand_back(stage_index, ends, micro_index, stage.backward_input(micro_index, arrived), arrived)

    def backward_weight(self, stage_index: int, micro_index: int) -> None:
        """Run the other half."""
        ends = self.ends[stage_index]
        self.stages[stage_index].backward_weight(micro_index)
        self._release(ends.activations_in, micro_index)
        self._release(ends.grads_in, micro_index)

    def load(self, micro_index: int) -> None:
        """Read a micro-batch from its source, to the device, and leave its targets for the last stage's rank."""
        batch = self.source[micro_index]
        assert batch is not None, f"no inputs for micro-batch {micro_index} on the rank that loads them"
        batch = self.micro_batches[micro_index] = _on_device(batch, self.wires.device)
        outbox = self.boxes.get((_T.DATA_SEND, 0))
        if outbox is not None:
            targets = (batch.targets,)
            outbox.put(micro_index, targets, layouts_of(targets, "stage 0"))

    def send(self, step: MetaStep) -> None:
        """Start a send that stands alone."""
        if self.wires.groups_batches:
            self.transfer((step,))
            return
        outbox = self._send(step)
        if self.to_post:
            self.post_ahead()
        outbox.let_go()

    def receive(self, step: MetaStep) -> None:
        """Start a receive that stands alone."""
        if self.wires.groups_batches:
            self.transfer((step,))
        elif not self._mark_due(step):
            self._receive(step)

    def transfer(self, steps: Sequence[MetaStep]) -> None:
        """Start sends and receives. Receives are waited for where consumed.

        Sends go first, headers and all: a peer may need them before it can announce what this rank is to receive. In
        one group call only host threads wait for headers, before it, so no device transfer can hold one up.
        """
        if self.wires.groups_batches:
            with self.wires.together():
                sending = self._start(steps)
        else:
            sending = self._start(steps)
            if self.to_post:
                self.post_ahead()
        for outbox in sending:
            outbox.let_go()

    def _start(self, steps: Sequence[MetaStep]) -> list[Outbox]:
        sending = [self._send(step) for step in steps if step.meta_type in SEND_TYPES]
        receives = [step for step in steps if step.meta_type in RECV_TYPES]
        for step in [step for step in receives if not self._mark_due(step)]:
            self._receive(step)
        return sending

    def _send(self, step: MetaStep) -> Outbox:
        outbox = self.boxes[step.meta_type, step.stage_index]
        values, layouts = outbox.take_out(step.micro_index)
        if layouts is not None and layouts != outbox.uniform_layouts:
            outbox.announce(layouts, self._announces_all(step), f"stage {step.stage_index}")
        outbox.send(step.micro_index, values)
        return outbox

    def _mark_due(self, step: MetaStep) -> bool:
        """Leave a receive to `post_ahead` where that may come later and knows its layouts; say if that is enough."""
        inbox = self.boxes[step.meta_type, step.stage_index]
        if inbox.is_posted(step.micro_index):
            return True
        if not self.wires.may_post_early or not inbox.knows_next():
            return False
        inbox.mark_due()
        self._may_post_ahead(inbox)
        return True

    def _receive(self, step: MetaStep) -> None:
        """Post a receive at its place in the order, after those that are due: this may wait for a header."""
        inbox = self.boxes[step.meta_type, step.stage_index]
        if inbox.knows_next() or not self.wires.defers_headers:
            self.post_ahead()
            if not inbox.is_posted(step.micro_index):
                inbox.post(step.micro_index)

    def _announces_all(self, send: MetaStep) -> bool:
        """Whether what a stage sends first tells the shapes of all that it will send in this pass."""
        if send.meta_type is _T.DATA_SEND or not self.is_uniform:
            return self.is_uniform
        source = send.stage_index
        while source > 0 and self.ends[source].activations_in is None:
            source -= 1
        return source == 0 or self.ends[source].activations_in.is_uniform

    def _targets_of(self, micro_index: int) -> Any:
        """The loss's targets: received, if the schedule carries them, else from outside."""
        inbox = self.receives_targets
        if inbox is None:
            return self.micro_batches[micro_index].targets
        (targets,) = inbox.take(micro_index)
        targets = targets.clone()  # autograd saves them, while the buffer is for the next micro-batch's
        inbox.release(micro_index)
        return targets

    def _grads_of(self, stage: Stage, ends: Ends, micro_index: int) -> Grads:
        """The gradients of a stage's outputs: of the loss, from a stage on this rank, or received."""
        if ends.grads_in is None:
            is_last = stage.stage_index == stage.num_stages - 1
            return (self.loss_grad,) if is_last else self.output_grads.pop((stage.stage_index, micro_index))
        grads = ends.grads_in.take(micro_index)
        if any([grad is not None for grad in grads]):
            ends.activations_out.note_arrival(micro_index)
        return tuple(grads)

    def _hand_back(self, stage_index: int, ends: Ends, micro_index: int, grads: Grads, arrived: Grads) -> None:
        if stage_index == 0:
            return
        # A gradient may pass through untouched; as a view of its own it keeps the received buffer from being reused.
        grads = tuple([g.detach() if g is not None and any(g is each for each in arrived) else g for g in grads])
        if ends.grads_out is None:
            self.output_grads[stage_index - 1, micro_index] = grads
            return
        if any(grad is None for grad in grads):
            layouts = ends.activations_in.layouts_of(micro_index)
            grads = tuple(
                # The sender of an input that needs a gradient waits for one, even if this stage did not use the input.
                torch.zeros(layout.shape, dtype=layout.dtype, device=self.wires.device)
                if layout.requires_grad and grad is None
                else grad
                for layout, grad in zip(layouts, grads, strict=True)
            )
        ends.grads_out.put(micro_index, grads, None)

    def _note_loss(self, outputs: tuple[Tensor, ...]) -> None:
        loss = outputs[0] if len(outputs) == 1 else None
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError("the last stage must return one scalar, the loss summed over its micro-batch")
        self.losses.append(loss.detach() if loss.ndim == 0 else loss.detach().reshape(()))

    def _release(self, inbox: Inbox | None, micro_index: int) -> None:
        if inbox is not None:
            inbox.release(micro_index)
            self._may_post_ahead(inbox)

    def _may_post_ahead(self, inbox: Inbox) -> None:
        if self.wires.may_post_early and inbox not in self.to_post:
            self.to_post.append(inbox)

    def post_ahead(self) -> None:
        """Post the receives that are due, and those that may come early: after sends that are due, before all else.

        Called before every step that is no transfer and every wait: the proof counts on receives posted in their order.
        """
        for inbox in self.to_post:
            inbox.post_ahead()
        self.to_post.clear()


def _leaves_of(inbox: Inbox, micro_index: int) -> tuple[Tensor, ...]:
    """What a stage gets of a received micro-batch: its buffers as leaves of a graph."""
    buffers = inbox.take(micro_index)
    layouts = inbox.layouts_of(micro_index)
    return tuple(
        [buffer.detach().requires_grad_(layout.requires_grad) for buffer, layout in zip(buffers, layouts, strict=True)]
    )


def _as_leaf(output: Any) -> Any:
    """What a stage on the same rank gets: the tensor without the graph that made it."""
    return output.detach().requires_grad_(output.requires_grad) if isinstance(output, Tensor) else output


def _forward(run: StepRun, step: MetaStep) -> None:
    run.forward(step.stage_index, step.micro_index)
    if step.boundary_p2p:
        run.transfer(step.boundary_p2p)


def _overlap(run: StepRun, step: MetaStep) -> None:
    first, second = step.sub_steps
    run.execute(first)
    if step.boundary_p2p:
        run.transfer(step.boundary_p2p)
    run.execute(second)


def _on_device(batch: StageInputs, device: torch.device) -> StageInputs:
    def move(value: Any) -> Any:
        return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value

    return StageInputs(
        tuple(move(each) for each in batch.args), {name: move(each) for name, each in batch.kwargs.items()},
        move(batch.targets),
    )  # fmt: skip


DEFAULT_HANDLERS: dict[MetaStepType, Handler] = {
    _T.FWD: _forward,
    _T.BWD: lambda run, step: run.backward(step.stage_index, step.micro_index),
    _T.BWD_INPUT: lambda run, step: run.backward_input(step.stage_index, step.micro_index),
    _T.BWD_WEIGHT: lambda run, step: run.backward_weight(step.stage_index, step.micro_index),
    **dict.fromkeys(SEND_TYPES, StepRun.send),
    **dict.fromkeys(RECV_TYPES, StepRun.receive),
    _T.DATA_LOAD: lambda run, step: run.load(step.micro_index),
    _T.BATCH_SEND_RECV: lambda run, step: run.transfer(step.sub_steps),
    _T.OVERLAP_F_B: _overlap,
    _T.OVERLAP_B_F: _overlap,
    _T.FSDP_UNSHARD: lambda run, step: run.stages[step.stage_index].unshard(),
    _T.FSDP_RESHARD: lambda run, step: run.stages[step.stage_index].reshard(),
    _T.FSDP_REDUCE_GRAD: lambda run, step: run.stages[step.stage_index].reduce_grad(),
    _T.SWAP_LAUNCH_OFFLOAD: lambda run, step: (
        run.stages[step.stage_index].swap_space().launch_offload(step.micro_index)
    ),
    _T.SWAP_WAIT_OFFLOAD: lambda run, step: run.stages[step.stage_index].swap_space().wait_offload(step.micro_index),
    _T.SWAP_LAUNCH_LOAD: lambda run, step: run.stages[step.stage_index].swap_space().launch_load(step.micro_index),
    _T.SWAP_WAIT_LOAD: lambda run, step: run.stages[step.stage_index].swap_space().wait_load(step.micro_index),
}
