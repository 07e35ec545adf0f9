"""What `model.pretrained` sets, and everything that is refused before a worker starts: one line, naming the place."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hp_train.commands.train import job_faults
from hp_train.config.compose import change, examine
from hp_train.config.schema import ModelSection, TrainerConfig, TrainerSection
from hp_train.config.validate import faults
from hp_train.pretrained.fit import adopt_shape, misfits, stored_name
from hp_train.pretrained.hf_config import hf_config, model_fields
from tests.pretrained.directories import MODEL, TIED, random_weights, write_directory

CPU = ("trainer.device=cpu", "trainer.seq_len=32")


def refusals(folder: Path) -> list[str]:
    """What the launcher says of the directory; the tests that type keys go through the whole of it."""
    config = TrainerConfig(trainer=TrainerSection(seq_len=32), model=ModelSection(pretrained=str(folder)))
    found = [fault.message for fault in adopt_shape(config, typed=())]
    return found or faults(config) or misfits(config.model)


@pytest.mark.parametrize("model", [MODEL, TIED, ModelSection()], ids=["scaled", "tied", "plain"])
@pytest.mark.parametrize("spelling", ["older", "newer"])
def test_config_json_and_back(model: ModelSection, spelling: str) -> None:
    content = hf_config(model, "bfloat16", {"eos_token_id": 1})
    if spelling == "newer":
        theta, scaling = content.pop("rope_theta"), content.pop("rope_scaling")
        content["rope_parameters"] = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
    fields = model_fields(json.loads(json.dumps(content)), "here")
    expected = replace(model, num_kv_heads=model.num_kv_heads or model.num_heads)
    assert replace(ModelSection(), **fields) == expected


@pytest.mark.parametrize("num_files", [1, 3])
def test_the_directory_sets_the_shape_over_any_option(tmp_path: Path, num_files: int) -> None:
    folder = write_directory(tmp_path / "hf", TIED, random_weights(TIED), num_files=num_files)
    job = examine([f"model.pretrained={folder}", "model=llama3_8b", *CPU, "model.num_layers=4", "model.max_seq_len=48"])
    assert job_faults(job) == []
    assert job.config.model == replace(TIED, pretrained=str(folder), max_seq_len=48)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.dim=64", ("model.dim=64", "hidden_size=32", "leave model.dim out")),
        ("model.num_kv_heads=null", ("model.num_kv_heads=4", "num_key_value_heads=2")),
        (
            "model.rope_scaling.factor=8",
            ("model.rope_scaling=llama3 with factor 8", "rope_scaling=llama3 with factor 4"),
        ),
        ("model.max_seq_len=65", ("model.max_seq_len=65", "max_position_embeddings=64")),
    ],
)
def test_a_typed_key_must_not_contradict_the_file(tmp_path: Path, override: str, words: tuple[str, ...]) -> None:
    folder = write_directory(tmp_path / "hf", MODEL, random_weights(MODEL))
    (line,) = job_faults(examine([f"model.pretrained={folder}", *CPU, override]))
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen2"}, ('model_type="qwen2" is no Llama',)),
        ({"attention_bias": True}, ("attention_bias=true is not supported",)),
        ({"hidden_act": "gelu"}, ('hidden_act="gelu"',)),
        ({"quantization_config": {"bits": 4}}, ("quantization_config=",)),
        ({"head_dim": 16}, ("head_dim=16", "32 / 4")),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ('rope_type="linear"', "default or llama3")),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, ("no number for low_freq_factor",)),
        ({"rope_scaling": 3}, ("rope_scaling=3 has the wrong type",)),
        ({"hidden_size": None}, ("hidden_size is missing",)),
        ({"hidden_size": "32"}, ('hidden_size="32" has the wrong type',)),
        ({"num_hidden_layers": True}, ("num_hidden_layers=true has the wrong type",)),
        ({"num_hidden_layers": 0}, ("model.num_layers=0 is out of bounds",)),
        ({"num_hidden_layers": 5}, ("the weights lack model.layers.4.input_layernorm.weight and 8 more",)),
        ({"num_hidden_layers": 3}, ("hold model.layers.3.", "does not have")),
        (
            {"intermediate_size": 64},
            ("mlp.gate_proj.weight is [56, 32] in model.safetensors and [64, 32]", "and 11 more"),
        ),
        ({"tie_word_embeddings": True, "vocab_size": 270}, ("model.embed_tokens.weight is [260, 32]",)),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_is_one_line(tmp_path: Path, changes: dict, words: tuple[str, ...]) -> None:
    folder = write_directory(tmp_path / "hf", MODEL, random_weights(MODEL), **changes)
    (line,) = refusals(folder)
    assert all(word in line for word in words), line
    assert str(folder) in line or "out of bounds" in line


def spoil_nothing(folder: Path) -> None:
    """Leave the directory whole."""


def cut_short(folder: Path) -> None:
    file = folder / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def lose_a_file(folder: Path) -> None:
    (folder / "model-00001-of-00003.safetensors").unlink()


def swap_two_files(folder: Path) -> None:
    one, two = (folder / f"model-0000{number}-of-00003.safetensors" for number in (1, 2))
    one.rename(folder / "kept")
    two.rename(one)
    (folder / "kept").rename(two)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (cut_short, ("model-00002-of-00003.safetensors holds", "bytes of tensors where its header says")),
        (lose_a_file, ("model-00001-of-00003.safetensors is missing",)),
        (swap_two_files, ("model.safetensors.index.json puts", "does not hold it")),
        (lambda folder: (folder / "model-00001-of-00003.safetensors").write_text("version https://git-lfs"),
         ("model-00001-of-00003.safetensors is damaged or no safetensors file",)),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), ("has no weight_map",)),
        (lambda folder: (folder / "model.safetensors.index.json").unlink(), ("3 safetensors files and no",)),
        (lambda folder: (folder / "config.json").write_text("{"), ("config.json is not JSON",)),
        (lambda folder: (folder / "config.json").write_text("[]"), ("config.json is not a JSON object",)),
        (lambda folder: (folder / "config.json").unlink(), ("holds no config.json",)),
        (lambda folder: folder.rename(folder.with_name("gone")), ("does not exist",)),
    ],
)  # fmt: skip
def test_damage_is_told_before_anything_starts(tmp_path: Path, spoil, words: tuple[str, ...]) -> None:
    folder = write_directory(tmp_path / "hf", MODEL, random_weights(MODEL), num_files=3)
    assert refusals(folder) == []
    spoil(folder)
    (line,) = refusals(folder)
    assert all(word in line for word in (f"model.pretrained={folder}", *words)), line


def test_names_dtypes_and_the_two_places_of_a_tied_matrix(tmp_path: Path) -> None:
    weights = random_weights(TIED)
    embedding = weights.pop("model.embed_tokens.weight")
    weights["lm_head.weight"] = embedding  # some writers keep this one of the two
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    folder = write_directory(tmp_path / "tied", TIED, weights)
    assert misfits(replace(TIED, pretrained=str(folder))) == []
    assert stored_name("model.embed_tokens.weight", TIED, weights) == "lm_head.weight"
    untied = replace(MODEL, pretrained=str(folder))
    assert "lack model.embed_tokens.weight" in misfits(untied)[0]
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)
    weights["model.extra"] = torch.ones(1)
    folder = write_directory(tmp_path / "more", TIED, weights)
    of_dtype, more = misfits(replace(TIED, pretrained=str(folder)))
    assert "model.norm.weight is I8" in of_dtype
    assert "hold model.extra, which" in more


def test_a_saved_run_keeps_its_shape_without_the_directory(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    folder = write_directory(tmp_path / "hf", MODEL, random_weights(MODEL))
    config = examine([f"model.pretrained={folder}", *CPU]).config
    saved = tmp_path / "config.yaml"
    saved.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
    folder.rename(tmp_path / "gone")
    job = change(saved, [])
    assert job.messages == []
    assert job.config.model == config.model
    # Before its first checkpoint such a run still needs the weights.
    assert job_faults(job) == [f"model.pretrained={folder} does not exist"]
