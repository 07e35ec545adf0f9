"""How parameters are laid out: dims, uneven and empty shards, dtypes, replicated, ignored, tied, meta."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hp_train.fully_shard import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from tests.distributed.fully_shard.checks import assert_grads, assert_nothing_full, expect_collectives, rank, world_size
from tests.distributed.fully_shard.models import (
    Model,
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


def check_options(mesh: DeviceMesh, **options: object) -> Model:
    model = wrap(build(), fully_shard, mesh=mesh, **options)
    loss_of(model, batch(0, rank())).backward()
    assert_grads(model, reference_grads(build(), world_size()))
    assert_nothing_full(model)
    return model


@REGISTRY.case
def defaults(mesh: DeviceMesh) -> None:
    model = check_options(mesh)
    assert all(param.placements == (Shard(0),) for param in model.parameters())
    pairs = zip(model.parameters(), build().parameters(), strict=True)
    assert all(torch.equal(full(param), wanted) for param, wanted in pairs)


@REGISTRY.case
def zero_copy_always_and_never(mesh: DeviceMesh) -> None:
    check_options(mesh, comm_fusion_zero_copy=True)
    check_options(mesh, comm_fusion_zero_copy=False)


@REGISTRY.case
def large_parameters_travel_direct(mesh: DeviceMesh) -> None:
    model = build(width=128, hidden=512 * world_size(), num_blocks=1)
    wrap(model, fully_shard, mesh=mesh)
    loss_of(model, batch(0, rank())).backward()
    (bucket,) = model.blocks[0].hsdp_scheduler.state.sharded_buckets
    assert bucket.num_direct == 2, "both matrices are at least 64 KiB a piece"
    assert_grads(model, reference_grads(build(width=128, hidden=512 * world_size(), num_blocks=1), world_size()))


@REGISTRY.case
def without_fusion_one_exchange_a_parameter(mesh: DeviceMesh) -> None:
    with expect_collectives(reduce_scatter=len(list(build().parameters()))):
        check_options(mesh, comm_fusion=False)


@REGISTRY.case
def other_dims_even_and_uneven(mesh: DeviceMesh) -> None:
    model = check_options(mesh, shard_placement_fn=lambda param: Shard(param.ndim - 1))
    assert model.head.weight.placements == (Shard(1),)


@REGISTRY.case
def fewer_rows_than_ranks_and_scalars(mesh: DeviceMesh) -> None:
    class Tiny(Seeded):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 1)
            self.gain = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.gain

    model, reference, x = fully_shard(Tiny(), mesh=mesh), Tiny(), torch.ones(2, 3)
    assert model.gain.placements == (Replicate(),)
    assert model.linear.weight.to_local().shape == ((1, 3) if rank() == 0 else (0, 3))
    model(x).sum().backward()
    reference(x).sum().backward()
    assert_grads(model, reference)


@REGISTRY.case
def replicated_and_ignored_parameters(mesh: DeviceMesh) -> None:
    model = build()
    head = model.head.weight
    fully_shard(
        model, mesh=mesh, ignored_params={head}, replicate_params={model.norm.weight, model.blocks[0].up.weight}
    )
    assert model.head.weight is head and type(head) is nn.Parameter
    assert model.norm.weight.placements == (Replicate(),)
    before = model.norm.weight.to_local().data_ptr()
    with expect_collectives(all_gather=1, reduce_scatter=1, all_reduce=1):
        loss_of(model, batch(0, rank())).backward()
    assert model.norm.weight.to_local().data_ptr() == before
    expected = reference_grads(build(), world_size())
    own = build()
    loss_of(own, batch(0, rank())).backward()
    assert_grads(model, {**expected, "head.weight": own.head.weight.grad})  # ignored: this rank's own gradient


@REGISTRY.case
def replicated_part_gathers_apart(mesh: DeviceMesh) -> None:
    model = build()
    fully_shard(model, mesh=mesh, replicate_params={model.norm.weight})
    state = model.hsdp_scheduler.state
    state.unshard_replicate()
    assert type(model.norm.weight) is nn.Parameter and hasattr(model.head.weight, "placements")
    state.shard_replicate()
    assert model.norm.weight.placements == (Replicate(),)


@REGISTRY.case
def frozen_parameters(mesh: DeviceMesh) -> None:
    for frozen in ("up.", "blocks.1", "embed"):
        model, reference = build(), build()
        for each in (model, reference):
            for name, param in each.named_parameters():
                param.requires_grad_(frozen not in name)
        wrap(model, fully_shard, mesh=mesh)
        loss_of(model, batch(0, rank())).backward()
        assert_grads(model, reference_grads(reference, world_size()))
        assert_nothing_full(model)


@REGISTRY.case
def frozen_and_unfrozen_between_steps(mesh: DeviceMesh) -> None:
    model, reference = wrap(build(), fully_shard, mesh=mesh), build()
    for step, (frozen, reductions) in enumerate((("up.", 5), ("blocks.1", 4), ("nothing", 5))):
        for each in (model, reference):
            each.zero_grad()
            for name, param in each.named_parameters():
                param.requires_grad_(frozen not in name)
        with expect_collectives(reduce_scatter=reductions):
            loss_of(model, batch(step, rank())).backward()
        assert_grads(model, reference_grads(reference, world_size(), step))
        assert_nothing_full(model)


@REGISTRY.case
def frozen_with_a_gradient_that_waits(mesh: DeviceMesh) -> None:
    """It stays where it is, as a plain `.grad` would, and costs no reduction until the parameter is trained again."""
    model = wrap(build(num_blocks=1), fully_shard, mesh=mesh)
    model.set_requires_gradient_sync(False)
    loss_of(model, batch(0, rank())).backward()
    model.set_requires_gradient_sync(True)
    for trains, reductions in ((False, 2), (False, 2), (True, 3)):
        for param in model.blocks.parameters():
            param.requires_grad_(trains)
        with expect_collectives(reduce_scatter=reductions):
            loss_of(model, batch(0, rank())).backward()
    reference = reference_grads(build(num_blocks=1), world_size())
    assert_grads(model, {name: grad * (2 if "blocks" in name else 4) for name, grad in reference.items()})


@REGISTRY.case
def parameters_without_elements(mesh: DeviceMesh) -> None:
    class Empty(Seeded):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.no_rows, self.no_width = nn.Parameter(torch.empty(0, 4)), nn.Parameter(torch.empty(3, 0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(torch.cat([x, self.no_rows])).sum() + self.no_width.sum()

    for zero_copy, mode in ((None, "fsdp"), (True, "fsdp"), (None, "ddp")):
        model, reference = Empty(), Empty()
        fully_shard(model, mesh=mesh, comm_fusion_zero_copy=zero_copy, mode=mode)
        for each in (model, reference):
            each(torch.ones(2, 4)).backward()
        assert_grads(model, reference)


@REGISTRY.case
def complex_parameters_keep_their_imaginary_part(mesh: DeviceMesh) -> None:
    class Complex(Seeded):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight @ x.to(self.weight.dtype)).abs().sum()

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, reference, x = fully_shard(Complex(), mesh=mesh, mp_policy=policy), Complex(), torch.ones(3)
    for each in (model, reference):
        each(x).backward()
    assert_grads(model, {"weight": reference.weight.grad})


@REGISTRY.case
def what_cannot_be_sharded_is_refused(mesh: DeviceMesh) -> None:
    model = fully_shard(build(), mesh=mesh)
    with pytest.raises(ValueError, match="inner modules first"):
        fully_shard(model.blocks[0], mesh=mesh)
    sparse = fully_shard(nn.EmbeddingBag(8, 4, mode="sum", sparse=True), mesh=mesh)
    with pytest.raises(NotImplementedError, match="sparse=False"):
        sparse(torch.tensor([[1, 2]])).sum().backward()


@REGISTRY.case
def tied_parameters_in_one_unit(mesh: DeviceMesh) -> None:
    model, reference = build(), build()
    for each in (model, reference):
        each.head.weight = each.embed.weight
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard([model.embed, model.norm, model.head], mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss_of(model, batch(0, rank())).backward()
    assert model.head.weight is model.embed.weight
    assert_grads(model, reference_grads(reference, world_size()))
    assert_nothing_full(model)


@REGISTRY.case
def tied_across_units_is_refused(mesh: DeviceMesh) -> None:
    model = build()
    model.head.weight = model.embed.weight
    fully_shard(model.embed, mesh=mesh)
    fully_shard(model.head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    try:
        loss_of(model, batch(0, rank()))
    except ValueError as error:
        assert "one unit" in str(error)
    else:
        raise AssertionError("a parameter shared between units was accepted")


@REGISTRY.case
def meta_device_then_to_empty(mesh: DeviceMesh) -> None:
    with torch.device("meta"):
        model = Model()
    wrap(model, fully_shard, mesh=mesh)
    try:
        loss_of(model, batch(0, rank()))
    except RuntimeError as error:
        assert "meta" in str(error) and "embed.weight" in str(error) or "weight" in str(error)
    else:
        raise AssertionError("ran on meta parameters")
    model.to_empty(device="cpu")
    values = build().state_dict()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(distribute_tensor(values[name], param.device_mesh, param.placements))
    loss_of(model, batch(0, rank())).backward()
    assert_grads(model, reference_grads(build(), world_size()))


@REGISTRY.case
def meta_device_then_assigned(mesh: DeviceMesh) -> None:
    saved = wrap(build(), fully_shard, mesh=mesh).state_dict()
    with torch.device("meta"):
        model = Model()
    wrap(model, fully_shard, mesh=mesh).load_state_dict(saved, assign=True)
    loss_of(model, batch(0, rank())).backward()
    assert_grads(model, reference_grads(build(), world_size()))


@REGISTRY.case
def conversion_to_another_dtype(mesh: DeviceMesh) -> None:
    model = wrap(build(), fully_shard, mesh=mesh).double()
    loss_of(model, batch(0, rank())).backward()
    assert all(param.dtype == param.grad.dtype == torch.float64 for param in model.parameters())
    grads = {name: grad.double() for name, grad in reference_grads(build(), world_size()).items()}
    assert_grads(model, grads)


@REGISTRY.case
def state_dicts_load_in_place_and_assigned(mesh: DeviceMesh) -> None:
    saved = wrap(build(), fully_shard, mesh=mesh).state_dict()
    for assign in (False, True):
        model = wrap(build(seed=3), fully_shard, mesh=mesh)
        loss_of(model, batch(0, rank())).backward()  # the full buffers exist already
        model.zero_grad()
        model.load_state_dict({name: value.clone() for name, value in saved.items()}, assign=assign)
        loss_of(model, batch(0, rank())).backward()
        assert_grads(model, reference_grads(build(), world_size()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer.step()
        after = loss_of(model, batch(1, rank()))
        reference = build()
        reference_grads(reference, world_size())
        torch.optim.SGD(reference.parameters(), lr=0.5).step()
        assert torch.allclose(after, loss_of(reference, batch(1, rank())), rtol=1e-5)


@REGISTRY.case
def clipping_counts_every_element_once(mesh: DeviceMesh) -> None:
    model = wrap(build(), fully_shard, mesh=mesh)
    loss_of(model, batch(0, rank())).backward()
    norm = full(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    expected = torch.stack([grad.norm() for grad in reference_grads(build(), world_size()).values()]).norm()
    assert torch.allclose(norm, expected, rtol=1e-5)


@REGISTRY.case
def cpu_offload_on_cpu(mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    check_options(mesh, offload_policy=CPUOffloadPolicy())
    results = []
    for offload in (OffloadPolicy(), CPUOffloadPolicy(pin_memory=False)):
        model = build()
        replicated = {model.norm.weight}
        fully_shard(model, mesh=mesh, offload_policy=offload, mp_policy=policy, replicate_params=replicated)
        loss_of(model, batch(0, rank())).backward()
        results.append(full_grads(model))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@REGISTRY.case
def mixed_dtypes_in_one_unit(mesh: DeviceMesh) -> None:
    class Mixed(Seeded):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Linear(8, 8).bfloat16()
            self.high = nn.Linear(8, 8)
            self.table = nn.Parameter(torch.arange(8), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.high(self.low(x.bfloat16()).float())[:, self.table]

    model, reference = fully_shard(Mixed(), mesh=mesh), Mixed()
    x = torch.ones(3, 8)
    with expect_collectives(all_gather=3, reduce_scatter=2):
        model(x).sum().backward()
    reference(x).sum().backward()
    assert_grads(model, reference, tolerance=1e-2)


@REGISTRY.case
def reduce_in_fp16_divides_before_and_after(mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    model = fully_shard(nn.Linear(4, 4, bias=False), mesh=mesh, mp_policy=policy)
    # the sum of the ranks' gradients overflows fp16 (65504) unless part of the division comes first
    value = {2: 40000.0, 4: 30000.0}[world_size()]
    model(torch.full((1, 4), value)).sum().backward()
    assert torch.equal(full_grads(model)["weight"], torch.full((4, 4), value))
    model.zero_grad()
    model.set_gradient_divide_factor(1.0 / 2)
    model(torch.full((1, 4), 3.0)).sum().backward()
    assert torch.equal(full_grads(model)["weight"], torch.full((4, 4), 6.0 * world_size()))
