"""Small models and single-process references for the engine's tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F


class Seeded(nn.Module):
    """Two of a kind start with the same parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)


class Block(nn.Module):
    """A residual block with big and small, matrix and vector parameters."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, blocks, norm, head; `width` and `vocab` odd sizes make shards uneven."""

    def __init__(self, vocab: int = 97, width: int = 32, hidden: int = 130, num_blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(seed: int = 0, **sizes: int) -> Model:
    torch.manual_seed(seed)
    return Model(**sizes)


def wrap(model: Model, fully_shard: Callable, **options: object) -> Model:
    """Embedding, every block, then the rest in the root unit."""
    fully_shard(model.embed, **options)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def batch(step: int, rank: int, vocab: int = 97, rows: int = 2, length: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, vocab, (rows, length + 1), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def full(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The whole tensor of a DTensor (collective), or the tensor itself."""
    if tensor is None:
        return None
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def full_grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: full(param.grad) for name, param in model.named_parameters()}


def reference_grads(model: nn.Module, world_size: int, step: int = 0) -> dict[str, torch.Tensor | None]:
    """Gradient of the mean over ranks of each rank's loss, by one process."""
    model.zero_grad()
    for rank in range(world_size):
        (loss_of(model, batch(step, rank)) / world_size).backward()
    return {name: None if param.grad is None else param.grad.clone() for name, param in model.named_parameters()}
