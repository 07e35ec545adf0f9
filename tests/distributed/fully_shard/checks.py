"""What the engine's tests assert again and again: gradients, forms, collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from hp_train.fully_shard import HSDPModule, HSDPScheduler, count_collectives
from hp_train.fully_shard.state import Form
from tests.distributed.fully_shard.models import full_grads

# fp32 sums of at most a few thousand terms in another order: relative error of a norm about sqrt(n) * 2**-24
GRAD_TOLERANCE = 2e-6


def assert_grads(
    model: nn.Module, expected: nn.Module | dict[str, torch.Tensor | None], tolerance: float = GRAD_TOLERANCE
) -> None:
    """Every parameter's whole gradient equals the expected one within `tolerance` of its norm; None equals None.

    `expected` may be a module that is not sharded, whose gradients are meant.
    """
    grads = full_grads(model)
    if isinstance(expected, nn.Module):
        expected = {name: param.grad for name, param in expected.named_parameters()}
    assert grads.keys() == expected.keys()
    for name, wanted in expected.items():
        grad = grads[name]
        assert (grad is None) == (wanted is None), name
        if wanted is not None and grad is not None:
            error, size = (grad - wanted).norm(), wanted.norm()
            assert error <= tolerance * size + 1e-9, (name, error, size)


def schedulers(model: nn.Module) -> list[HSDPScheduler]:
    return list(dict.fromkeys(m.hsdp_scheduler for m in model.modules() if isinstance(m, HSDPModule)))


def assert_nothing_full(model: nn.Module) -> None:
    """Every unit is sharded, no full buffer has memory, every registered parameter is the optimizer's."""
    for scheduler in schedulers(model):
        assert scheduler.state.sharded_form is Form.SHARDED, scheduler.state.fqn
        for bucket in scheduler.state.sharded_buckets:
            assert bucket._full_buffer is None or bucket._full_buffer.untyped_storage().nbytes() == 0
        for param in scheduler.state.params:
            for owner in param.owners:
                assert owner.module._parameters[owner.name] is param.sharded, param.fqn


@contextlib.contextmanager
def expect_collectives(**expected: int) -> Iterator[None]:
    """The block issues exactly these many; kinds not named are not checked."""
    with count_collectives() as counted:
        yield
    assert {kind: counted[kind] for kind in expected} == expected, counted


def rank() -> int:
    return dist.get_rank()


def world_size() -> int:
    return dist.get_world_size()
