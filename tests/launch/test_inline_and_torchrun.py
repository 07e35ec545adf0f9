"""One process without an agent, and plain torchrun on a run's config.yaml: the same run as the launcher's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hp_train.config.compose import compose
from hp_train.config.paths import with_absolute_paths
from hp_train.launch.outcome import Cause, read_outcome
from hp_train.launch.run_dir import create_run_dir
from hp_train.launch.start import write_run_files
from tests.command import hp_train

SMALL = [
    "model.dim=32", "model.num_heads=2", "model.num_kv_heads=1", "model.ffn_dim=64", "trainer.seq_len=16",
    "trainer.global_batch_size=8", "trainer.micro_batch_size=4", "trainer.device=cpu", "trainer.log_every=1",
    "trainer.max_steps=3",
]  # fmt: skip


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_inline_stops_at_a_breakpoint_and_torchrun_gives_the_same_run(tmp_path: Path) -> None:
    (tmp_path / "ext.py").write_text(
        "from hp_train import registry\n\n\ndef build(own):\n    from hp_train.models.loss import ChunkedCrossEntropy\n\n"
        "    breakpoint()\n    return ChunkedCrossEntropy()\n\n\nregistry.register_loss('stopping', build=build)\n"
    )
    done = hp_train(
        "--plugin", "ext", "launcher=inline", "trainer.loss=stopping", "trainer.run_dir=inline", *SMALL,
        cwd=tmp_path, torch=True, stdin="p 40 + 2\nc\n",
    )  # fmt: skip
    assert done.code == 0, done.stderr
    assert "(Pdb) 42" in done.stdout and "step 3/3 loss " in done.stdout and "done at step 3" in done.stdout
    outcome = read_outcome(tmp_path / "inline")
    assert outcome is not None and (outcome.cause, outcome.step) == (Cause.DONE, 3)
    config = with_absolute_paths(compose([*SMALL, "fsdp.dp_shard_size=2", f"trainer.run_dir={tmp_path}/two"]).config)
    run_dir = create_run_dir(config, "")
    path = write_run_files(run_dir, config, recipe="", overrides=[], argv=[])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    run = subprocess.run(
        [*torchrun, "--local-addr=127.0.0.1", "-m", "hp_train.launch.worker", str(path)], cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert losses(run_dir) == pytest.approx(losses(tmp_path / "inline"), rel=1e-5)
    assert (run_dir / "checkpoints/step_00000003/COMMITTED").exists()


def test_inline_runs_one_process(tmp_path: Path) -> None:
    done = hp_train("launcher=inline", "recipe=llama_fsdp_pp", "trainer.device=cpu", cwd=tmp_path)
    assert done.code == 2
    assert [line.split(":")[1].strip() for line in done.lines] == ["accelerator.pp_size=2", "fsdp.dp_shard_size=2"]
    assert "launcher=inline runs one process; use 1, or launcher=local" in done.lines[0]
