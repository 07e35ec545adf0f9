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
from hp_train.errors import ConfigError, ExitCode, NonFiniteError
from hp_train.launch.attempt_end import AttemptEnd
from hp_train.launch.devices import plan_processes
from hp_train.launch.feed import NoDisplay
from hp_train.launch.inline import launch_inline
from hp_train.launch.launch_spec import LaunchSpec
from hp_train.launch.outcome import Cause, read_outcome
from hp_train.launch.owner import own
from hp_train.launch.run_dir import create_run_dir
from hp_train.launch.signals import StopSignals
from hp_train.launch.start import write_run_files
from hp_train.launch.summary import summarize
from hp_train.launch.worker import DEVICE
from hp_train.training.run_context import TrainOutcome
from tests.checkpoint.whole_runs import save_steps
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
        "from hp_train import registry\n\n\ndef build(own):\n"
        "    from hp_train.models.loss import ChunkedCrossEntropy\n\n"
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
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert losses(run_dir) == pytest.approx(losses(tmp_path / "inline"), rel=1e-5)
    assert (run_dir / "checkpoints/step_00000003/COMMITTED").exists()


@pytest.fixture
def inline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchSpec:
    """A run of one process that is ready to be launched, with a checkpoint of step 3."""
    monkeypatch.setenv(DEVICE, "cpu")
    config = with_absolute_paths(compose([*SMALL, f"trainer.run_dir={tmp_path / 'run'}"]).config)
    run_dir = create_run_dir(config, "")
    path = write_run_files(run_dir, config, recipe="", overrides=[], argv=[])
    save_steps(run_dir / "checkpoints", 3)
    return LaunchSpec(run_dir, path, config, plan_processes(config), StopSignals())


def launch(spec: LaunchSpec) -> tuple[AttemptEnd, list[str]]:
    with own(spec.run_dir) as ownership:
        end = launch_inline(spec, ownership, NoDisplay())
    assert read_outcome(spec.run_dir) == end.outcome
    return end, summarize(spec.run_dir, spec.config, end.outcome)


def test_inline_tells_what_is_saved(inline: LaunchSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = TrainOutcome(ExitCode.INTERRUPTED, 3)
    monkeypatch.setattr("hp_train.launch.inline.run_rank", lambda config, context, train: stopped)
    end, summary = launch(inline)
    assert (end.outcome.cause, end.outcome.exit_code, end.outcome.committed_step) == (Cause.STOPPED, 130, 3)
    assert summary[0].startswith("stopped and saved at step 3: ")


@pytest.mark.parametrize(
    ("error", "cause", "code"),
    [
        (KeyboardInterrupt(), Cause.CANCELLED, 1),  # the second Ctrl-C: 130 would say that all is saved
        (NonFiniteError("loss is nan at step 2"), Cause.NON_FINITE, 3),
        (MemoryError(), Cause.OUT_OF_MEMORY, 1),
        (ConfigError("no such file"), Cause.USER_ERROR, 2),
    ],
)
def test_inline_tells_why_it_ended_as_other_launchers_do(
    inline: LaunchSpec, monkeypatch: pytest.MonkeyPatch, error: BaseException, cause: Cause, code: int
) -> None:
    def fail(*_: object) -> TrainOutcome:
        raise error

    monkeypatch.setattr("hp_train.launch.inline.run_rank", fail)
    if isinstance(error, KeyboardInterrupt):
        end, _ = launch(inline)
        assert end.report == ("hp-train: stopped by Ctrl-C without saving",)
    else:
        with pytest.raises(type(error)):
            launch(inline)
    outcome = read_outcome(inline.run_dir)
    assert outcome is not None and (outcome.cause, outcome.exit_code, outcome.rank) == (
        cause, code, None if cause is Cause.CANCELLED else 0,
    )  # fmt: skip


def test_inline_runs_one_process(tmp_path: Path) -> None:
    done = hp_train("launcher=inline", "recipe=llama_fsdp_pp", "trainer.device=cpu", cwd=tmp_path)
    assert done.code == 2
    assert [line.split(":")[1].strip() for line in done.lines] == ["accelerator.pp_size=2", "fsdp.dp_shard_size=2"]
    assert "launcher=inline runs one process; use 1, or launcher=local" in done.lines[0]
