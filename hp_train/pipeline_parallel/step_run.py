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

from hp_train.pipeline_parallel.header import TensorLayout, layouts_of
from hp_train.pipeline_parallel.mailbox import Inbox, Outbox
from hp_train.pipeline_parallel.microbatch import StageInputs
from hp_train.pipeline_parallel.stage import Grads, Stage
from hp_train.pipeline_parallel.transport import Traffic, Wires
from hp_train.schedule import MetaStep, MetaStepType
from hp_train.schedule.steps import P2P_TYPES, RECV_TYPES, SEND_TYPES

_T = MetaStepType
Handler = Callable[["StepRun", MetaStep], None]
Place = tuple[int, int]  # stage, micro-batch
Outgoing = tuple[Sequence[Tensor | None], tuple[TensorLayout, ...] | None]
"""What a send step finds: values, and the layouts that the receiver must know; None for gradients, whose it knows."""

TRANSFER_TYPES = P2P_TYPES | {_T.BATCH_SEND_RECV}
TRAFFIC_OF = {
    _T.FWD_SEND: Traffic.FORWARD, _T.FWD_RECV: Traffic.FORWARD, _T.BWD_SEND: Traffic.BACKWARD,
    _T.BWD_RECV: Traffic.BACKWARD, _T.DATA_SEND: Traffic.DATA, _T.DATA_RECV: Traffic.DATA,
}  # fmt: skip


@dataclass(slots=True)
class StepRun:
    """The state of one pass over the program, training or evaluation.

    source: what comes from outside, by micro-batch; DATA_LOAD steps read it, or all of it is read at the start.
    micro_batches: what has been read so far; empty inputs where other ranks read.
    is_uniform: whether all micro-batches have inputs of the same shapes, so that one header serves the whole pass.
    is_training: whether outputs keep their graphs and gradients come back.
    loss_grad: gradient of each micro-batch's loss, a scalar tensor; None where no loss is made, and in evaluation.
    """

    stages: dict[int, Stage]
    handlers: dict[MetaStepType, Handler]
    wires: Wires
    inboxes: dict[tuple[Traffic, int], Inbox]
    outboxes: dict[tuple[Traffic, int], Outbox]
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
    outgoing: dict[tuple[Traffic, int, int], Outgoing] = field(default_factory=dict)

    def execute(self, step: MetaStep) -> None:
        """Run one step with whatever handler its type has; receives that are due are posted before it."""
        if self.to_post and step.meta_type not in TRANSFER_TYPES:
            self.post_ahead()
        self.handlers[step.meta_type](self, step)

    def forward(self, stage_index: int, micro_index: int) -> None:
        """Run a stage forward and put its outputs where the next stage, or the loss, finds them."""
        stage, batch = self.stages[stage_index], self.micro_batches[micro_index]
        inputs = self._inputs_of(stage_index, micro_index, batch)
        is_last = stage_index == stage.num_stages - 1
        outputs = stage.forward(micro_index, inputs, batch.kwargs, self._targets_of(micro_index) if is_last else None)
        del inputs
        if is_last:
            self._note_loss(outputs)
        elif stage_index + 1 in self.stages:
            self.activations[stage_index + 1, micro_index] = tuple(_as_leaf(each) for each in outputs)
        else:
            layouts = layouts_of(outputs, f"stage {stage_index}")
            self.outgoing[Traffic.FORWARD, stage_index, micro_index] = outputs, layouts
            if self.is_training:
                inbox = self.inboxes[Traffic.BACKWARD, stage_index]
                inbox.expect(micro_index, layouts)
                self._may_post_ahead(inbox)
        if not self.is_training:
            self._release(stage_index, micro_index, Traffic.FORWARD)

    def backward(self, stage_index: int, micro_index: int) -> None:
        """Run a stage's whole backward and hand the gradients of its inputs on."""
        arrived = self._grads_of(stage_index, micro_index)
        self._hand_back(stage_index, micro_index, self.stages[stage_index].backward(micro_index, arrived), arrived)
        del arrived
        self._release(stage_index, micro_index, Traffic.FORWARD, Traffic.BACKWARD)

    def backward_input(self, stage_index: int, micro_index: int) -> None:
        """Run the half of a stage's backward that the previous stage waits for."""
        arrived = self._grads_of(stage_index, micro_index)
        self._hand_back(
            stage_index, micro_index, self.stages[stage_index].backward_input(micro_index, arrived), arrived
        )

    def backward_weight(self, stage_index: int, micro_index: int) -> None:
        """Run the other half."""
        self.stages[stage_index].backward_weight(micro_index)
        self._release(stage_index, micro_index, Traffic.FORWARD, Traffic.BACKWARD)

    def load(self, micro_index: int) -> None:
        """Read a micro-batch from its source, to the device, and leave its targets for the last stage's rank."""
        batch = self.source[micro_index]
        assert batch is not None, f"no inputs for micro-batch {micro_index} on the rank that loads them"
        batch = self.micro_batches[micro_index] = _on_device(batch, self.wires.device)
        if (Traffic.DATA, 0) in self.outboxes:
            targets = (batch.targets,)
            self.outgoing[Traffic.DATA, 0, micro_index] = targets, layouts_of(targets, "stage 0")

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
        traffic, stage_index, micro_index = TRAFFIC_OF[step.meta_type], step.stage_index, step.micro_index
        outbox = self.outboxes[traffic, stage_index]
        values, layouts = self.outgoing.pop((traffic, stage_index, micro_index))
        if layouts is not None and layouts != outbox.uniform_layouts:
            outbox.announce(layouts, self._announces_all(traffic, stage_index), f"stage {stage_index}")
        outbox.send(micro_index, values)
        return outbox

    def _mark_due(self, step: MetaStep) -> bool:
        """Leave a receive to `post_ahead` where that may come later and knows its layouts; say if that is enough."""
        inbox = self.inboxes[TRAFFIC_OF[step.meta_type], step.stage_index]
        if inbox.is_posted(step.micro_index):
            return True
        if not self.wires.may_post_early or not inbox.knows_next():
            return False
        inbox.mark_due()
        self._may_post_ahead(inbox)
        return True

    def _receive(self, step: MetaStep) -> None:
        """Post a receive at its place in the order, after those that are due: this may wait for a header."""
        inbox = self.inboxes[TRAFFIC_OF[step.meta_type], step.stage_index]
        if inbox.knows_next() or not self.wires.defers_headers:
            self.post_ahead()
            if not inbox.is_posted(step.micro_index):
                inbox.post(step.micro_index)

    def _announces_all(self, traffic: Traffic, stage_index: int) -> bool:
        """Whether what a stage sends first tells the shapes of all that it will send in this pass."""
        if traffic is Traffic.DATA or stage_index == 0 or not self.is_uniform:
            return self.is_uniform
        source = stage_index
        while source in self.stages and source > 0:
            source -= 1
        inbox = self.inboxes.get((Traffic.FORWARD, source + 1)) if source not in self.stages else None
        return inbox is None or inbox.is_uniform

    def _targets_of(self, micro_index: int) -> Any:
        """The loss's targets: received, if the schedule carries them, else from outside."""
        inbox = self.receives_targets
        if inbox is None:
            return self.micro_batches[micro_index].targets
        (targets,) = inbox.take(micro_index)
        targets = targets.clone()  # autograd saves them, while the buffer is for the next micro-batch's
        inbox.release(micro_index)
        return targets

    def _inputs_of(self, stage_index: int, micro_index: int, batch: StageInputs) -> tuple[Any, ...]:
        if stage_index == 0:
            return batch.args
        inbox = self.inboxes.get((Traffic.FORWARD, stage_index))
        if inbox is None:
            return self.activations.pop((stage_index, micro_index))
        buffers = inbox.take(micro_index)
        layouts = inbox.layouts_of(micro_index)
        return tuple(
            buffer.detach().requires_grad_(layout.requires_grad)
            for buffer, layout in zip(buffers, layouts, strict=True)
        )

    def _grads_of(self, stage_index: int, micro_index: int) -> Grads:
        if stage_index == self.stages[stage_index].num_stages - 1:
            return (self.loss_grad,)
        inbox = self.inboxes.get((Traffic.BACKWARD, stage_index))
        if inbox is None:
            return self.output_grads.pop((stage_index, micro_index))
        grads = tuple(inbox.take(micro_index))
        if any(grad is not None for grad in grads):
            self.outboxes[Traffic.FORWARD, stage_index].note_arrival(micro_index)
        return grads

    def _hand_back(self, stage_index: int, micro_index: int, grads: Grads, arrived: Grads) -> None:
        if stage_index == 0:
            return
        # A gradient may pass through untouched; as a view of its own it keeps the received buffer from being reused.
        grads = tuple([g.detach() if g is not None and any(g is each for each in arrived) else g for g in grads])
        if stage_index - 1 in self.stages:
            self.output_grads[stage_index - 1, micro_index] = grads
            return
        if any(grad is None for grad in grads):
            layouts = self.inboxes[Traffic.FORWARD, stage_index].layouts_of(micro_index)
            grads = tuple(
                # The sender of an input that needs a gradient waits for one, even if this stage did not use the input.
                torch.zeros(layout.shape, dtype=layout.dtype, device=self.wires.device)
                if layout.requires_grad and grad is None
                else grad
                for layout, grad in zip(layouts, grads, strict=True)
            )
        self.outgoing[Traffic.BACKWARD, stage_index, micro_index] = grads, None

    def _note_loss(self, outputs: tuple[Tensor, ...]) -> None:
        loss = outputs[0] if len(outputs) == 1 else None
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError("the last stage must return one scalar, the loss summed over its micro-batch")
        self.losses.append(loss.detach() if loss.ndim == 0 else loss.detach().reshape(()))

    def _release(self, stage_index: int, micro_index: int, *traffics: Traffic) -> None:
        for traffic in traffics:
            inbox = self.inboxes.get((traffic, stage_index))
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
