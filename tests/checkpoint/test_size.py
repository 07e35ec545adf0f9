"""The size promised before a run is the size on disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hp_train.checkpoint.save import save_checkpoint
from hp_train.checkpoint.size import checkpoint_bytes
from hp_train.checkpoint.state import CheckpointState
from hp_train.checkpoint.storage import SavePolicy
from hp_train.config.schema import ModelSection
from hp_train.models.shapes import parameter_shapes


@pytest.mark.parametrize("optimizer_name", ["adamw", "sgd"])
@pytest.mark.parametrize("tied", [False, True])
def test_promised_size_covers_the_files(tmp_path: Path, optimizer_name: str, tied: bool) -> None:
    config = ModelSection(dim=64, num_layers=3, num_kv_heads=2, tie_embeddings=tied)
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in parameter_shapes(config).items()}
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer_name]
    folder = save_checkpoint(tmp_path, 1, CheckpointState(parameters, kind(parameters.values(), lr=0.1)), SavePolicy(1))
    on_disk = sum(path.stat().st_size for path in folder.iterdir())
    promised = checkpoint_bytes(config, optimizer_name)
    assert promised - (1 << 20) <= on_disk <= promised


def test_what_the_command_line_needs_imports_no_torch() -> None:
    modules = "layout", "retention", "size", "metrics_cut"
    imports = ", ".join(f"hp_train.checkpoint.{name}" for name in modules)
    subprocess.run([sys.executable, "-c", f"import sys, {imports}; sys.exit('torch' in sys.modules)"], check=True)
