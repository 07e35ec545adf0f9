"""The chunked loss against plain cross-entropy over all logits: value, gradients, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hp_train.models.loss import ChunkedCrossEntropy

BATCH, SEQ, DIM, VOCAB = 3, 40, 32, 211


def inputs(ignored: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(BATCH, SEQ, DIM, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, DIM, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator)
    targets[torch.rand(BATCH, SEQ, generator=generator) < ignored] = -100
    return hidden, weight, targets


@pytest.mark.parametrize("ignored", [0.0, 0.4])
@pytest.mark.parametrize("chunk_tokens", [0, 1, 16, 50, BATCH * SEQ, 1000])
def test_equals_the_sum_over_all_logits(chunk_tokens: int, ignored: float) -> None:
    hidden, weight, targets = inputs(ignored)
    logits = F.linear(hidden.double(), weight.double())
    exact = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    exact_grads = torch.autograd.grad(exact, (hidden, weight))
    loss = ChunkedCrossEntropy(chunk_tokens)(hidden, weight, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)
    for grad, reference in zip(torch.autograd.grad(loss, (hidden, weight)), exact_grads, strict=True):
        assert (grad - reference).norm() <= 1e-6 * reference.norm()


@pytest.mark.parametrize("chunk_tokens", [0, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_valid_target_gives_zero_and_zero_gradients(chunk_tokens: int, dtype: torch.dtype) -> None:
    hidden, weight, targets = inputs(ignored=1.1, dtype=dtype)
    loss = ChunkedCrossEntropy(chunk_tokens)(hidden, weight, targets)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_input_and_weight_gradients_may_be_asked_for_separately() -> None:
    hidden, weight, targets = inputs(0.2)
    loss_of = ChunkedCrossEntropy(16)
    together = torch.autograd.grad(loss_of(hidden, weight, targets), (hidden, weight))
    loss = loss_of(hidden, weight, targets)
    (of_hidden,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (of_weight,) = torch.autograd.grad(loss, weight)
    assert torch.equal(of_hidden, together[0])
    assert torch.equal(of_weight, together[1])


class LargestOutput(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operator made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            self.numel = max(self.numel, item.numel()) if isinstance(item, Tensor) else self.numel
        return result


@pytest.mark.parametrize("training", [True, False])
def test_no_more_logits_than_a_chunk_ever_exist(training: bool) -> None:
    hidden, weight, targets = inputs(0.0)
    with LargestOutput() as largest, torch.set_grad_enabled(training):
        loss = ChunkedCrossEntropy(40)(hidden, weight, targets)
        if training:
            loss.backward()
    assert largest.numel == 40 * VOCAB  # the weight's own gradient, 32 x 211, is smaller


def test_no_logits_are_kept_for_backward() -> None:
    hidden, weight, targets = inputs(0.0)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ChunkedCrossEntropy(0)(hidden, weight, targets)
        assert max(kept) == BATCH * SEQ * VOCAB  # the probe sees them where they are kept
        kept.clear()
        ChunkedCrossEntropy(40)(hidden, weight, targets)
    assert max(kept) < 40 * VOCAB  # a chunk's hidden states, targets and the weight only
