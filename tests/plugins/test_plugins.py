"""A person's own model, optimizer, loss, data and learning rate: chosen by name, typed, the same on a mesh."""

from __future__ import annotations

import argparse
import json
import math
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hp_train import plugins, registry
from hp_train.checkpoint.size import checkpoint_bytes
from hp_train.commands import explain, rerun
from hp_train.config import schema_tree
from hp_train.config.compose import compose, examine
from hp_train.config.help_text import field_documents
from hp_train.config.schema_tree import LEAVES, config_class
from hp_train.errors import ConfigError
from hp_train.launch.capsule import recorded_plugins
from hp_train.launch.start import _to_yaml
from hp_train.launch.worker import load_config
from hp_train.models.shapes import num_parameters, parameter_shapes
from hp_train.pretrained.run_config import newest_config
from tests.distributed.ranks import run_ranks
from tests.distributed.same_numbers import SGD, TINY, Numbers, differences, run_one

MODEL, PARTS, SCHEDULE = "tests.plugins.gated_conv", "tests.plugins.small_parts", "tests.plugins.own_schedule"
GATED = {**TINY, **SGD, "model.name": "gated_conv", "model.gated_conv.kernel_size": 3}
ALL_PARTS = {
    **TINY, "optimizer.name": "sign_sgd", "optimizer.lr": 0.01, "trainer.loss": "penalised", "data.name": "counts",
    "lr_scheduler.name": "halved", "trainer.max_steps": 3, "checkpoint.every": 2,
}  # fmt: skip


@pytest.fixture
def loaded() -> Iterator[None]:
    plugins.load_all([MODEL, PARTS])
    yield
    forget()


def forget() -> None:
    registry.forget()
    plugins._loaded.clear()
    schema_tree.extend()
    for name in (MODEL, PARTS, SCHEDULE):
        sys.modules.pop(name, None)


def config_of(values: dict) -> object:
    tree = OmegaConf.structured(config_class())
    for key, value in values.items():
        OmegaConf.update(tree, key, value)
    return OmegaConf.to_object(tree)


def train_one(rank: int, world_size: int, root: Path, values: dict, names: list[str]) -> Numbers | None:
    plugins.load_all(names)
    try:
        return run_one(rank, world_size, root / f"world_{world_size}", config_of(values))
    finally:
        forget()


def test_a_model_and_a_schedule_of_someone_else_train_to_the_same_numbers_on_pp_2_x_fsdp_2(tmp_path: Path) -> None:
    mesh = {"accelerator.pp_size": 2, "fsdp.dp_shard_size": 2, "pp.schedule": "ahead_1f1b"}
    alone = run_ranks(1, train_one, tmp_path, GATED, [MODEL])[0]
    cut = run_ranks(4, train_one, tmp_path, {**GATED, **mesh}, [MODEL, SCHEDULE])[0]
    assert differences(alone, cut, sgd=True) == []
    assert len(alone.weights) == 2 + 2 * TINY["model.num_layers"]
    assert all(gradient.norm() > 0 for gradient in cut.gradients.values())


def resumed(rank: int, world_size: int, root: Path, values: dict) -> tuple[Numbers, Numbers]:
    first = train_one(rank, world_size, root, values, [PARTS])
    second = train_one(rank, world_size, root, {**values, "trainer.max_steps": 5}, [PARTS])
    return first, second


def test_the_other_kinds_train_and_are_saved(tmp_path: Path) -> None:
    first, second = run_ranks(1, resumed, tmp_path, ALL_PARTS)[0]
    rows = [json.loads(line) for line in (tmp_path / "world_1/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5] and {row["lr"] for row in rows} == {0.005}
    assert rows[-1]["loss"] < rows[0]["loss"]
    uniform = math.log(TINY["model.vocab_size"])  # what the first weights come to, within 0.1 nats
    assert rows[0]["loss"] == pytest.approx(uniform + 0.01 * uniform**2, abs=0.1), "the penalty counts"
    assert first.losses == second.losses[:3]


def test_the_docs_show_the_model_as_it_is_and_it_takes_60_lines() -> None:
    text = Path(__file__).with_name("gated_conv.py").read_text()
    assert len(text.splitlines()) <= 60
    shown = textwrap.indent(text, "    ", lambda line: bool(line.strip()))
    assert shown in (Path(__file__).parents[2] / "docs/plugins.md").read_text()


def test_shapes_tell_the_module(loaded: None) -> None:
    import torch

    model = config_of(GATED).model
    component = registry.find("model", "gated_conv")
    with torch.device("meta"):
        module = registry.resolve(component.build)(
            model, layers=range(4), embedding=True, head=True, loss_chunk_tokens=0
        )  # fmt: skip
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == parameter_shapes(model)
    assert num_parameters(model) == sum(p.numel() for p in module.parameters())
    assert checkpoint_bytes(model, "sign_sgd") > 8 * num_parameters(model)


def test_keys_of_plugins_are_typed(loaded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs/model").mkdir(parents=True)
    (tmp_path / "configs/model/mine.yaml").write_text("name: gated_conv\ndim: 64\ngated_conv: {kernel_size: 5}\n")
    job = compose(["model=mine", "trainer.loss=penalised", "optimizer.sign_sgd.momentum=0.5", "trainer.device=cpu"])
    assert (job.config.model.gated_conv.kernel_size, job.config.optimizer.sign_sgd.momentum) == (5, 0.5)
    path = tmp_path / "config.yaml"
    path.write_text(_to_yaml(job.config))
    (tmp_path / "capsule.json").write_text(json.dumps({"plugins": plugins.records()}))
    assert load_config(path) == job.config and [p["name"] for p in recorded_plugins(path)] == [MODEL, PARTS]
    misspelt = examine(["model.gated_conv.kernl_size=1"]).messages
    assert misspelt == ["unknown key model.gated_conv.kernl_size (did you mean model.gated_conv.kernel_size?)"]
    faulty = ["model.gated_conv.kernel_size=0", "trainer.loss=penalized", "data.name=counts", "data.counts.modulus=13"]
    assert examine(faulty).messages == [
        "trainer.loss=penalized is not a choice; use cross_entropy, penalised",
        "model.gated_conv.kernel_size=0 is out of bounds; use 1 to 64",
        "data.counts: modulus=13 brings bad luck; use another",
    ]
    assert field_documents()["model.gated_conv.kernel_size"].startswith("Tokens that one layer sees.")
    explain.run(argparse.Namespace(words=["model=mine", "model.gated_conv.kernel_size"], config_dir=None))
    assert "configs/model/mine.yaml:3" in capsys.readouterr().out


def test_a_run_with_plugins_is_repeated_and_a_llama_of_it_read(tmp_path: Path, monkeypatch, loaded: None) -> None:
    def write(*values: str) -> None:
        config = _to_yaml(compose([*values, "optimizer.name=sign_sgd", "trainer.device=cpu"]).config)
        (tmp_path / "config.yaml").write_text(config)
        (tmp_path / "capsule.json").write_text(json.dumps({"plugins": records}))
        (tmp_path / "overrides.yaml").write_text(f"recipe: ''\noverrides: {json.dumps(values)}\n")

    records, started = plugins.records(), []
    monkeypatch.setattr("hp_train.commands.train.run", lambda jobs, argv: started.extend(jobs))
    write("model.gated_conv.kernel_size=7")
    forget()
    assert newest_config(tmp_path).model.name == "llama", "needs no code of the plugin"
    plugins.load_recorded(records)
    write("model.name=gated_conv", "model.gated_conv.kernel_size=7")
    forget()
    with pytest.raises(ConfigError, match="model.name=gated_conv, not a Llama"):
        newest_config(tmp_path)
    rerun.run(argparse.Namespace(run_dir=str(tmp_path), overrides=["trainer.seed=1"], config_dir=None), [])
    assert (started[0].config.model.gated_conv.kernel_size, started[0].config.trainer.seed) == (7, 1)


def test_a_changed_file_is_told_and_without_plugins_the_names_are_gone(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "ext.py").write_text("x = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HP_TRAIN_PLUGINS", "ext")
    plugins.load_all()
    [record] = plugins.records()
    assert (record["name"], record["folder"]) == ("ext", str(tmp_path))
    (tmp_path / "ext.py").write_text("x = 2\n")
    forget()
    sys.modules.pop("ext")
    assert plugins.load_recorded([record]) == [f"plugin ext ({tmp_path}/ext.py) has changed since the run began"]
    assert plugins.load_recorded([plugins.records()[0]]) == []
    forget()
    assert "model.gated_conv.kernel_size" not in LEAVES
    assert "model.name=gated_conv is not a choice; use llama" in examine(["model.name=gated_conv"]).messages


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nope_nope", "cannot be imported: ModuleNotFoundError: No module named 'nope_nope' .*bad.py:1"),
        ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero .*bad.py:1"),
        ("def f(:", "cannot be imported: SyntaxError"),
        ("from hp_train import registry as r\nr.register_loss('Bad-Name', build=print)", "lower-case letters"),
        ("from hp_train import registry as r\nr.register_loss('x', config=int, build=print)", "is not a dataclass"),
        ("from hp_train import registry as r\nr.register_loss('x', build='nope')", "is not `package.module:function`"),
    ],
)
def test_a_plugin_at_fault_is_one_line(text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.py").write_text(text + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("bad", None)
    with pytest.raises(ConfigError, match=f"^--plugin bad:? .*{words}"):
        plugins.load_all(["bad"])


def test_options_are_taken_off_the_line() -> None:
    words = ["recipe=x", "--plugin", "a.b", "--cfg", "job", "--plugin=c"]
    assert plugins.take_options(words) == (["recipe=x", "--cfg", "job"], ["a.b", "c"])
    for wrong in ("./a.py", "a-b", "", ".a"):
        with pytest.raises(ConfigError, match="is not the name of a module"):
            plugins.load_all([wrong])
