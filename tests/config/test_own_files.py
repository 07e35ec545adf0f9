"""A person's own recipes and options: where they are found, what they may build on, what is told of broken ones."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from hp_train.commands import explain, new, recipes
from hp_train.commands.saved_run import changed
from hp_train.config.compose import Composition, compose, examine
from hp_train.config.paths import with_absolute_paths
from hp_train.config.provenance import trace
from hp_train.config.schema_tree import LEAVES, value_at
from hp_train.config.search_path import RECIPE_GROUP, RECIPES, search_path
from hp_train.errors import ConfigError
from hp_train.launch.start import _overrides_yaml, _to_yaml

SHIPPED = sorted(path.stem for path in RECIPES.glob("*.yaml"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HP_TRAIN_CONFIG_DIR", raising=False)
    return folder


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def seed_of(*overrides: str) -> int:
    return compose(overrides).config.trainer.seed


def test_the_folders_in_their_order(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [
        tmp_path / "home/hp-train/recipes", here / "recipes", here / "configs/recipe", tmp_path / "env",
        tmp_path / "cd",
    ]  # fmt: skip
    for seed, folder in enumerate(places, 1):
        write(folder / "mine.yaml", f"trainer: {{seed: {seed}}}\n")
        if folder.name == "env":
            monkeypatch.setenv("HP_TRAIN_CONFIG_DIR", str(folder))
        if folder.name != "cd":
            assert seed_of("recipe=mine") == seed
    assert compose(["recipe=mine"], str(tmp_path / "cd")).config.trainer.seed == 5


@pytest.mark.parametrize("group", ["model", "optimizer", "trainer", "checkpoint", "launcher"])
def test_options_of_every_group(group: str, here: Path) -> None:
    key = next(leaf for leaf in LEAVES.values() if leaf.section == group and {int, float} & set(leaf.kinds))
    write(here / f"configs/{group}/mine.yaml", f"{key.key.partition('.')[2]}: 3\n")
    assert value_at(examine([f"{group}=mine"]).config, key.key) == 3


def test_files_of_other_programs_are_no_recipes(here: Path) -> None:
    write(here / "configs/deploy.yaml", "services: {web: 1}\n")
    write(here / "configs/mine.yaml", "# @package _global_\ntrainer: {seed: 2}\n")
    assert sorted({*search_path().options_of(RECIPE_GROUP)} - {*SHIPPED}) == ["mine"]


def test_a_recipe_by_its_path_and_what_lies_beside_it(here: Path) -> None:
    write(here / "sub dir/mine.yaml", "defaults: [base, _self_]\ntrainer: {seed: 3}\n")
    write(here / "sub dir/base.yaml", "defaults: [llama_pp]\ntrainer: {seed: 4, log_every: 5}\n")
    job = compose(["recipe=./sub dir/mine.yaml"])
    trainer = job.config.trainer
    assert (trainer.seed, trainer.log_every, job.config.accelerator.pp_size, job.recipe) == (3, 5, 2, "mine")
    assert job.overrides == (f"recipe={here}/sub dir/mine.yaml",), "the same from any folder"


def test_a_run_of_a_recipe_by_its_path_is_changed_from_another_folder(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(here / "mine.yaml", "trainer: {seed: 3}\n")
    job = compose(["recipe=mine.yaml"])
    write(tmp_path / "run/config.yaml", _to_yaml(with_absolute_paths(job.config)))
    write(tmp_path / "run/overrides.yaml", _overrides_yaml(job.recipe or "", list(job.overrides), job.config))
    monkeypatch.chdir(tmp_path)
    config = changed(tmp_path / "run", ["optimizer=sgd"]).config
    assert (config.trainer.seed, config.optimizer.name) == (3, "sgd")


def test_a_hidden_recipe_is_told_and_can_be_built_on(here: Path) -> None:
    write(here / "recipes/llama_single.yaml", "defaults: [llama_single]\ntrainer: {seed: 9}\n")
    write(here / "recipes/model/llama_tiny.yaml", "dim: 64\n")
    job = compose(["recipe=llama_single"])
    assert (job.config.trainer.seed, job.config.trainer.max_steps, job.config.model.dim) == (9, 560, 64)
    assert job.notes == (
        "recipe=llama_single is recipes/llama_single.yaml, not the one that ships with hp-train",
        "model=llama_tiny is recipes/model/llama_tiny.yaml, not the one that ships with hp-train",
    )
    assert compose(["recipe=llama_pp"]).config.trainer.seed == 9, "recipes that build on it get it, too"


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("../config", "is a path; give a name, or the path of a .yaml file"), ("/etc/passwd", "is a path"),
        ("~/x", "is a path"), ("./nope.yaml", "there is no such file"), ("llama_pp.yaml", "did you mean llama_pp?"),
    ],
)  # fmt: skip
def test_a_name_stays_in_its_folder(typed: str, words: str, here: Path) -> None:
    with pytest.raises(ConfigError, match=f"^recipe={typed}.*{words}".replace("?", r"\?")):
        compose([f"recipe={typed}"])


@pytest.mark.parametrize("broken", ["recipe=typo", "recipe=broken"])
def test_an_unusable_recipe_hides_no_other_fault(broken: str, here: Path) -> None:
    write(here / "recipes/broken.yaml", "trainer: [\n")
    with pytest.raises(ConfigError) as caught:
        compose([broken, "trainer.seed=-1", "optimizer.lr=fast", "model.dim=10", "model.num_heads=3", "fsdp=dpp"])
    starts = [message.split()[0] for message in caught.value.messages]
    told = {"optimizer.lr=fast", "fsdp=dpp", "trainer.seed=-1", "model.num_heads=3"}
    assert told <= set(starts) and len(starts) == len(told) + 1, starts


BROKEN = {
    "keys": ("nope: 1\ntrainer: {seed: x}\n", "recipes/keys.yaml:1: unknown key nope"),
    "yaml": ("a: [\n", "recipes/yaml.yaml:2: not YAML"),
    "empty": ("", "recipes/empty.yaml is empty"),
    "base": ("defaults: [nix]\n", "recipes/base.yaml:1: recipe=nix is no recipe"),
    "rule": ("model: {dim: 10, num_heads: 4}\n", "recipes/rule.yaml: model.num_heads=4 does not divide"),
    "bounds": ("trainer: {seed: -1}\n", "recipes/bounds.yaml: trainer.seed=-1 is out of bounds"),
    "package": ("# @package model\ndim: 3\n", "recipes/package.yaml: `# @package model` has no effect"),
    "bytes": (b"\xff\xfe\x00", "recipes/bytes.yaml cannot be read"),
}


def test_recipes_says_which_own_file_is_broken_and_why(here: Path, capsys: pytest.CaptureFixture) -> None:
    for name, (text, _) in BROKEN.items():
        write(here / f"recipes/{name}.yaml", "").write_bytes(text if isinstance(text, bytes) else text.encode())
    (here / "recipes/folder.yaml").mkdir()
    write(here / "recipes/good.yaml", "# Fine.\ndefaults: [llama_pp]\n")
    assert recipes.run(argparse.Namespace(config_dir=None)) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    for name, (_, words) in BROKEN.items():
        assert rows[name].split()[1] == "broken" and words in rows[name], rows[name]
    assert "recipes/folder.yaml cannot be read" in rows["folder"]
    assert rows["good"].split()[2:] == ["2", "Fine.", "(recipes/good.yaml)"]
    assert not any("broken" in rows[name] for name in SHIPPED)


def namespace(name: str, base: str) -> argparse.Namespace:
    return argparse.Namespace(name=name, base=base, to="recipes")


def examined(recipe: str) -> Composition:
    return examine([f"recipe={recipe}"])


@pytest.mark.parametrize("base", ["llama3_8b_fsdp", "llama_pp_swap"])
def test_a_new_recipe_is_the_old_one_with_words(base: str, here: Path, capsys: pytest.CaptureFixture) -> None:
    assert new.run(namespace("mine", base)) == 0
    assert examined("mine").config == examined(base).config
    text = (here / "recipes/mine.yaml").read_text()
    assert f"  - {base}  #" in text and "  # Peak learning rate. Number;" in text
    write(here / "recipes/changed.yaml", text.replace("# - override", "- override"))
    assert examined("changed").config.fsdp.dp_mode == "ddp", "the choices offered can be taken"
    assert "hp-train recipe=mine" in capsys.readouterr().out


def test_a_new_recipe_is_refused(here: Path) -> None:
    write(here / "recipes/there.yaml", "trainer: {seed: 1}\n")
    for name, base, words in [
        ("../x", "llama_pp", "not a plain name"), ("x.yaml", "llama_pp", "not a plain name"),
        ("there", "llama_pp", "exists already"), ("x", "llama_p", "did you mean llama_pp"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            new.run(namespace(name, base))
    assert [path.name for path in here.rglob("*.yaml")] == ["there.yaml"]


FILES = {
    "recipes/late.yaml": "defaults: [_self_, llama_pp]\ntrainer: {seed: 5, max_steps: 3}\n",
    "recipes/deep.yaml": "defaults:\n- override /model: scaled\n- late\n- override /pp: gpipe\noptimizer: {lr: 0.1}\n",
    "configs/model/scaled.yaml": "dim: 64\nrope_scaling: {factor: 4.0}\n",
}


@pytest.mark.parametrize(
    "overrides",
    [*([f"recipe={name}"] for name in [*SHIPPED, "late", "deep"]), ["recipe=deep", "pp=zbv", "model.dim=32"]],
    ids=" ".join,
)  # fmt: skip
def test_what_is_explained_is_what_is_composed(overrides: list[str], here: Path) -> None:
    for name, text in FILES.items():
        write(here / name, text)
    config = examine(overrides).config
    by_key = trace(overrides, search_path()).by_key()
    for key in LEAVES:
        explained = by_key[key][-1].value if key in by_key else None
        assert value_at(config, key) == explained, key


def test_explain_tells_the_chain(here: Path, capsys: pytest.CaptureFixture) -> None:
    for name, text in FILES.items():
        write(here / name, text)
    words = ["recipe=deep", "trainer.seed=7", "trainer.seq_len=${model.dim}", "trainer.run_dir=~/x"]
    assert (
        explain.run(
            argparse.Namespace(words=[*words, "trainer.seed", "trainer.seq_len", "model.dim", "pp"], config_dir=None)
        )
        == 0
    )
    out = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert out[0] == "trainer.seed=7"
    base = "5 recipes/late.yaml:2 recipe late, which deep builds on"
    chain = ["7 command line trainer.seed=7", base, "0 schema the default"]
    assert out[out.index("from, the first holds:") + 1 :][:3] == chain
    assert "64 derived what ${model.dim} refers to" in out
    assert "64 configs/model/scaled.yaml:1 model=scaled, chosen by recipes/deep.yaml:2" in out
    assert "pp=gpipe, chosen by recipes/deep.yaml:4 (recipe deep)" in out
    with pytest.raises(ConfigError, match="unknown key trainer.sed.*trainer.seed"):
        explain.run(argparse.Namespace(words=["trainer.sed"], config_dir=None))
