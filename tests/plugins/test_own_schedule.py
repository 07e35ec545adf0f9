"""A person's own pipeline schedule: known by name to config, command and plan once its plugin is loaded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hp_train import plugins, registry
from hp_train.commands import schedule as command
from hp_train.commands.candidates import candidates
from hp_train.commands.verb_parser import parser_of
from hp_train.compile.pass_config import PP_SCHEDULES, PassConfig, build_pass_config_from_trainer_config
from hp_train.config.compose import compose, examine
from hp_train.config.schema_tree import extend
from hp_train.config.validate import warnings
from hp_train.errors import ConfigError, ScheduleError
from hp_train.pipeline_plan import plan_pipeline
from hp_train.schedule import SCHEDULES, MetaStep, MetaStepType, Schedule, build_schedule, normalize_schedule_name
from tests.plugins.test_plugins import SCHEDULE, forget

PIPELINE = ["recipe=llama_pp", "trainer.device=cpu"]
OWN = [*PIPELINE, "pp.schedule=ahead_1f1b"]


@pytest.fixture
def loaded() -> Iterator[None]:
    plugins.load_all([SCHEDULE])
    yield
    forget()


def run(*words: str) -> int:
    return command.run(parser_of("schedule").parse_args(words))


def test_its_name_is_valid_wherever_a_schedule_is_named(loaded: None) -> None:
    config = compose([*OWN, "pp.ahead_1f1b.forwards=2"]).config
    projected = build_pass_config_from_trainer_config(config)
    assert (projected.pp_schedule, projected.pp_degree) == ("ahead_1f1b", 2)
    assert PassConfig(pp_schedule=" Ahead-1F1B ").pp_schedule == "ahead_1f1b"
    assert PP_SCHEDULES == tuple(SCHEDULES), "those built in, whatever is loaded"
    assert ("pp.schedule=ahead_1f1b", "") in candidates(["pp.schedule=a"])


def test_without_its_plugin_the_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"no schedule is named 'ahead_1f1b'; did you mean 1f1b\? use one of gpipe, "):
        PassConfig(pp_schedule="ahead_1f1b")
    [fault] = examine(OWN).messages
    assert fault.startswith("pp.schedule=ahead_1f1b is no schedule")
    assert fault.endswith(f"; use {', '.join(SCHEDULES)} or file:PATH")


def test_it_is_built_with_its_settings_and_proven(loaded: None) -> None:
    config = compose([*OWN, "pp.ahead_1f1b.forwards=2"]).config
    plan = plan_pipeline(config, num_microbatches=6)
    assert "".join(step.type.value for step in plan.schedule.orders[1] if step.computes) == "FFFBFBFBFBBB"
    # With nothing ahead it is 1f1b.
    plain, ours = [*OWN, "pp.ahead_1f1b.forwards=0"], [*PIPELINE, "pp.schedule=1f1b"]
    assert plan_pipeline(compose(plain).config, 6).schedule == plan_pipeline(compose(ours).config, 6).schedule


def test_the_command_lists_shows_and_proves_it(loaded: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list") == 0
    assert "ahead_1f1b        1f1b with forwards run ahead to hide slow transfers (1 stage a rank; settings below " in (
        capsys.readouterr().out
    )
    sizes = ("--pp", "4", "--microbatches", "8")
    assert run("verify", "ahead_1f1b", *sizes) == 0
    assert capsys.readouterr().out.count("peak activations per rank: 5 4 3 2") == 4, "one more than 1f1b holds"
    assert run("verify", "ahead_1f1b", *sizes, "--set", "pp.ahead_1f1b.forwards=3", "--transport", "batch") == 0
    assert "peak activations per rank: 7 6 5 4" in capsys.readouterr().out
    with pytest.raises(ScheduleError, match="^--set trainer.seed=1: schedule ahead_1f1b takes settings below pp.ahead"):
        run("show", "ahead_1f1b", *sizes, "--set", "trainer.seed=1")
    with pytest.raises(ScheduleError, match="schedule 1f1b has no settings"):
        run("show", "1f1b", *sizes, "--set", "pp.1f1b.x=1")
    with pytest.raises(ConfigError, match="pp.ahead_1f1b.forwards=65 is out of bounds; use 0 to 64"):
        run("show", "ahead_1f1b", *sizes, "--set", "pp.ahead_1f1b.forwards=65")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["pp.schedule=ahead_1f1bb"], "pp.schedule=ahead_1f1bb is no schedule (did you mean ahead_1f1b?); use gpipe, "),
        (["pp.ahead_1f1b.forwards=-1"], "pp.ahead_1f1b.forwards=-1 is out of bounds; use 0 to 64"),
        (["pp.ahead_1f1b.forward=1"], "unknown key pp.ahead_1f1b.forward (did you mean pp.ahead_1f1b.forwards?)"),
        (["pp.stages_per_rank=2"], "pp.schedule: stages_per_rank=2 is not 1"),
    ],
)
def test_what_is_wrong_is_one_line(loaded: None, words: list[str], says: str) -> None:
    [fault] = examine([*OWN, *words]).messages
    assert fault.startswith(says)


def test_settings_that_no_schedule_reads_are_told(loaded: None) -> None:
    settings = "pp.ahead_1f1b.forwards=3"
    assert warnings(compose([*PIPELINE, settings]).config) == [
        f"{settings} has no effect: pp.schedule=1f1b does not read it"
    ]
    assert f"{settings} has no effect: accelerator.pp_size=1 makes no pipeline" in warnings(
        compose(["recipe=llama_single", "trainer.device=cpu", "pp.schedule=ahead_1f1b", settings]).config
    )


def one_forward(rank: int) -> tuple[MetaStep, ...]:
    return (MetaStep(0, MetaStepType.FWD, rank), MetaStep(0, MetaStepType.BWD, rank))


def crossed(own: None, pp_size: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """Each rank waits for the other: backward before forward."""
    orders = build_schedule("gpipe", pp_size, num_microbatches).orders
    return Schedule(tuple(order[::-1] for order in orders), pp_size, tuple(range(pp_size)), num_microbatches)


BUILDERS = {
    "raises": (lambda *_: {}["x"], "pp.schedule: raises: <lambda>(None, 2, 4, 1) raised KeyError: 'x'; a builder "),
    "no_schedule": (lambda *_: 3, "pp.schedule: no_schedule: returned int, not a Schedule"),
    "not_there": ("tests.plugins.nowhere:build", "pp.schedule: not_there: can't be imported: No module named"),
    "no_function": ("tests.plugins.own_schedule:make", "pp.schedule: no_function: module tests.plugins.own"),
    "other_sizes": (
        lambda own, pp, m, v: build_schedule("gpipe", pp + 1, m),
        "pp.schedule: other_sizes: returned a Schedule of 3 ranks where 2 were asked for",
    ),
    "uneven": (
        lambda own, pp, m, v: Schedule((one_forward(0), one_forward(1)), 3, (0, 1, 1), m),
        "pp.schedule: uneven: returned a Schedule of 1 or 2 stages a rank where 1 were asked for",
    ),
    "halves": (
        lambda own, pp, m, v: build_schedule("zb_h1", pp, m),
        "activation_checkpoint.mode=selective does not work with pp.schedule=halves, which runs the two halves",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BUILDERS)
def test_a_builder_at_fault_is_one_line(loaded: None, name: str) -> None:
    build, says = BUILDERS[name]
    registry.register_pp_schedule(name, build=build)
    extend()
    selective = ["activation_checkpoint.mode=selective"] if name == "halves" else []
    [fault] = examine([*PIPELINE, f"pp.schedule={name}", *selective]).messages
    assert fault.startswith(says)


def test_one_that_would_hang_is_refused_and_a_name_of_ours_is_not_given_away(loaded: None) -> None:
    registry.register_pp_schedule("crossed", build=crossed)
    extend()
    config = compose([*PIPELINE, "pp.schedule=crossed"]).config
    with pytest.raises(ScheduleError, match="^pp.schedule=crossed: deadlock: rank 0 step 0 0B3 waits for"):
        plan_pipeline(config, 4)
    with pytest.raises(ScheduleError, match="schedule ahead_1f1b is a plugin's, which open_schedule builds"):
        build_schedule("ahead_1f1b", 2, 4)
    with pytest.raises(ConfigError, match="stages_per_rank=0 must be an integer of at least 1"):
        registry.register_pp_schedule("other", build=crossed, stages_per_rank=0)
    registry.register_pp_schedule("g_pipe", build=crossed)
    registry.register_optimizer("adamw", build=crossed, state_bytes=0)
    with pytest.raises(ConfigError) as refused:
        extend()
    assert refused.value.messages == tuple(
        f"plugin: {choice} is built into hp-train; take another name"
        for choice in ("pp.schedule=g_pipe", "optimizer.name=adamw")
    )
    assert normalize_schedule_name("g_pipe") == "gpipe"
