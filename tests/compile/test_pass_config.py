"""PassConfig: defaults, normal forms, every bad value refused, and the projection of a run's config."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from hp_train.compile.pass_config import (
    DP_MODES,
    PP_SCHEDULES,
    PassConfig,
    build_pass_config_from_trainer_config,
    normalize_dp_mode,
    resolve_degrees,
)
from hp_train.config.schema import TrainerConfig
from hp_train.schedule import SCHEDULES


def test_defaults() -> None:
    assert dataclasses.asdict(PassConfig()) == {
        "enable_overlap": True,
        "fsdp_enabled": True,
        "fsdp_reshard_after_forward": True,
        "fsdp_degree": None,
        "dp_mode": "fsdp",
        "dp_replicate_degree": None,
        "tp_size": 1,
        "sequence_parallel": False,
        "loss_parallel": False,
        "pp_enabled": False,
        "pp_degree": None,
        "pp_microbatch_size": 1,
        "pp_schedule": "gpipe",
    }


def test_names() -> None:
    assert DP_MODES == ("fsdp", "ddp", "hsdp")
    assert PP_SCHEDULES[:2] == ("gpipe", "1f1b")
    assert set(PP_SCHEDULES) == set(SCHEDULES)


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ("fsdp", "fsdp"),
        (" DDP ", "ddp"),
        ("Hsdp\n", "hsdp"),
        ("fully_shard", "fsdp"),
        ("Replicate", "ddp"),
        (" HYBRID_SHARD", "hsdp"),
    ],
)
def test_mode_has_one_spelling(given: str, mode: str) -> None:
    assert normalize_dp_mode(given) == mode
    assert PassConfig(dp_mode=given).dp_mode == mode


@pytest.mark.parametrize("bad", ["zero3", "", "fsdp2", None, 1, True, ["fsdp"]])
def test_mode_is_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="fsdp, ddp, hsdp"):
        normalize_dp_mode(bad)


@pytest.mark.parametrize(
    ("given", "schedule"),
    [
        (" 1F1B ", "1f1b"),
        ("GPipe", "gpipe"),
        ("Interleaved1F1B", "interleaved_1f1b"),
        ("file:My Orders.csv", "file:My Orders.csv"),
        (" FILE: x.csv", "file:x.csv"),
    ],
)
def test_schedule_has_one_spelling(given: str, schedule: str) -> None:
    config = PassConfig()
    config.pp_schedule = given
    config.validate()
    assert config.pp_schedule == schedule


_SIZES = [0, -1, 1.0, "2", True, [2]]
BAD = {
    **dict.fromkeys(
        (
            "enable_overlap",
            "fsdp_enabled",
            "fsdp_reshard_after_forward",
            "sequence_parallel",
            "loss_parallel",
            "pp_enabled",
        ),
        [1, 0, None, "true", "auto"],
    ),
    **dict.fromkeys(("tp_size", "pp_microbatch_size"), [*_SIZES, None]),
    **dict.fromkeys(("fsdp_degree", "dp_replicate_degree", "pp_degree"), _SIZES),
    "dp_mode": ["zero", None, 3],
    "pp_schedule": ["1f1c", "file:", "file: ", "", None, 3],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
def test_bad_value_is_refused_when_made_and_when_changed(field: str, value: object) -> None:
    with pytest.raises(ValueError):
        PassConfig(**{field: value})
    config = PassConfig()
    config.validate()
    setattr(config, field, value)
    with pytest.raises(ValueError):
        config.validate()


def test_every_field_has_its_bad_values() -> None:
    assert set(BAD) == {field.name for field in dataclasses.fields(PassConfig)}


def config_of(**changes: object) -> TrainerConfig:
    """A TrainerConfig with `section__name=value` changes."""
    config = TrainerConfig()
    for key, value in changes.items():
        section, name = key.split("__")
        setattr(getattr(config, section), name, value)
    return config


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"fsdp_enabled": False, "fsdp_degree": None, "pp_schedule": "1f1b"}),
        ({"fsdp__dp_shard_size": 4}, {"fsdp_enabled": True, "fsdp_degree": 4, "dp_replicate_degree": None}),
        ({"fsdp__dp_shard_size": -1}, {"fsdp_enabled": True, "fsdp_degree": None}),
        ({"fsdp__edp_shard_size": 2}, {"fsdp_enabled": True, "fsdp_degree": 1}),
        ({"fsdp__dp_replicate_size": 2}, {"fsdp_enabled": False, "dp_replicate_degree": None}),
        (
            {"fsdp__dp_mode": "ddp", "fsdp__dp_replicate_size": 2},
            {"fsdp_enabled": True, "dp_mode": "ddp", "fsdp_degree": 1, "dp_replicate_degree": 2},
        ),
        (
            {"fsdp__dp_mode": "Hybrid_Shard", "fsdp__dp_replicate_size": 2, "fsdp__dp_shard_size": 3},
            {"fsdp_enabled": True, "dp_mode": "hsdp", "fsdp_degree": 3, "dp_replicate_degree": 2},
        ),
        ({"fsdp__dp_mode": "hsdp"}, {"fsdp_enabled": False, "fsdp_degree": None, "dp_replicate_degree": 1}),
        ({"fsdp__reshard_after_forward": "auto"}, {"fsdp_reshard_after_forward": True}),
        ({"accelerator__pp_size": 2}, {"fsdp_reshard_after_forward": False, "pp_enabled": True, "pp_degree": 2}),
        ({"accelerator__pp_size": 2, "fsdp__reshard_after_forward": True}, {"fsdp_reshard_after_forward": True}),
        ({"fsdp__reshard_after_forward": False}, {"fsdp_reshard_after_forward": False}),
        ({"accelerator__pp_size": 1}, {"pp_enabled": False, "pp_degree": None}),
        ({"pp__schedule": " GPIPE"}, {"pp_schedule": "gpipe"}),
        ({"trainer__micro_batch_size": 6}, {"pp_microbatch_size": 6}),
        ({"trainer__micro_batch_size": 6, "pp__microbatch_size": 3}, {"pp_microbatch_size": 3}),
        (
            {"accelerator__tp_size": 2, "accelerator__sequence_parallel": True, "accelerator__loss_parallel": True},
            {"tp_size": 2, "sequence_parallel": True, "loss_parallel": True},
        ),
    ],
)
def test_projection(changes: dict[str, object], expected: dict[str, object]) -> None:
    projected = build_pass_config_from_trainer_config(config_of(**changes))
    assert {name: getattr(projected, name) for name in expected} == expected
    assert projected.enable_overlap is False


def test_projection_of_any_object_takes_defaults_for_what_it_lacks() -> None:
    bare = SimpleNamespace(accelerator=SimpleNamespace(), fsdp_config=SimpleNamespace())
    assert build_pass_config_from_trainer_config(bare) == build_pass_config_from_trainer_config(TrainerConfig())
    some = SimpleNamespace(
        accelerator=SimpleNamespace(pp_size=4),
        fsdp_config=SimpleNamespace(dp_shard_size=2),
        pp_config=SimpleNamespace(microbatch_size=5, schedule="gpipe"),
    )
    projected = build_pass_config_from_trainer_config(some, enable_overlap=True)
    assert projected == PassConfig(
        enable_overlap=True,
        fsdp_reshard_after_forward=False,
        fsdp_degree=2,
        pp_enabled=True,
        pp_degree=4,
        pp_microbatch_size=5,
    )


@pytest.mark.parametrize("missing", ["accelerator", "fsdp_config"])
def test_projection_needs_both_sections(missing: str) -> None:
    config = SimpleNamespace(accelerator=SimpleNamespace(), fsdp_config=SimpleNamespace())
    delattr(config, missing)
    with pytest.raises(ValueError, match=missing):
        build_pass_config_from_trainer_config(config)


def test_given_intent_beats_the_sizes() -> None:
    on = build_pass_config_from_trainer_config(config_of(), fsdp_enabled=True)
    off = build_pass_config_from_trainer_config(config_of(fsdp__dp_shard_size=2), fsdp_enabled=False)
    assert (on.fsdp_enabled, on.fsdp_degree) == (True, 1)
    assert (off.fsdp_enabled, off.fsdp_degree) == (False, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"fsdp__dp_shard_size": 0},
        {"fsdp__dp_shard_size": "2"},
        {"fsdp__dp_shard_size": True},
        {"fsdp__dp_replicate_size": -1},
        {"fsdp__edp_shard_size": 1.5},
        {"fsdp__dp_mode": "zero"},
        {"fsdp__reshard_after_forward": "never"},
        {"fsdp__reshard_after_forward": 1},
        {"accelerator__pp_size": 0},
        {"accelerator__pp_size": "2"},
        {"accelerator__tp_size": None},
        {"accelerator__sequence_parallel": 1},
        {"pp__schedule": "1f1c"},
        {"pp__microbatch_size": 0},
        {"trainer__micro_batch_size": "4"},
    ],
)
def test_projection_of_bad_values_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        build_pass_config_from_trainer_config(config_of(**changes))


@pytest.mark.parametrize("bad", [1, "yes"])
def test_given_intent_is_a_boolean(bad: object) -> None:
    with pytest.raises(ValueError, match="fsdp_enabled"):
        build_pass_config_from_trainer_config(TrainerConfig(), fsdp_enabled=bad)


@pytest.mark.parametrize(
    ("given", "world_size", "degrees"),
    [
        ({}, 8, (8, 1, 1)),
        ({"fsdp_enabled": False}, 1, (1, 1, 1)),
        ({"tp_size": 2}, 8, (4, 1, 1)),
        ({"dp_mode": "ddp"}, 4, (1, 4, 1)),
        ({"dp_mode": "hsdp"}, 4, (4, 1, 1)),
        ({"dp_mode": "hsdp", "dp_replicate_degree": 2}, 8, (4, 2, 1)),
        ({"dp_mode": "hsdp", "fsdp_degree": 2}, 8, (2, 4, 1)),
        ({"pp_enabled": True, "pp_degree": 2}, 8, (4, 1, 2)),
        ({"pp_enabled": True, "fsdp_degree": 2}, 8, (2, 1, 4)),
        (
            {"dp_mode": "hsdp", "pp_enabled": True, "pp_degree": 2, "dp_replicate_degree": 2, "fsdp_degree": 2},
            8,
            (2, 2, 2),
        ),
    ],
)
def test_open_degrees_take_what_remains(given: dict[str, object], world_size: int, degrees: tuple[int, ...]) -> None:
    config = PassConfig(**given)
    resolved = resolve_degrees(config, world_size)
    assert (resolved.fsdp_degree, resolved.dp_replicate_degree, resolved.pp_degree) == degrees
    assert config == PassConfig(**given), "the argument stays as it was"
    assert resolve_degrees(resolved, world_size) == resolved


@pytest.mark.parametrize(
    ("given", "world_size"),
    [
        ({"fsdp_enabled": False}, 2),
        ({"fsdp_degree": 3}, 4),
        ({"tp_size": 3}, 8),
        ({"pp_enabled": True}, 8),
        ({"pp_degree": 2}, 8),
        ({"dp_mode": "ddp", "fsdp_degree": 2}, 4),
        ({"dp_replicate_degree": 2}, 4),
        ({}, 0),
        ({}, True),
    ],
)
def test_degrees_that_do_not_fit_are_refused(given: dict[str, object], world_size: int) -> None:
    with pytest.raises(ValueError):
        resolve_degrees(PassConfig(**given), world_size)
