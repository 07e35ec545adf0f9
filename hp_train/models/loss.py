"""Cross-entropy of an output matrix, summed over valid targets, without ever holding all logits.

Models floor: imports torch only. Tokens go through the output matrix in chunks, and each chunk's logits are computed
again in backward (non-reentrant checkpointing, so that a pipeline may ask for input and weight gradients separately).
That costs one more product with the output matrix a step; without chunks all logits are kept instead.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

IGNORED_TARGET = -100


class ChunkedCrossEntropy(nn.Module):
    """Cross-entropy with at most `chunk_tokens` tokens' logits alive at a time; 0 takes all tokens at once.

    Whoever wants the loss of each row sets `rows` to a list: every forward with gradients then appends the pair (loss
    sums fp32 [B], numbers of valid targets int64 [B]).
    """

    rows: list[tuple[Tensor, Tensor]] | None = None

    def __init__(self, chunk_tokens: int = 0) -> None:
        super().__init__()
        assert chunk_tokens >= 0, f"chunk_tokens={chunk_tokens} is negative"
        self.chunk_tokens = chunk_tokens

    def forward(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of cross-entropy in nats over targets other than -100: an fp32 scalar, 0 if there are none.

        `hidden` [..., dim] and `weight` [vocab, dim] share a dtype; `targets` is int64 [...].
        """
        shape = targets.shape
        hidden, targets = hidden.flatten(0, -2), targets.flatten()
        if self.rows is not None and torch.is_grad_enabled():
            losses, of_tokens = zip(*self._chunks(_cross_entropy_of_tokens, hidden, weight, targets), strict=True)
            valid = (targets != IGNORED_TARGET).view(shape)
            self.rows.append((torch.cat(of_tokens).view(shape).sum(-1), valid.sum(-1)))
        else:
            losses = self._chunks(_sum_of_cross_entropy, hidden, weight, targets)
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _chunks(self, function: Callable, hidden: Tensor, weight: Tensor, targets: Tensor) -> list:
        """Return what `function` gives for each chunk of tokens."""
        if self.chunk_tokens == 0:
            return [function(hidden, weight, targets)]
        found = []
        for chunk, chunk_targets in zip(hidden.split(self.chunk_tokens), targets.split(self.chunk_tokens), strict=True):
            if torch.is_grad_enabled():
                found.append(
                    checkpoint(
                        function,
                        chunk,
                        weight,
                        chunk_targets,
                        use_reentrant=False,
                        preserve_rng_state=False,  # nothing random inside
                    )
                )
            else:
                found.append(function(chunk, weight, chunk_targets))
        return found


def _sum_of_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, weight).float()  # [tokens, vocab]; softmax in fp32 in every precision
    return F.cross_entropy(logits, targets, ignore_index=IGNORED_TARGET, reduction="sum")


def _cross_entropy_of_tokens(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum over valid targets, and apart from the graph each token's loss, 0 where it is ignored."""
    logits = F.linear(hidden, weight).float()
    losses = F.cross_entropy(logits, targets, ignore_index=IGNORED_TARGET, reduction="none")
    return losses.sum(), losses.detach()
