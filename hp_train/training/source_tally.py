"""Loss and tokens of each source of `data.mix`, step by step. Imports torch.

The module that computes the loss notes the loss of every row it is given (`ChunkedCrossEntropy.rows`); which source a
row is of follows from its global sample index. So nothing travels with the batches, and the ranks only add a number or
two for each source to what they exchange anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hp_train.data.mix import MixedSource
from hp_train.models.loss import ChunkedCrossEntropy
from hp_train.training.setup import Worker


class SourceTally:
    """This rank's share of the figures of each source; nothing where the data is no mix."""

    def __init__(self, names: Sequence[str], worker: Worker) -> None:
        self.names = tuple(names)
        self._source = worker.train_source
        self._engine = worker.engine
        self._modules: list[ChunkedCrossEntropy] = []
        self._sums = [0.0] * (2 * len(self.names))
        if self.names:
            assert isinstance(self._source, MixedSource), "only a mix has sources"
            modules = (module for stage in worker.model.stages.values() for module in stage.modules())
            self._modules = [module for module in modules if isinstance(module, ChunkedCrossEntropy)]
            for module in self._modules:
                module.rows = []

    def take(self, samples: Sequence[Sequence[int]]) -> None:
        """Add up the rows of the step that was just run; `samples` are those of each micro-batch in order."""
        self._sums = [0.0] * (2 * len(self.names))
        for module in self._modules:
            rows, module.rows = module.rows, []
            assert rows is not None and len(rows) == len(samples), (
                f"{len(rows or ())} losses of {len(samples)} micro-batches"
            )
            losses, tokens = (torch.cat(parts).tolist() for parts in zip(*rows, strict=True))  # one wait for the device
            flat = [sample for index in self._engine.loss_order(len(samples)) for sample in samples[index]]
            for sample, loss, num_tokens in zip(flat, losses, tokens, strict=True):
                number, _ = self._source.place(sample)
                self._sums[number] += loss
                self._sums[len(self.names) + number] += num_tokens

    def sums(self) -> list[float]:
        """Return the loss sums of the sources, then their tokens: what this rank adds to the exchange."""
        return self._sums

    def figures(
        self, columns: Sequence[Sequence[float]]
    ) -> tuple[dict[str, float | None] | None, dict[str, int] | None]:
        """Return loss (nats per token, None where there was no token) and tokens by source.

        `columns` holds, for each entry of `sums`, that of every rank. None and None without a mix, and where the model
        has a loss of its own, which tells nothing of rows.
        """
        totals = [sum(column) for column in columns]
        losses, tokens = totals[: len(self.names)], totals[len(self.names) :]
        if not any(tokens):
            return None, None
        means = [loss / count if count else None for loss, count in zip(losses, tokens, strict=True)]
        return dict(zip(self.names, means, strict=True)), dict(zip(self.names, map(int, tokens), strict=True))
