"""States of the random number generators of one rank: Python's, numpy's, torch's and its GPU's. Imports torch.

Each is a tensor of bytes, stored as `rng.rank_00003.torch` and so on. They belong to a rank of a mesh of a certain
size: a run that goes on with another number of ranks starts with fresh ones, which follow from seed, rank and step. The
order of samples and the initial weights never depend on them.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import MetadataIndex

from hp_train.checkpoint.layout import METADATA, read_json, read_manifest
from hp_train.checkpoint.metadata_json import decode_metadata

PREFIX = "rng."


def start_anew(seed: int, rank: int, step: int) -> None:
    """Seed every generator, so that two runs of the same settings draw the same; none is left to chance."""
    number = int.from_bytes(hashlib.sha256(f"{seed} {rank} {step}".encode()).digest()[:8], "little")
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number % 2**63)  # of every device


def capture(rank: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return this rank's states by stored name: uint8 tensors on the CPU, of a few kilobytes each."""
    numpy_state = np.random.get_state(legacy=False)
    numpy_state = {**numpy_state, "state": {**numpy_state["state"], "key": numpy_state["state"]["key"].tolist()}}
    states = {
        "python": _bytes_of(random.getstate()),
        "numpy": _bytes_of(numpy_state),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {f"{_prefix(rank)}{name}": state for name, state in states.items()}


def restore(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Put states back that `capture` returned."""
    by_kind = {name.rpartition(".")[2]: state for name, state in states.items()}
    version, internal, gauss = json.loads(by_kind["python"].numpy().tobytes())
    random.setstate((version, tuple(internal), gauss))
    numpy_state = json.loads(by_kind["numpy"].numpy().tobytes())
    numpy_state["state"]["key"] = np.array(numpy_state["state"]["key"], dtype=np.uint32)
    np.random.set_state(numpy_state)
    torch.set_rng_state(by_kind["torch"])
    if device.type == "cuda" and "cuda" in by_kind:
        torch.cuda.set_rng_state(by_kind["cuda"], device)


def read_states(folder: Path, rank: int, world_size: int) -> dict[str, torch.Tensor] | None:
    """Return the states of `rank` in the checkpoint, None when it was saved by another number of ranks.

    Raises CheckpointError when the checkpoint's JSON is damaged.
    """
    manifest = read_manifest(folder)
    metadata, locations = decode_metadata(read_json(folder, manifest, METADATA), manifest)
    stored = [name for name in metadata.state_dict_metadata if name.startswith(PREFIX)]
    if len({name.rpartition(".")[0] for name in stored}) != world_size:
        return None
    states = {}
    for name in stored:
        if name.startswith(_prefix(rank)):
            location = locations[MetadataIndex(name, torch.Size([0]))]
            with safe_open(folder / location.file, framework="pt", device="cpu") as file:
                states[name] = file.get_tensor(location.key)
    return states or None


def _prefix(rank: int) -> str:
    return f"{PREFIX}rank_{rank:05d}."


def _bytes_of(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value, separators=(",", ":")).encode()), dtype=torch.uint8)
