"""Writes small Hugging Face directories of a Llama, as other programs would, for the tests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from hp_train.config.schema import ModelSection, RopeScalingSection
from hp_train.models.shapes import parameter_shapes
from hp_train.pretrained.hf_config import hf_config

MODEL = ModelSection(
    vocab_size=260, dim=32, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=56, norm_eps=1e-6, rope_theta=5e4,
    rope_scaling=RopeScalingSection(4.0, 1.0, 4.0, 32), max_seq_len=64,
)  # fmt: skip
TIED = replace(MODEL, tie_embeddings=True)


def random_weights(model: ModelSection, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return weights for every parameter, the same in every call."""
    generator = torch.Generator().manual_seed(11)
    return {
        name: (torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1)).to(dtype)
        for name, shape in parameter_shapes(model).items()
    }


def write_directory(
    folder: Path, model: ModelSection, weights: dict[str, torch.Tensor], *, num_files: int = 1, **changes: object
) -> Path:
    """Write config.json, with `changes` to it (None deletes a key), and the weights over `num_files` files."""
    folder.mkdir(parents=True)
    content = {**hf_config(model, "float32", {}), **changes}
    content = {name: value for name, value in content.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(content))
    if num_files == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    names = sorted(weights)
    weight_map = {
        name: f"model-{index % num_files + 1:05d}-of-{num_files:05d}.safetensors" for index, name in enumerate(names)
    }
    for file in set(weight_map.values()):
        save_file({name: weights[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
