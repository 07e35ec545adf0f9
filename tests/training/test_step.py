"""The engine without a pipeline: what exists at once while it works through a step."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from hp_train.data.loader import MicroBatch, document_mask
from hp_train.training.step import DataParallelEngine


class MaskCounter(nn.Module):
    """A model whose loss is its weight times the number of pairs that may attend; notes how many masks are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.masks: list[weakref.ref] = []
        self.most_alive = 0

    def forward(self, tokens: Tensor, positions: Tensor, attention_mask: Tensor, targets: Tensor) -> Tensor:
        """Return the loss."""
        self.masks.append(weakref.ref(attention_mask))
        self.most_alive = max(self.most_alive, sum(mask() is not None for mask in self.masks))
        return self.weight * attention_mask.sum()


def test_the_masks_of_a_step_are_not_in_memory_together() -> None:
    ids = [torch.tensor([[0, 0, 1, 1]]), torch.tensor([[0, 1, 2, 2]]), torch.tensor([[0, 0, 0, 0]])]
    batches = [MicroBatch(each, each, each, each, 4) for each in ids]
    model = MaskCounter()
    engine = DataParallelEngine(model, 1, reduce_every_microbatch=False)
    num_pairs = sum(int(document_mask(each).sum()) for each in ids)
    assert engine.train_step(batches, 12).item() == engine.eval_step(batches).item() == num_pairs == 6 + 5 + 10
    assert model.weight.grad.item() == torch.tensor(num_pairs / 12)
    assert len(model.masks) == 6 and model.most_alive == 1
