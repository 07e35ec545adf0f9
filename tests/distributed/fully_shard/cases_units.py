"""Units among others: of several modules, called twice or alone, unused on some ranks, of two models, by method."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from hp_train.fully_shard import fully_shard, register_fsdp_forward_method
from tests.distributed.fully_shard.checks import (
    assert_grads,
    assert_nothing_full,
    expect_collectives,
    rank,
    schedulers,
    world_size,
)
from tests.distributed.fully_shard.models import Seeded, batch, build, full_grads, loss_of, reference_grads, wrap
from tests.distributed.fully_shard.registry import Registry

REGISTRY = Registry()


@REGISTRY.case
def a_unit_whose_parameters_are_all_unused_on_some_ranks(mesh: DeviceMesh) -> None:
    class Skip(Seeded):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
            return self.linear(x) if use else x * 1.0

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.skip = nn.Linear(4, 4), Skip()

        def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
            return self.skip(self.before(x), use)

    model, reference, x = Outer(), Outer(), torch.ones(1, 4)
    model.load_state_dict(reference.state_dict())
    fully_shard(model.skip, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        model(x, True)  # dropped without a backward: leaves nothing to wait for
    assert not model.skip.hsdp_scheduler.awaits_backward
    model(x, rank() == 0).sum().backward()
    for each in range(world_size()):
        (reference(x, each == 0).sum() / world_size()).backward()
    assert_grads(model, reference)
    assert_nothing_full(model)
    assert not model.hsdp_scheduler.scheduler_ctx.backward_trace


@REGISTRY.case
def two_models_that_train_against_each_other(mesh: DeviceMesh) -> None:
    """Each is a root of its own; one runs inside the other's backward, frozen, and trains by itself afterwards."""

    def build_pair() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))

    pair, reference = build_pair(), build_pair()
    for model in pair:
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    x = torch.ones(2, 4)
    for _ in range(2):
        for maker, judge in (pair, reference):
            judge.requires_grad_(False)
            judge(maker(x)).sum().backward()
            judge.requires_grad_(True)
            with torch.no_grad():
                made = maker(x)
            (judge(made).sum() - judge(x).sum()).backward()
    for model, expected in zip(pair, reference, strict=True):
        assert_grads(model, expected)
        assert_nothing_full(model)


@REGISTRY.case
def a_unit_of_several_modules_gathers_once_and_frees_after_the_last(mesh: DeviceMesh) -> None:
    model, seen = build(), []
    fully_shard([model.blocks[0], model.blocks[1]], mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = model.blocks[0].hsdp_scheduler.state
    for index, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, index=index: seen.append((index, state.is_full)))
    with expect_collectives(all_gather=3, reduce_scatter=2):
        loss_of(model, batch(0, rank())).backward()
    assert seen == [(0, True), (1, True), (2, False)]
    assert_grads(model, reference_grads(build(), world_size()))


@REGISTRY.case
def a_forward_method_of_another_name(mesh: DeviceMesh) -> None:
    class Encoder(nn.Linear):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.weight, self.bias)

    model = fully_shard(Encoder(4, 4), mesh=mesh)
    register_fsdp_forward_method(model, "encode")
    model.encode(torch.ones(1, 4)).sum().backward()
    assert torch.equal(full_grads(model)["weight"], torch.ones(4, 4))
    assert_nothing_full(model)

    class Generator(nn.Linear):
        def generate(self, x: torch.Tensor) -> torch.Tensor:
            return self(self(x)) @ self.weight  # the unit is entered once, by generate

    torch.manual_seed(0)
    reference = Generator(4, 4)
    for root in (True, False):
        unit = Generator(4, 4)
        unit.load_state_dict(reference.state_dict())
        model = fully_shard(unit, mesh=mesh)
        outer = unit if root else fully_shard(nn.Sequential(unit), mesh=mesh)
        register_fsdp_forward_method(unit, "generate")
        for _ in range(2):
            outer.zero_grad()
            reference.zero_grad()
            with expect_collectives(all_gather=1 if root else 2, reduce_scatter=1):
                x = torch.ones(1, 4, requires_grad=True)
                if not root:
                    outer.forward = unit.generate
                (outer(x) if not root else unit.generate(x)).sum().backward()
            reference.generate(torch.ones(1, 4)).sum().backward()
            assert_grads(unit, reference)
            assert_nothing_full(outer)


@REGISTRY.case
def part_of_the_model_runs_alone_first(mesh: DeviceMesh) -> None:
    model = wrap(build(), fully_shard, mesh=mesh)
    with torch.no_grad():
        model.blocks[0](torch.ones(1, 2, 32))
    loss_of(model, batch(0, rank())).backward()
    assert_grads(model, reference_grads(build(), world_size()))
    contexts = {scheduler.scheduler_ctx for scheduler in schedulers(model)}
    assert len(contexts) == 1 and contexts.pop().root_module is model
    assert_nothing_full(model)


@REGISTRY.case
def a_unit_of_several_modules_run_in_part(mesh: DeviceMesh) -> None:
    """The model's forward stops before the head, which is then called by itself in chunks."""
    model, reference = build(), build()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard([model.norm, model.head], mesh=mesh)
    fully_shard(model, mesh=mesh)
    for each in (model, reference):

        def hidden(tokens: torch.Tensor, each: nn.Module = each) -> torch.Tensor:
            x = each.embed(tokens)
            for block in each.blocks:
                x = block(x)
            return each.norm(x)

        each.forward = hidden

    def chunked(each: nn.Module, tokens: torch.Tensor) -> None:
        x = each(tokens[:, :-1])
        for half in x.chunk(2, dim=1):
            each.head(half).float().pow(2).mean().backward(retain_graph=True)

    for _ in range(2):
        model.zero_grad()
        chunked(model, batch(0, rank()))
    for each in range(world_size()):
        chunked(reference, batch(0, each))
    assert_grads(model, {name: param.grad / world_size() for name, param in reference.named_parameters()})
    assert_nothing_full(model)


@REGISTRY.case
def a_module_called_twice(mesh: DeviceMesh) -> None:
    class Twice(Seeded):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(torch.tanh(self.inner(x)))

    model, reference = Twice(), Twice()
    fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    with expect_collectives(reduce_scatter=1):
        model(x).sum().backward()
    reference(x).sum().backward()
    assert_grads(model, reference)
    assert_nothing_full(model)


@REGISTRY.case
def parameters_unused_on_some_ranks_or_all(mesh: DeviceMesh) -> None:
    class Choice(Seeded):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.never = nn.Linear(200, 200), nn.Linear(200, 200), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
            return self.first(x) if which == 0 else self.second(x)

    model, reference = fully_shard(Choice(), mesh=mesh), Choice()
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(1))
    model(x, rank() % 2).sum().backward()
    for each in range(world_size()):
        (reference(x, each % 2).sum() / world_size()).backward()
    assert_grads(model, reference)
    assert model.never.weight.grad is None
