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

# keyword -> default as text, read from the sources inside the wheels of 2.11.0, 2.12.0, 2.13.0 and 2.14.1
TORCH_2_11 = {
    "module": None,
    "mesh": "None",
    "reshard_after_forward": "None",
    "shard_placement_fn": "None",
    "mp_policy": "MixedPrecisionPolicy()",
    "offload_policy": "OffloadPolicy()",
    "ignored_params": "None",
}
TORCH_2_13 = {**TORCH_2_11, "dp_mesh_dims": "None"}
RECORDED = {"2.11": TORCH_2_11, "2.12": TORCH_2_13, "2.13": TORCH_2_13, "2.14": TORCH_2_13}

# public method of FSDPModule -> its arguments after self, from the same sources; `name*` by keyword only
METHODS_2_11 = {
    "reshard": [],
    "unshard": ["async_op=False"],
    "set_is_last_backward": ["is_last_backward"],
    "set_requires_gradient_sync": ["requires_gradient_sync", "recurse*=True"],
    "set_requires_all_reduce": ["requires_all_reduce", "recurse*=True"],
    "set_reshard_after_forward": ["reshard_after_forward", "recurse=True"],
    "set_reshard_after_backward": ["reshard_after_backward", "recurse*=True"],
    "set_modules_to_forward_prefetch": ["modules"],
    "set_modules_to_backward_prefetch": ["modules"],
    "set_custom_all_gather": ["comm"],
    "set_custom_reduce_scatter": ["comm"],
    "set_all_reduce_hook": ["hook", "stream*=None"],
    "set_post_optim_event": ["event"],
    "set_reduce_scatter_divide_factor": ["factor"],
    "set_gradient_divide_factor": ["factor"],
    "set_force_sum_reduction_for_comms": ["enable"],
    "set_unshard_in_backward": ["unshard_in_backward"],
    "set_allocate_memory_from_process_group_for_comm": ["enable"],
}
METHODS_2_12 = {**METHODS_2_11, "set_symm_mem_for_comm": ["backend='NCCL'"]}
METHODS_2_13 = {
    **METHODS_2_12,
    "reset_iter_state": [],
    "set_reduce_scatter_unused_params": ["reduce_scatter_unused_params", "recurse*=True"],
    "set_reduce_scatter_max_input_buffers": ["max_input_buffers", "recurse*=True"],
    "set_separate_reduce_scatter_group": ["enable=True", "recurse*=True"],
}
METHODS = {"2.11": METHODS_2_11, "2.12": METHODS_2_12, "2.13": METHODS_2_13, "2.14": METHODS_2_13}
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


def as_text(parameter: inspect.Parameter) -> str:
    star = "*" if parameter.kind is inspect.Parameter.KEYWORD_ONLY else ""
    default = "" if parameter.default is inspect.Parameter.empty else f"={parameter.default!r}"
    return f"{parameter.name}{star}{default}"


@pytest.mark.parametrize("version", RECORDED)
def test_keywords_of_recorded_torch(version: str) -> None:
    recorded = RECORDED[version]
    ours = parameters_of(fully_shard)
    if torch.__version__.startswith(f"{version}."):
        assert list(parameters_of(torch_fully_shard)) == list(recorded), "the record is wrong"
    assert [name for name in ours if name in recorded] == list(recorded)
    for name, default in recorded.items():
        value = ours[name].default
        if default is None:
            assert value is inspect.Parameter.empty
        else:
            assert value is None if default == "None" else type(value).__name__ + "()" == default


@pytest.mark.parametrize("version", METHODS)
def test_methods_of_recorded_torch(version: str) -> None:
    """Each is defined by our class, with torch's arguments first; what we add comes after, by keyword."""
    if torch.__version__.startswith(f"{version}."):
        public = [name for name in vars(FSDPModule) if not name.startswith("_")]
        assert sorted(public) == sorted(METHODS[version]), "the record is wrong"
    for name, recorded in METHODS[version].items():
        ours = [as_text(item) for item in parameters_of(inspect.unwrap(vars(HSDPModule)[name])).values()][1:]
        assert ours[: len(recorded)] == recorded, name
        assert all("*=" in extra for extra in ours[len(recorded) :]), name


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
        ("set_reshard_after_forward", 1),
        ("set_reshard_after_backward", None),
        ("set_requires_all_reduce", "yes"),
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
