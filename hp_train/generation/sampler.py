"""Token after token from a model. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hp_train.generation.cache import cached
from hp_train.models.llama import Llama

_CONTEXT_TOKENS = 8
_CUT_CHARACTER = "\ufffd"  # what decoding makes of a character whose last bytes are still to come


@torch.no_grad()
def generate(
    model: Llama,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    eos_id: int | None = None,
) -> Iterator[int]:
    """Yield up to `max_tokens` ids that go on from `prompt`, ending before `eos_id`.

    temperature: logits are divided by it; 0 always takes the likeliest token. The same seed gives the same tokens.
    """
    assert prompt, "there is nothing to go on from"
    device = model.lm_head.weight.device
    generator = torch.Generator().manual_seed(seed)
    new, start = list(prompt), 0
    with cached(model, capacity=len(prompt) + max_tokens):
        for _ in range(max_tokens):
            tokens = torch.tensor([new], device=device)
            positions = torch.arange(start, start + len(new), device=device).unsqueeze(0)
            start += len(new)
            token = _choose(next_logits(model, tokens, positions), temperature, generator)
            if token == eos_id:
                return
            yield token
            new = [token]


def next_logits(model: Llama, tokens: Tensor, positions: Tensor) -> Tensor:
    """Return the logits [vocab], fp32 on the CPU, of what follows `tokens` [1, S] at `positions` [1, S]."""
    hidden = model.model(tokens, positions, None)
    return model.lm_head(hidden[:, -1]).squeeze(0).float().cpu()  # of the last token alone: a vocabulary is wide


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    # Shifted first: a tiny temperature must not make infinities.
    probabilities = torch.softmax((logits - logits.max()) / temperature, dim=0)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def text_pieces(
    ids: Iterator[int], decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()
) -> Iterator[str]:
    """Yield the text of `ids`, which follow `prompt`, as it comes, whole characters only: a token may end amid one.

    New tokens are decoded with the last ones before them, because some tokenizers drop a blank at the beginning.
    """
    context = list(prompt[-_CONTEXT_TOKENS:])
    new: list[int] = []
    for token in ids:
        new.append(token)
        piece = decode(context + new)[len(decode(context)) :]
        if piece and not piece.endswith(_CUT_CHARACTER):
            yield piece
            context, new = (context + new)[-_CONTEXT_TOKENS:], []
    if new:
        yield decode(context + new)[len(decode(context)) :]
