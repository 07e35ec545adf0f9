"""A module as a stage, without a pipeline around it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hp_train.pipeline_parallel import ModuleStage


class Scaled(nn.Module):
    """Its loss is the sum of inputs times one weight, in the shape and dtype asked for."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.shape, self.dtype = shape, dtype

    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden * self.weight).sum().reshape(self.shape).to(self.dtype)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("splits", [False, True])
def test_a_loss_of_one_number_is_differentiated_whatever_its_shape(
    shape: tuple[int, ...], dtype: torch.dtype, splits: bool
) -> None:
    module = Scaled(shape, dtype)
    stage = ModuleStage(module, 1, 2)
    hidden = torch.ones(3, requires_grad=True)
    stage.begin_step(frozenset())
    stage.forward(0, (hidden,), {}, None)
    grad = (torch.tensor(0.5),)
    if splits:
        (input_grad,) = stage.backward_input(0, grad)
        stage.backward_weight(0)
    else:
        (input_grad,) = stage.backward(0, grad)
    assert input_grad.tolist() == [1.0] * 3 and module.weight.grad.item() == 1.5
