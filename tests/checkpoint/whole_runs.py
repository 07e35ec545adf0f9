"""A tiny run to save and load in one process, and what the checkpoint tests do to its files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from hp_train.checkpoint.save import save_checkpoint
from hp_train.checkpoint.state import CheckpointState
from hp_train.checkpoint.storage import SavePolicy


def tiny_state(seed: int, *, steps: int = 1, progress: dict | None = None) -> CheckpointState:
    """Return a model of three tensors with AdamW state after `steps` steps; 0 leaves the optimizer fresh."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (5, 3), "model.norm.weight": (3,), "lm_head.weight": (5, 3)}
    parameters = {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1)
    for _ in range(steps):
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    generators = {"rng.rank_00000.torch": torch.arange(40, dtype=torch.uint8)}
    return CheckpointState(parameters, optimizer, {}, progress or {}, generators)


def tensors_of(state: CheckpointState) -> dict[str, torch.Tensor]:
    """Return copies of all parameters and optimizer state by stored name."""
    tensors = {f"model.{name}": tensor.detach().clone() for name, tensor in state.parameters.items()}
    for name, parameter in state.parameters.items():
        for key, value in state.optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value.clone()
    return tensors


def assert_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Check that two sets of tensors agree in names, shapes, dtypes and every bit."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        other = right[name]
        assert (tensor.shape, tensor.dtype) == (other.shape, other.dtype), name
        bits, other_bits = (value.contiguous().reshape(-1).view(torch.uint8) for value in (tensor, other))
        assert torch.equal(bits, other_bits), f"{name} differs"


def save_steps(checkpoints_dir: Path, *steps: int, keep_last: int = 10) -> list[Path]:
    """Save a tiny state, a different one for each step."""
    return [
        save_checkpoint(checkpoints_dir, step, tiny_state(step, progress={"step": step}), SavePolicy(keep_last))
        for step in steps
    ]


def sign_again(folder: Path) -> None:
    """Make manifest and COMMITTED agree with the files as they are now: damage that checksums cannot see."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    for path in folder.iterdir():
        if path.name not in ("manifest.json", "COMMITTED"):
            content = path.read_bytes()
            manifest["files"][path.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    text = json.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(text)
    (folder / "COMMITTED").write_text(hashlib.sha256(text).hexdigest() + "\n")
