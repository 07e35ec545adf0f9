"""The order of events: counts, accumulation, several forwards, exceptions, prefetch, explicit control, precision."""

from __future__ import annotations

import logging

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from hp_train.fully_shard import (
    HSDPSchedulerState,
    MixedPrecisionPolicy,
    count_collectives,
    fully_shard,
)
from hp_train.fully_shard.state import Form
from tests.distributed.fully_shard.checks import (
    assert_grads,
    assert_nothing_full,
    expect_collectives,
    rank,
    world_size,
)
from tests.distributed.fully_shard.models import (
    Seeded,
    batch,
    build,
    full,
    full_grads,
    loss_of,
    reference_grads,
    wrap,
)
from tests.distributed.fully_shard.registry import Registry

REGISTRY = Registry()
UNITS = 5  # embedding, three blocks, the rest


def sums_over_steps(num_steps: int) -> dict[str, torch.Tensor | None]:
    """Gradients of one process accumulated over the first `num_steps` batches of all ranks."""
    model = build()
    for step in range(num_steps):
        for each in range(world_size()):
            (loss_of(model, batch(step, each)) / world_size()).backward()
    return {name: param.grad for name, param in model.named_parameters()}


@REGISTRY.case
def collectives_of_one_step(mesh: DeviceMesh) -> None:
    for reshard, gathers in ((None, 2 * UNITS - 1), (False, UNITS), (True, 2 * UNITS)):
        model = wrap(build(), fully_shard, mesh=mesh, reshard_after_forward=reshard)
        for _ in range(3):  # the first step records the order, the later ones prefetch by it
            with count_collectives() as counted:
                loss = loss_of(model, batch(0, rank()))
                assert counted["all_gather"] == UNITS
                loss.backward()
            assert counted == {"all_gather": gathers, "reduce_scatter": UNITS}
        assert_nothing_full(model)


@REGISTRY.case
def reshard_to_a_smaller_group(mesh: DeviceMesh) -> None:
    size = 2
    model = wrap(build(), fully_shard, mesh=mesh, reshard_after_forward=size)
    loss = loss_of(model, batch(0, rank()))
    expected = Form.SHARDED if world_size() == size else Form.PART
    assert model.blocks[0].hsdp_scheduler.state.sharded_form is expected
    loss.backward()
    assert_grads(model, reference_grads(build(), world_size()))
    assert_nothing_full(model)
    try:
        fully_shard(build(), mesh=mesh, reshard_after_forward=3)
    except ValueError as error:
        assert "3" in str(error) and str([n for n in (1, 2, 4) if n <= world_size()]) in str(error)
    else:
        raise AssertionError("a group of 3 was accepted")


@REGISTRY.case
def accumulation_with_sync(mesh: DeviceMesh) -> None:
    model = wrap(build(), fully_shard, mesh=mesh)
    for step in range(3):
        loss_of(model, batch(step, rank())).backward()
    assert_grads(model, sums_over_steps(3))


@REGISTRY.case
def accumulation_without_sync(mesh: DeviceMesh) -> None:
    for keep_full, gathers in ((False, 4 * (2 * UNITS - 1)), (True, UNITS + 4 * (UNITS - 1))):
        model = wrap(build(), fully_shard, mesh=mesh)
        with expect_collectives(all_gather=gathers if not keep_full else UNITS + 4 * (UNITS - 1), reduce_scatter=UNITS):
            for step in range(4):
                last = step == 3
                model.set_requires_gradient_sync(last)
                model.set_is_last_backward(last)
                model.set_reshard_after_backward(last or not keep_full)
                loss_of(model, batch(step, rank())).backward()
                assert last or all(param.grad is None for param in model.parameters() if hasattr(param, "placements"))
        assert_grads(model, sums_over_steps(4))
        assert_nothing_full(model)


@REGISTRY.case
def accumulation_runs_in_the_reduce_dtype(mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(nn.Linear(2, 2, bias=False), mesh=mesh, mp_policy=policy)
    for step in range(300):  # 300 ones: bf16 would stop counting at 256
        model.set_requires_gradient_sync(step == 299)
        model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(full_grads(model)["weight"], torch.full((2, 2), 300.0))


@REGISTRY.case
def mixed_precision_equals_torch(mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    results = []
    for engine in (fully_shard, torch_fully_shard):
        model = wrap(build(), engine, mesh=mesh, mp_policy=policy)
        for step in range(2):
            model.set_requires_gradient_sync(step == 1)
            loss_of(model, batch(step, rank())).backward()
        results.append(full_grads(model))
    for name, grad in results[0].items():
        assert grad.dtype == torch.float32
        assert torch.allclose(grad, results[1][name], rtol=1e-6, atol=1e-8), name


@REGISTRY.case
def inputs_and_outputs_are_cast(mesh: DeviceMesh) -> None:
    seen: dict[str, torch.dtype] = {}

    class Probe(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.update(x=x.dtype, weight=self.weight.dtype)
            return super().forward(x)

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    model = fully_shard(Probe(4, 4), mesh=mesh, mp_policy=policy)
    assert model(torch.ones(1, 4)).dtype == torch.float64
    assert seen == {"x": torch.bfloat16, "weight": torch.bfloat16}
    assert model.hsdp_scheduler.state.params[0].sharded.dtype == torch.float32


@REGISTRY.case
def several_forwards_then_one_backward(mesh: DeviceMesh) -> None:
    model = wrap(build(), fully_shard, mesh=mesh)
    with count_collectives() as counted:
        (loss_of(model, batch(0, rank())) + loss_of(model, batch(1, rank()))).backward()
    assert counted["reduce_scatter"] == UNITS and counted["all_gather"] <= (2 * UNITS - 1) + 2 * (UNITS - 1)
    assert_grads(model, sums_over_steps(2))
    assert_nothing_full(model)


@REGISTRY.case
def forward_without_grad_then_training(mesh: DeviceMesh) -> None:
    for context in (torch.no_grad, torch.inference_mode):
        for reshard in (None, False):
            model = wrap(build(), fully_shard, mesh=mesh, reshard_after_forward=reshard)
            with context():
                loss_of(model, batch(5, rank()))
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # finds the sharded parameters
            loss_of(model, batch(0, rank())).backward()
            assert_grads(model, reference_grads(build(), world_size()))
            optimizer.step()
            reference = build()
            grads = reference_grads(reference, world_size())
            for (name, param), old in zip(model.named_parameters(), reference.parameters(), strict=True):
                assert torch.allclose(full(param), old - grads[name], atol=1e-6), name


@REGISTRY.case
def full_parameters_kept_over_an_optimizer_step_are_gathered_again(mesh: DeviceMesh) -> None:
    model = wrap(build(), fully_shard, mesh=mesh, reshard_after_forward=False)
    with torch.no_grad():
        before = loss_of(model, batch(0, rank()))
        for param in model.parameters():
            param.mul_(0.5)
        after = loss_of(model, batch(0, rank()))
        reference = build()
        for param in reference.parameters():
            param.mul_(0.5)
        assert not torch.equal(before, after)
        assert torch.allclose(after, loss_of(reference, batch(0, rank())), rtol=1e-6)


@REGISTRY.case
def exceptions_then_a_clean_step(mesh: DeviceMesh) -> None:
    model = wrap(build(), fully_shard, mesh=mesh)

    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    def failing_step() -> None:
        try:
            loss_of(model, batch(3, rank())).backward()
        except RuntimeError as error:
            assert "injected" in str(error)
        else:
            raise AssertionError("nothing was injected")

    for register in (
        model.blocks[1].up.register_forward_hook,
        model.head.register_forward_pre_hook,
        model.blocks[1].norm.register_full_backward_pre_hook,
    ):
        handle = register(fail)
        failing_step()
        handle.remove()
        model.zero_grad()
        loss_of(model, batch(0, rank())).backward()
        assert_grads(model, reference_grads(build(), world_size()))
        assert_nothing_full(model)
    handle = model.blocks[2].register_full_backward_pre_hook(fail)
    failing_step()
    handle.remove()
    model.reset_iter_state()
    assert_nothing_full(model)


@REGISTRY.case
def zero_grad_between_forward_and_backward(mesh: DeviceMesh) -> None:
    model = wrap(build(), fully_shard, mesh=mesh)
    loss_of(model, batch(3, rank())).backward()
    loss = loss_of(model, batch(0, rank()))
    model.zero_grad()  # the root shows full parameters now
    loss.backward()
    assert_grads(model, reference_grads(build(), world_size()))
    before = [param.grad.to_local().data_ptr() for param in model.parameters()]
    model.zero_grad(set_to_none=False)
    assert before == [param.grad.to_local().data_ptr() for param in model.parameters()]
    assert all(not param.grad.to_local().any() for param in model.parameters())


@REGISTRY.case
def in_place_on_a_view_output(mesh: DeviceMesh) -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).view(-1, 2, 4)

    class Outer(Seeded):
        def __init__(self) -> None:
            super().__init__()
            self.views, self.out = Views(), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.views(x)
            y += 1
            return self.out(y)

    model, reference = Outer(), Outer()
    fully_shard(model.views, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    mine, theirs = torch.autograd.grad(model(x).pow(2).sum(), x), None
    model.reshard(recurse=True)
    theirs = torch.autograd.grad(reference(x).pow(2).sum(), x)
    assert torch.allclose(mine[0], theirs[0])
    model(x).pow(2).sum().backward()
    reference(x).pow(2).sum().backward()
    assert_grads(model, reference)
    assert_nothing_full(model)


@REGISTRY.case
def explicit_and_mistargeted_prefetch(mesh: DeviceMesh) -> None:
    model = wrap(build(), fully_shard, mesh=mesh)
    blocks = list(model.blocks)
    for module, ahead in zip(blocks[:-1], blocks[1:], strict=True):
        module.set_modules_to_forward_prefetch([ahead])
        ahead.set_modules_to_backward_prefetch([module])
    for _ in range(2):
        model.zero_grad()
        with expect_collectives(all_gather=2 * UNITS - 1, reduce_scatter=UNITS):
            loss_of(model, batch(0, rank())).backward()
        assert_grads(model, reference_grads(build(), world_size()))
    # blocks[0] prefetches a unit that this forward never reaches
    model.forward = lambda tokens: model.head(model.norm(model.blocks[0](model.embed(tokens))))
    blocks[0].set_modules_to_forward_prefetch([blocks[2]])
    model.zero_grad()
    loss_of(model, batch(0, rank())).backward()
    assert_nothing_full(model)
    assert model.blocks[0].up.weight.grad is not None and model.blocks[2].up.weight.grad is None


@REGISTRY.case
def unshard_and_reshard_by_hand(mesh: DeviceMesh) -> None:
    model = wrap(build(), fully_shard, mesh=mesh)
    handle = model.blocks[0].unshard(async_op=True)
    handle.wait()
    assert torch.equal(model.blocks[0].up.weight, build().blocks[0].up.weight)
    assert type(model.blocks[0].up.weight) is nn.Parameter
    model.blocks[0].reshard()
    assert_nothing_full(model)
    model.blocks[0].unshard()
    with expect_collectives(all_gather=UNITS - 1):
        loss_of(model, batch(0, rank()))


@REGISTRY.case
def split_backward_driven_by_hand(mesh: DeviceMesh) -> None:
    """Input gradients first, weight gradients later, with the blocks' default to reshard after forward."""
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(reduce_dtype=torch.float64)):
        model, reference = wrap(build(), fully_shard, mesh=mesh, mp_policy=policy), build()
        model.set_requires_gradient_sync(False)
        model.unshard(recurse=True, hold=True)
        weights = [param for block in model.blocks for param in block.parameters()]
        for step in range(2):
            x = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(step), requires_grad=True)
            y = x
            for block in model.blocks:
                y = block(y)
            (dx,) = torch.autograd.grad(y.sum(), [x], retain_graph=True)
            model.accumulate_grads(dict(zip(weights, torch.autograd.grad(y.sum(), weights), strict=True)))
            z = x
            for block in reference.blocks:
                z = block(z)
            (expected_dx,) = torch.autograd.grad(z.sum(), [x], retain_graph=True)
            z.sum().backward()
            assert torch.allclose(dx, expected_dx)
        with expect_collectives(reduce_scatter=UNITS):
            model.reduce_grad()
        model.reshard(recurse=True)
        grads = {name: param.grad for name, param in reference.named_parameters()}
        assert_grads(model, grads)
        assert_nothing_full(model)


@REGISTRY.case
def split_backward_without_hold_keeps_the_unit_full(mesh: DeviceMesh) -> None:
    block, reference = build().blocks[0], build().blocks[0]
    fully_shard(block, mesh=mesh, reshard_after_forward=True)
    x = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y = block(x)
    full_params = [param.unsharded for param in block.hsdp_scheduler.state.params]
    torch.autograd.grad(y.sum(), [x], retain_graph=True)
    assert block.hsdp_scheduler.state.sharded_form is Form.FULL
    grads = torch.autograd.grad(y.sum(), full_params)
    block.accumulate_grads(dict(zip(full_params, grads, strict=True)))
    block.reduce_grad()
    reference(x).sum().backward()
    assert_grads(block, reference)
    assert_nothing_full(block)


@REGISTRY.case
def spans_logs_and_states(mesh: DeviceMesh) -> None:
    model = wrap(build(), fully_shard, mesh=mesh)
    scheduler = model.blocks[1].hsdp_scheduler
    assert scheduler.scheduler_state is None and not scheduler.scheduler_ctx.lazy_init_done
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    log = logging.getLogger("hp_train.fully_shard")
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    during: list[object] = []
    model.blocks[1].up.register_forward_hook(lambda *_: during.append(scheduler.scheduler_state))
    model.blocks[1].up.register_full_backward_hook(lambda *_: during.append(scheduler.scheduler_state))
    with torch.profiler.profile() as profile:
        loss = loss_of(model, batch(0, rank()))
        assert scheduler.scheduler_state is HSDPSchedulerState.FORWARD
        loss.backward()
    log.removeHandler(handler)
    assert during == [HSDPSchedulerState.PRE_FORWARD, HSDPSchedulerState.PRE_BACKWARD]
    assert scheduler.scheduler_state is HSDPSchedulerState.BACKWARD
    expected = [
        "pre_forward unshard:blocks.1",
        "post_forward reshard:blocks.1",
        "backward prefetch:blocks.1",
        "pre_backward unshard:blocks.1",
        "post_backward:blocks.1",
        "post_backward reshard:blocks.1",
    ]
    assert [line for line in records if line.endswith(":blocks.1")] == expected
    assert set(expected) <= {event.key for event in profile.key_averages()}
    assert scheduler.scheduler_ctx.root_module is model and scheduler.scheduler_ctx.lazy_init_done
    assert [param.fqn for param in scheduler.state.params][0] == "blocks.1.norm.weight"


@REGISTRY.case
def post_accumulate_hooks_run_on_sharded_parameters(mesh: DeviceMesh) -> None:
    model = wrap(build(), fully_shard, mesh=mesh)
    seen: set[object] = set()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(seen.add)
    loss_of(model, batch(0, rank())).backward()
    assert seen == set(model.parameters())
