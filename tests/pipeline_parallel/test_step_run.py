"""What lies between the steps of a pass, without processes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hp_train.pipeline_parallel.header import TensorLayout
from hp_train.pipeline_parallel.mailbox import Inbox, Outbox
from hp_train.pipeline_parallel.step_run import DEFAULT_HANDLERS, Ends, StepRun
from hp_train.pipeline_parallel.transport import Edge, Traffic
from hp_train.schedule import MetaStepType
from tests.pipeline_parallel.test_mailbox import Channel


class PassingStage:
    """The middle one of three; its backward returns the very tensor that it is given."""

    stage_index, num_stages = 1, 3

    def backward(self, micro_index: int, output_grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return output_grads

    backward_input = backward


@pytest.mark.parametrize("kind", [MetaStepType.BWD, MetaStepType.BWD_INPUT])
@pytest.mark.parametrize("is_next_local", [False, True])
def test_a_gradient_that_passes_through_keeps_its_buffer(kind: MetaStepType, is_next_local: bool) -> None:
    channel = Channel()
    wires = channel.end(is_send=False)
    wires.may_post_early = False
    inbox = Inbox(Edge(Traffic.BACKWARD, 2, 1, 1, 0), wires, torch.device("cpu"), most_in_use=1)
    outbox = Outbox(Edge(Traffic.FORWARD, 1, 2, 0, 1), Channel().end(is_send=True), limits_open_sends=True)
    returned = Outbox(Edge(Traffic.BACKWARD, 1, 0, 0, 1), Channel().end(is_send=True), limits_open_sends=True)
    ends = Ends(activations_out=outbox, grads_in=inbox, grads_out=None if is_next_local else returned)
    run = StepRun({1: PassingStage()}, DEFAULT_HANDLERS, wires, {1: ends}, {}, [], [], True, True, None)
    layout = TensorLayout((3,), torch.float32, True)
    inbox.begin_step(range(2))
    for micro_index in range(2):
        inbox.expect(micro_index, (layout,))
        channel.sent["tensor"].append(torch.full((3,), float(micro_index)))
        run.execute(SimpleNamespace(meta_type=kind, stage_index=1, micro_index=micro_index))
        if kind is MetaStepType.BWD_INPUT:
            inbox.release(micro_index)  # as the other half does
    if is_next_local:
        handed = [run.output_grads[0, micro_index][0] for micro_index in range(2)]
    else:
        handed = [returned.take_out(micro_index)[0][0] for micro_index in range(2)]
    assert [grad.tolist() for grad in handed] == [[0.0] * 3, [1.0] * 3]
