"""Random sequences of everything a user can do, against a model of the states and a single process.

All ranks draw the same sequences (a derandomised search needs no messages), so every collective has its partners.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_train.fully_shard import fully_shard
from tests.distributed.fully_shard.checks import assert_grads, assert_nothing_full, schedulers
from tests.distributed.fully_shard.models import Model, batch, build, full, loss_of, wrap
from tests.distributed.ranks import run_ranks

SIZES = {"vocab": 11, "width": 8, "hidden": 12, "num_blocks": 2}
LR = 0.1


class InjectedError(Exception):
    """Raised by a hook of the test."""


def fail(*_: object) -> None:
    raise InjectedError


def add_grads(model: Model, into: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`into` plus the model's gradients, which are cleared."""
    total = dict(into)
    for name, param in model.named_parameters():
        if param.grad is not None:
            total[name] = total[name] + param.grad if name in total else param.grad
        param.grad = None
    return total


class Sequences(RuleBasedStateMachine):
    """`reduced` and `waiting` are the gradients expected in `.grad` and unreduced in the units."""

    def __init__(self, mesh: DeviceMesh, mode: str) -> None:
        super().__init__()
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.model = wrap(build(**SIZES), fully_shard, mesh=mesh, mode=mode)
        self.reference = build(**SIZES)
        self.step = 0
        self.losses: list[torch.Tensor] = []
        self.reference_losses: list[torch.Tensor] = []
        self.reduced: dict[str, torch.Tensor] = {}
        self.waiting: dict[str, torch.Tensor] = {}
        self.sync = True
        self.frees = {"forward": mode != "ddp", "backward": True}
        self.kept_full = False  # by flags or by hand: then full parameters are no leak
        self.held: set[int] = set()

    def loss(self, model: Model, step: int = 0, *, rank: int | None = None) -> torch.Tensor:
        samples = batch(step, self.rank if rank is None else rank, vocab=SIZES["vocab"])
        return loss_of(model, samples)

    def reference_loss(self, step: int) -> torch.Tensor:
        """The mean over all ranks, by one process."""
        return torch.stack([self.loss(self.reference, step, rank=rank) for rank in range(self.world_size)]).mean()

    # -- passes -------------------------------------------------------------------------------------------------

    @rule()
    def forward(self) -> None:
        self.step += 1
        self.losses.append(self.loss(self.model, self.step))
        assert torch.allclose(self.losses[-1], self.loss(self.reference, self.step), rtol=1e-5)
        self.reference_losses.append(self.reference_loss(self.step))

    @precondition(lambda self: self.losses)
    @rule()
    def backward(self) -> None:
        torch.stack(self.losses).sum().backward()
        torch.stack(self.reference_losses).sum().backward()
        self.waiting = add_grads(self.reference, self.waiting)
        if self.sync:
            for name, grad in self.waiting.items():
                self.reduced[name] = self.reduced[name] + grad if name in self.reduced else grad
            self.waiting = {}
        self.losses, self.reference_losses = [], []
        self.kept_full = not self.frees["backward"]
        self.check_gradients()
        self.check_leaks()

    @precondition(lambda self: not self.losses)
    @rule()
    def forward_without_grad(self) -> None:
        with torch.no_grad():
            assert torch.allclose(self.loss(self.model), self.loss(self.reference), rtol=1e-5)
        self.kept_full = self.kept_full or not self.frees["forward"]
        self.check_leaks()

    # -- failures -----------------------------------------------------------------------------------------------

    @rule(module=st.sampled_from(["embed", "blocks.0.up", "blocks.1", "head"]))
    def forward_that_raises(self, module: str) -> None:
        handle = self.model.get_submodule(module).register_forward_hook(fail)
        with pytest.raises(InjectedError):
            self.loss(self.model)
        handle.remove()
        self.forget_passes()

    @precondition(lambda self: self.losses)
    @rule(module=st.sampled_from(["norm", "blocks.0.down", "blocks.1.norm"]))
    def backward_that_raises(self, module: str) -> None:
        handle = self.model.get_submodule(module).register_full_backward_pre_hook(fail)
        with pytest.raises(InjectedError):
            self.loss(self.model).backward()
        handle.remove()
        self.forget_passes()
        self.waiting = {}

    def forget_passes(self) -> None:
        self.losses, self.reference_losses = [], []
        self.model.reset_iter_state()
        self.model.zero_grad()
        self.reduced, self.waiting = {}, {}
        self.kept_full = False
        self.held.clear()
        self.check_leaks()

    # -- settings and explicit calls ----------------------------------------------------------------------------

    @rule(value=st.booleans())
    def set_sync(self, value: bool) -> None:
        self.model.set_requires_gradient_sync(value)
        self.sync = value

    @rule(value=st.booleans())
    def set_frees_after_backward(self, value: bool) -> None:
        self.model.set_reshard_after_backward(value)
        self.frees["backward"] = value

    @rule(value=st.booleans())
    def set_frees_after_forward(self, value: bool) -> None:
        self.model.set_reshard_after_forward(value)
        self.frees["forward"] = value

    @rule(unit=st.integers(0, 3), hold=st.booleans(), asynchronous=st.booleans())
    def unshard(self, unit: int, hold: bool, asynchronous: bool) -> None:
        handle = schedulers(self.model)[unit].modules[0].unshard(asynchronous, hold=hold)
        if handle is not None and not hold:
            handle.wait()
        self.kept_full = True
        if hold:
            self.held.add(unit)

    @rule(unit=st.integers(0, 3))
    def reshard(self, unit: int) -> None:
        schedulers(self.model)[unit].modules[0].reshard()
        self.held.discard(unit)

    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none: bool) -> None:
        self.model.zero_grad(set_to_none)
        self.reduced = {} if set_to_none else {name: 0 * grad for name, grad in self.reduced.items()}
        self.waiting = {}

    @precondition(lambda self: not self.losses and self.reduced)
    @rule(while_full=st.booleans())
    def optimizer_step(self, while_full: bool) -> None:
        if while_full:  # the full parameters are then older than the optimizer's and must not be used again
            self.model.unshard(recurse=True)
            self.kept_full = True
        parameters = [param.sharded for scheduler in schedulers(self.model) for param in scheduler.state.params]
        torch.optim.SGD(parameters, lr=LR).step()
        with torch.no_grad():
            for name, param in self.reference.named_parameters():
                param -= LR * self.reduced[name]
        for param in parameters:
            param.grad = None
        self.reduced = {}

    # -- checks -------------------------------------------------------------------------------------------------

    def check_leaks(self) -> None:
        if not self.kept_full and not self.held and not self.losses:
            assert_nothing_full(self.model)

    def check_gradients(self) -> None:
        names = {p.fqn: p.sharded for s in schedulers(self.model) for p in s.state.params}
        for name, param in names.items():
            expected = self.reduced.get(name)
            grad = full(param.grad)
            assert (grad is None) == (expected is None), name
            if expected is not None:
                assert torch.allclose(grad, expected, rtol=1e-4, atol=1e-6), name

    def teardown(self) -> None:
        self.model.reshard(recurse=True)
        assert_nothing_full(self.model)
        self.model.set_requires_gradient_sync(True)
        self.model.set_reshard_after_backward(True)
        for scheduler in schedulers(self.model):
            for param in scheduler.state.params:
                param.sharded.grad = None
        self.loss(self.model, 1).backward()  # with it, what was waiting
        self.reference_loss(1).backward()
        assert_grads(self.model, add_grads(self.reference, self.waiting), tolerance=1e-4)
        assert_nothing_full(self.model)


def search(rank: int, world_size: int, mode: str) -> None:
    names = ("dp_replicate",) if mode == "ddp" else ("dp_shard",)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=names)
    run_state_machine_as_test(
        lambda: Sequences(mesh, mode),
        settings=settings(
            derandomize=True,
            database=None,
            deadline=None,
            max_examples=15,
            stateful_step_count=18,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("mode", ["fsdp", "ddp"])
def test_random_sequences(mode: str) -> None:
    run_ranks(2, search, mode)
