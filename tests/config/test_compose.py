"""Composition: what beats what, where recipes are found, what is written down, and that everything shipped is sound."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from hp_train.commands.saved_run import changed
from hp_train.commands.train import job_faults, resolved
from hp_train.config.compose import compose
from hp_train.config.schema_tree import GROUPS, LEAVES
from hp_train.config.search_path import CONFIGS, RECIPES, description_of, is_recipe
from hp_train.config.validate import faults, warnings
from hp_train.config.yaml_check import FileCheck, _check_keys, _parse
from hp_train.errors import ConfigError
from hp_train.models.shapes import num_parameters
from hp_train.schedule import SCHEDULES, derive_stages_per_rank

RECIPE_NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HP_TRAIN_CONFIG_DIR", raising=False)
    return tmp_path


def write_recipe(folder: Path, text: str, name: str = "mine") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.yaml").write_text(f"# @package _global_\n# My own.\n{text}")


def test_command_line_beats_recipe_beats_groups(here: Path) -> None:
    plain, recipe = compose().config, compose(["recipe=llama_fsdp_pp"]).config
    typed = compose(["trainer.seq_len=64", "pp=gpipe", "recipe=llama_fsdp_pp"]).config
    assert plain.trainer.seq_len == 128 and plain.accelerator.pp_size == 1
    assert (recipe.accelerator.pp_size, recipe.fsdp.dp_shard_size, recipe.pp.schedule) == (2, 2, "1f1b")
    assert (typed.trainer.seq_len, typed.pp.schedule, typed.accelerator.pp_size) == (64, "gpipe", 2)


def test_a_recipe_sets_values_that_no_default_hides(here: Path) -> None:
    write_recipe(here / "recipes", "trainer: {max_steps: 7, log_every: 3}\noptimizer: {lr: 0.5}\n")
    config = compose(["recipe=mine"]).config
    assert (config.trainer.max_steps, config.trainer.log_every, config.optimizer.lr) == (7, 3, 0.5)


def test_a_recipe_builds_on_another(here: Path) -> None:
    write_recipe(here / "recipes", "defaults: [llama_hsdp, override /fsdp: ddp, _self_]\nfsdp: {dp_shard_size: 1}\n")
    config = compose(["recipe=mine"]).config
    assert (config.fsdp.dp_mode, config.fsdp.dp_replicate_size, config.trainer.max_steps) == ("ddp", 2, 560)


@pytest.mark.parametrize("subfolder", ["", "recipe", "recipes"])
@pytest.mark.parametrize("origin", ["here", "environment", "argument"])
def test_own_recipes_are_found(here: Path, monkeypatch: pytest.MonkeyPatch, origin: str, subfolder: str) -> None:
    folder = here / ("recipes" if origin == "here" else "elsewhere")
    write_recipe(folder / subfolder, "trainer: {max_steps: 9}\n")
    if origin == "environment":
        monkeypatch.setenv("HP_TRAIN_CONFIG_DIR", str(folder))
    composition = compose(["recipe=mine"], config_dir=str(folder) if origin == "argument" else None)
    assert composition.config.trainer.max_steps == 9
    assert composition.recipe == "mine"


def test_own_option_of_a_group(here: Path) -> None:
    (here / "conf" / "model").mkdir(parents=True)
    (here / "conf" / "model" / "wide.yaml").write_text("dim: 512\nnum_heads: 8\n")
    assert compose(["model=wide"], config_dir="conf").config.model.dim == 512


def test_own_recipe_beats_the_packaged_one_of_the_same_name(here: Path) -> None:
    write_recipe(here / "recipes", "trainer: {max_steps: 11}\n", name="llama_ddp")
    assert compose(["recipe=llama_ddp"]).config.trainer.max_steps == 11


def test_the_last_of_equal_arguments_counts(here: Path) -> None:
    config = compose(["fsdp=ddp", "trainer.seed=1", "fsdp=hsdp", "trainer.seed=2"]).config
    assert (config.fsdp.dp_mode, config.trainer.seed) == ("hsdp", 2)


def test_plus_before_a_known_key_changes_nothing(here: Path) -> None:
    assert (
        compose(["+trainer.seed=3", "++optimizer.lr=0.1"]).config
        == compose(["trainer.seed=3", "optimizer.lr=0.1"]).config
    )


def test_interpolations_are_resolved(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", "17")
    monkeypatch.setenv("YES", "true")
    config = compose(
        ["trainer.max_steps=${oc.env:STEPS}", "trainer.compile=${oc.env:YES}", "trainer.eval_every=${.max_steps}"]
    ).config
    assert (config.trainer.max_steps, config.trainer.compile, config.trainer.eval_every) == (17, True, 17)


@pytest.mark.parametrize(
    ("arguments", "scaling"),
    [
        (["model.rope_scaling.factor=9"], (9.0, 1.0)),
        (["model.rope_scaling={factor:9,low_freq_factor:2}"], (9.0, 2.0)),
        (["model=llama3_2_1b", "model.rope_scaling.low_freq_factor=2", "data=random"], (32.0, 2.0)),
        (["model=llama3_8b", "model.rope_scaling=null", "data=random"], None),
    ],
)
def test_a_group_that_may_be_null(here: Path, arguments: list[str], scaling: tuple[float, float] | None) -> None:
    found = compose(arguments).config.model.rope_scaling
    assert (found and (found.factor, found.low_freq_factor)) == scaling


def test_an_escaped_interpolation_is_text(here: Path) -> None:
    assert compose([r"trainer.run_name='\${x}'"]).config.trainer.run_name == "${x}"


def test_interpolation_in_a_list_and_of_a_count(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("N", "1")
    config = compose(["optimizer.betas=[0.9,${model.norm_eps}]", "launcher.nproc_per_node=${oc.env:N}"]).config
    assert (config.optimizer.betas, config.launcher.nproc_per_node) == ([0.9, 1e-5], 1)


def test_null_is_no_recipe(here: Path) -> None:
    with pytest.raises(ConfigError, match="recipe=null names no recipe; leave it out"):
        compose(["recipe=null"])


def test_names_get_one_spelling(here: Path) -> None:
    config = compose(["fsdp.dp_mode=Fully_Shard", "pp.schedule=GPipe"]).config
    assert (config.fsdp.dp_mode, config.pp.schedule) == ("fsdp", "gpipe")


@pytest.mark.parametrize("mode", ["fsdp", "ddp", "hsdp"])
def test_fsdp_options_set_the_mode(here: Path, mode: str) -> None:
    assert compose([f"fsdp={mode}"]).config.fsdp.dp_mode == mode


def test_there_is_an_option_for_every_schedule() -> None:
    assert {path.stem for path in (CONFIGS / "pp").glob("*.yaml")} == set(SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_pp_options_set_schedule_and_stages(here: Path, name: str) -> None:
    pp = compose([f"pp={name}"]).config.pp
    assert pp.schedule == name
    assert (pp.stages_per_rank or derive_stages_per_rank(name)) == derive_stages_per_rank(name)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_alone_derives_its_stages(here: Path, name: str) -> None:
    typed = ["accelerator.pp_size=2", "model.num_layers=8", "trainer.device=cpu"]
    assert compose([*typed, f"pp.schedule={name}"]).config.pp.schedule == name


def test_composing_what_was_written_down_gives_the_same(here: Path) -> None:
    first = compose(["recipe=llama_fsdp_pp", "pp=gpipe", "trainer.run_name='a b'", "optimizer.betas=[0.8,0.9]"])
    assert compose(first.overrides).config == first.config


def test_all_faults_are_raised_at_once(here: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["trainer.max_stepz=3", "trainer.seed=-1", "model.num_kv_heads=3"])
    assert [message.split()[0] for message in caught.value.messages] == [
        "unknown",
        "trainer.seed=-1",
        "model.num_kv_heads=3",
    ]


def test_a_fault_does_not_hide_behind_its_echo(here: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["recipe=llama_fsdp_pp", "fsdp.dp_shard_sise=4", "trainer.global_batch_size=18"])
    assert len(caught.value.messages) == 1, "the batch is cut by a size that is not known"


# --- what ships -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*CONFIGS.glob("*/*.yaml"), *RECIPES.glob("*.yaml")], ids=lambda path: path.stem)
def test_shipped_files_are_sound(path: Path) -> None:
    check = FileCheck()
    document = _parse(path, check)
    if document is not None:
        group = path.parent.name if path.parent.name in GROUPS else ""
        _check_keys(path, *document, f"{group}." if group else "", "", check)
    assert check.faults == []


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_recipes_are_sound_given_data(here: Path, name: str) -> None:
    config = compose([f"recipe={name}", "data=random"]).config
    assert is_recipe(RECIPES / f"{name}.yaml") and description_of(RECIPES / f"{name}.yaml")
    assert faults(config) == [] and warnings(config) == []


@pytest.mark.parametrize("name", [name for name in RECIPE_NAMES if not name.startswith("llama_")])
def test_a_recipe_without_data_says_what_to_do(here: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="data prepare .*data=random"):
        compose([f"recipe={name}"])


@pytest.mark.parametrize("name", [name for name in RECIPE_NAMES if name.startswith("llama_")])
def test_small_recipes_run_anywhere_on_a_cpu(here: Path, name: str) -> None:
    assert job_faults(compose([f"recipe={name}", "trainer.device=cpu"])) == []


def test_the_first_recipe_trains_long_enough() -> None:
    config = compose(["recipe=llama_fsdp_pp"]).config
    assert config.trainer.max_steps >= 500
    assert num_parameters(config.model) >= 500_000
    assert (config.accelerator.pp_size, config.fsdp.dp_shard_size, config.trainer.device) == (2, 2, "auto")


@pytest.mark.parametrize(
    ("option", "count"),
    [
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("llama3_405b", 405_853_388_800),
        ("llama3_2_1b", 1_235_814_400),
        ("smollm2_135m", 134_515_008),
    ],
)
def test_model_options_have_the_published_sizes(here: Path, option: str, count: int) -> None:
    assert num_parameters(compose([f"model={option}", "data=random"]).config.model) == count


# --- rules and warnings -----------------------------------------------------------------------------------------------


def test_all_shards_are_counted_by_the_processes_asked_for(here: Path) -> None:
    config = compose(["fsdp.dp_shard_size=-1", "launcher.nproc_per_node=4", "trainer.device=cpu"]).config
    assert resolved(config).fsdp.dp_shard_size == 4


def test_a_config_that_was_changed_by_hand_is_judged(here: Path) -> None:
    config = compose(["recipe=llama_pp"]).config
    assert faults(config) == []
    config.trainer.global_batch_size = 6
    config.trainer.micro_batch_size = 4
    [fault] = faults(config)
    assert fault.startswith("trainer.global_batch_size=6")


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ("pp=gpipe", "pp.schedule"),
        ("pp.layer_split=[4]", "pp.layer_split"),
        ("accelerator.loss_parallel=true", "accelerator.loss_parallel"),
        ("accelerator.sequence_parallel=true", "accelerator.sequence_parallel"),
        ("fsdp=ddp fsdp.reshard_after_forward=true", "fsdp.reshard_after_forward"),
        ("fsdp.reshard_after_forward=false", "fsdp.reshard_after_forward"),
        ("trainer.eval_batches=3", "trainer.eval_batches"),
        ("optimizer=sgd optimizer.eps=1e-6", "optimizer.eps"),
        ("lr_scheduler=constant lr_scheduler.min_lr_ratio=0.2", "lr_scheduler.min_lr_ratio"),
        ("activation_checkpoint.every=2", "activation_checkpoint.every"),
        ("checkpoint.every=0 checkpoint.every_minutes=5", "checkpoint.every_minutes"),
        ("data=random data.path=x", "data.path"),
        ("trainer.run_dir=x trainer.run_name=y", "trainer.run_name"),
        ("lr_scheduler.warmup_steps=1000", "lr_scheduler.name"),
    ],
)
def test_a_setting_without_effect_warns(here: Path, arguments: str, key: str) -> None:
    found = warnings(compose(arguments.split()).config)
    assert len(found) == 1 and found[0].startswith(f"{key}=") and "has no effect" in found[0]


# --- resuming ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_dir(here: Path) -> Path:
    """A run of llama_fsdp_pp with max_steps=5, as the launcher writes it down."""
    first = compose(["recipe=llama_fsdp_pp", "trainer.max_steps=5", "trainer.seed=7"])
    folder = here / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(first.config)))
    (folder / "overrides.yaml").write_text(yaml.safe_dump({"recipe": first.recipe, "overrides": list(first.overrides)}))
    return folder


def test_resume_without_changes_is_the_same_config(run_dir: Path) -> None:
    job = changed(run_dir, [])
    assert job.faults == () and job.recipe == "llama_fsdp_pp"
    assert job.config == compose(["recipe=llama_fsdp_pp", "trainer.max_steps=5", "trainer.seed=7"]).config


def test_plain_keys_change_the_config_that_was_saved(run_dir: Path) -> None:
    saved = yaml.safe_load((run_dir / "config.yaml").read_text())
    saved["optimizer"]["lr"] = 0.25  # a person edited it
    (run_dir / "config.yaml").write_text(yaml.safe_dump(saved))
    config = changed(run_dir, ["trainer.max_steps=10", "model.rope_scaling.factor=3"]).config
    assert (config.trainer.max_steps, config.optimizer.lr, config.trainer.seed) == (10, 0.25, 7)
    assert config.model.rope_scaling is not None and config.model.rope_scaling.factor == 3


def test_a_group_composes_anew_from_what_was_typed(run_dir: Path) -> None:
    config = changed(
        run_dir, ["fsdp=ddp", "fsdp.dp_shard_size=1", "fsdp.dp_replicate_size=2", "trainer.max_steps=10"]
    ).config
    assert (config.fsdp.dp_mode, config.fsdp.dp_replicate_size, config.trainer.max_steps, config.trainer.seed) == (
        "ddp",
        2,
        10,
        7,
    )
    assert config.accelerator.pp_size == 2


def test_resume_is_checked_as_a_new_run_is(run_dir: Path) -> None:
    messages = changed(run_dir, ["trainer.global_batch_size=18", "trainer.max_stepz=3", "trainer.seed=x"]).messages
    assert [message.split()[0] for message in messages] == ["unknown", "trainer.seed=x", "trainer.global_batch_size=18"]


def test_every_leaf_survives_being_saved(run_dir: Path) -> None:
    saved = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert {key.split(".")[0] for key in LEAVES} == set(saved)
