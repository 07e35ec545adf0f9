"""A run's checkpoint to a Hugging Face directory. Imports torch.

Tensors are read, converted and written one after the other; whatever the size of the model, no more than one is in
memory. The directory appears whole or not at all.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from hp_train.checkpoint.safetensors_file import Entry, write_safetensors
from hp_train.config.schema import ModelSection
from hp_train.errors import HpTrainError
from hp_train.new_folder import NewFolder
from hp_train.pretrained.hf_config import CONFIG_FILE, hf_config
from hp_train.pretrained.run_tokenizer import RunTokenizer
from hp_train.pretrained.safetensors_header import INDEX_FILE, SINGLE_FILE
from hp_train.pretrained.stored_weights import StoredWeights
from hp_train.pretrained.tokenizer_files import write_tokenizer_files

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_FILE_BYTES = 5_000_000_000  # above it the weights are cut into several files, as transformers does
GENERATION_FILE = "generation_config.json"
_OTHER_BYTES = 64 << 20  # room for everything beside the weights


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    step: int
    num_parameters: int
    num_bytes: int  # of the weights
    num_files: int  # of the weights


def export(
    weights: StoredWeights,
    model: ModelSection,
    tokenizer: RunTokenizer,
    to: Path,
    dtype: torch.dtype,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Exported:
    """Write `weights` with config and tokenizer to the new directory `to`.

    Raises ConfigError when `to` is taken or cannot be made, HpTrainError when the disk is full.
    """
    needed = sum(weights.shape(name).numel() for name in weights.names) * dtype.itemsize
    groups = _cut_into_files(weights, dtype, max_file_bytes)
    with NewFolder(to, "--to") as new:
        _check_space(to.parent, needed)
        try:
            for file, names in groups.items():
                write_safetensors(new.path / file, [_entry(weights, name, dtype) for name in names])
            if len(groups) > 1:
                weight_map = {name: file for file, names in groups.items() for name in names}
                _write_json(new.path / INDEX_FILE, {"metadata": {"total_size": needed}, "weight_map": weight_map})
            config = hf_config(model, str(dtype).removeprefix("torch."), tokenizer.special_ids)
            _write_json(new.path / CONFIG_FILE, config)
            _write_json(new.path / GENERATION_FILE, _generation_config(tokenizer))
            write_tokenizer_files(new.path, tokenizer, model.max_seq_len)
            new.publish()
        except OSError as error:
            raise HpTrainError(f"writing {to} failed: {error.strerror}") from error
    return Exported(weights.step, needed // dtype.itemsize, needed, len(groups))


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed + _OTHER_BYTES:
        raise HpTrainError(f"{needed:,} bytes are needed and {free:,} free in {folder}")


def _cut_into_files(weights: StoredWeights, dtype: torch.dtype, max_file_bytes: int) -> dict[str, list[str]]:
    """Return file -> names: in order, as many in a file as fit; a tensor that is larger alone has a file of its own."""
    groups: list[list[str]] = [[]]
    size = 0
    for name in weights.names:
        num_bytes = weights.shape(name).numel() * dtype.itemsize
        if groups[-1] and size + num_bytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += num_bytes
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    count = len(groups)
    return {f"model-{number:05d}-of-{count:05d}.safetensors": names for number, names in enumerate(groups, 1)}


def _entry(weights: StoredWeights, name: str, dtype: torch.dtype) -> Entry:
    return Entry(name, dtype, weights.shape(name), lambda: weights.read(name).to(dtype))


def _generation_config(tokenizer: RunTokenizer) -> dict[str, object]:
    """Return what `generate` of transformers needs to stop; the rest are its own defaults."""
    if tokenizer.beside is not None and (tokenizer.beside / GENERATION_FILE).is_file():
        return json.loads((tokenizer.beside / GENERATION_FILE).read_text(encoding="utf-8"))
    return {
        "_from_model_config": True,
        **{key: value for key, value in tokenizer.special_ids.items() if value is not None},
    }


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
