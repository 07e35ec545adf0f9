"""Names, order and defaults of the interface against torch's, installed and recorded."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method as torch_register
from torch.distributed.fsdp import share_comm_ctx as torch_share

from hp_train.fully_shard import HSDPModule, HSDPScheduler, fully_shard, register_fsdp_forward_method, share_comm_ctx

# keyword -> default as text, read from torch's sources
TORCH_2_11 = {
    "module": None, "mesh": "None", "reshard_after_forward": "None", "shard_placement_fn": "None",
    "mp_policy": "MixedPrecisionPolicy()", "offload_policy": "OffloadPolicy()", "ignored_params": "None",
}
TORCH_2_13 = {**TORCH_2_11, "dp_mesh_dims": "None"}
OURS_AFTER = ["replicate_params", "comm_fusion", "comm_fusion_zero_copy", "mode"]


def parameters_of(function: object) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_keywords_of_the_installed_torch() -> None:
    ours, theirs = parameters_of(fully_shard), parameters_of(torch_fully_shard)
    shared = [name for name in ours if name in theirs]
    assert shared == list(theirs), "every keyword of torch, in torch's order"
    assert [name for name in ours if name not in TORCH_2_13] == OURS_AFTER == list(ours)[-4:]
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind
        assert ours[name].default == parameter.default, name


@pytest.mark.parametrize("recorded", [TORCH_2_11, TORCH_2_13], ids=["2.11", "2.13-2.14"])
def test_keywords_of_recorded_torch(recorded: dict[str, str | None]) -> None:
    ours = parameters_of(fully_shard)
    assert [name for name in ours if name in recorded] == list(recorded)
    for name, default in recorded.items():
        value = ours[name].default
        if default is None:
            assert value is inspect.Parameter.empty
        else:
            assert value is None if default == "None" else type(value).__name__ + "()" == default


def test_methods_of_the_installed_torch_are_answered_here() -> None:
    for name, method in vars(FSDPModule).items():
        if name.startswith("_"):
            continue
        ours = vars(HSDPModule).get(name)
        assert ours is not None, f"{name} would run torch's code on a module of ours"
        expected = parameters_of(method)
        actual = parameters_of(inspect.unwrap(ours))
        if "kwargs" in actual:  # refused by name
            continue
        for parameter in expected.values():
            assert actual[parameter.name].kind == parameter.kind, (name, parameter)
            assert actual[parameter.name].default == parameter.default, (name, parameter)


def test_a_method_that_torch_adds_is_refused_not_inherited() -> None:
    from hp_train.fully_shard import module as engine

    FSDPModule.set_of_the_future = lambda self: None  # type: ignore[attr-defined]
    try:
        engine._refuse_unknown_methods()
        with pytest.raises(NotImplementedError, match=r"set_of_the_future.*implementation=torch"):
            HSDPModule.set_of_the_future(object())
    finally:
        del FSDPModule.set_of_the_future  # type: ignore[attr-defined]
        del HSDPModule.set_of_the_future


@pytest.mark.parametrize("pair", [(register_fsdp_forward_method, torch_register), (share_comm_ctx, torch_share)])
def test_companions(pair: tuple[object, object]) -> None:
    ours, theirs = map(parameters_of, pair)
    assert list(ours) == list(theirs)


@pytest.mark.parametrize(
    ("setter", "argument"),
    [
        ("set_reshard_after_forward", 1), ("set_reshard_after_backward", None), ("set_requires_all_reduce", "yes"),
        ("set_requires_grad_sync", 0),
    ],
)
def test_scheduler_setters_take_bools_only(setter: str, argument: object) -> None:
    scheduler = HSDPScheduler.__new__(HSDPScheduler)
    with pytest.raises(ValueError, match="True or False"):
        getattr(scheduler, setter)(argument)


@pytest.mark.parametrize("name", ["set_forward_prefetch_cells", "set_backward_prefetch_cells"])
def test_prefetch_takes_units_only(name: str) -> None:
    scheduler = HSDPScheduler.__new__(HSDPScheduler)
    with pytest.raises(ValueError, match="Linear"):
        getattr(scheduler, name)([nn.Linear(1, 1)])


@pytest.mark.parametrize(
    ("module", "keywords", "message"),
    [
        (nn.ModuleList([nn.Linear(1, 1)]), {}, "ModuleList has no forward"),
        ([], {}, "non-empty list"),
        (torch.ones(1), {}, "nn.Modules, not Tensor"),
        (nn.Linear(1, 1), {"dp_mesh_dims": object()}, "submesh as mesh="),
    ],
)
def test_bad_arguments(module: object, keywords: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=message):
        fully_shard(module, **keywords)  # type: ignore[arg-type]


def test_companions_on_other_modules() -> None:
    plain = nn.Linear(1, 1)
    register_fsdp_forward_method(plain, "forward")  # no effect, as torch's
    assert "forward" not in vars(plain)
    with pytest.raises(ValueError, match="Linear"):
        share_comm_ctx([plain])  # type: ignore[list-item]
