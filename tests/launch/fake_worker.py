"""A worker whose trainer does as a plan file says; run by the launcher in place of `hp_train.launch.worker`.

RUN_DIR/fake.json, keyed by rank: {"2": {"at": 3, "do": "raise"}}, in the first attempt unless "attempt" names another;
a list holds several. With "commit" rank 0 leaves a complete checkpoint, without tensors, after every step. Every rank
takes steps of STEP_S seconds with one all_reduce each, in which the ranks also agree on a stop, as the real trainer
does.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time

from hp_train.checkpoint.layout import (
    COMMITTED,
    MANIFEST,
    METADATA,
    PROGRESS,
    Manifest,
    commit_mark,
    digest,
    folder_name,
)
from hp_train.config.schema import TrainerConfig
from hp_train.errors import DivergedError, ExitCode
from hp_train.launch import worker
from hp_train.training.run_context import Phase, RunContext, TrainOutcome

STEP_S = 0.05


def train(config: TrainerConfig, context: RunContext) -> TrainOutcome:
    import torch
    import torch.distributed as dist

    plan = json.loads((context.run_dir / "fake.json").read_text())
    mine = plan.get(str(context.rank), [])
    mine = mine if isinstance(mine, list) else [mine]
    _say_what_stands(config, context)
    for step in range(1, config.trainer.max_steps + 1):
        context.progress.step, context.progress.phase = step, Phase.STEP
        time.sleep(STEP_S)
        for fault in mine:
            if fault["at"] == step and fault.get("attempt", 1) == context.attempt:
                _misbehave(fault["do"], context)
        stop = torch.tensor([context.stop.signal_number])
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        _write_row(context, step)
        if plan.get("commit") and context.rank == 0:
            _commit(context, step + 10 * context.attempt)
        if stop.item():
            context.progress.phase = Phase.SAVE
            time.sleep(plan.get("save_s", 0.0))
            (context.run_dir / f"saved_{context.rank}").write_text(str(step))
            code = ExitCode.INTERRUPTED if stop.item() == signal.SIGINT else ExitCode.REQUEUE
            return TrainOutcome(code, step)
    return TrainOutcome(ExitCode.DONE, config.trainer.max_steps)


def _say_what_stands(config: TrainerConfig, context: RunContext) -> None:
    (context.attempt_dir / f"pid_{context.rank}").write_text(str(os.getpid()))
    if context.rank == 0:
        facts = {
            "device": "cpu",
            "device_name": None,
            "device_memory_bytes": None,
            "world_size": context.world_size,
            "mesh": f"dp_shard {context.world_size}",
            "num_parameters": 1000,
            "first_step": 1,
            "max_steps": config.trainer.max_steps,
            "tokens_per_step": 1024,
            "resumed_from": None,
        }
        (context.attempt_dir / "attempt.tmp").write_text(json.dumps(facts))
        (context.run_dir / "metrics.jsonl").write_text("")
        (context.attempt_dir / "attempt.tmp").rename(context.attempt_dir / "attempt.json")


def _write_row(context: RunContext, step: int) -> None:
    if context.rank == 0:
        with open(context.run_dir / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": step, "loss": 4.0 / step, "step_time_s": STEP_S}) + "\n")


def _commit(context: RunContext, step: int) -> None:
    folder = context.run_dir / "checkpoints" / folder_name(step)
    folder.mkdir(parents=True)
    files = {name: digest(b"{}") for name in (METADATA, PROGRESS)}
    for name in files:
        (folder / name).write_bytes(b"{}")
    text = Manifest(step, files).encode()
    (folder / MANIFEST).write_bytes(text)
    (folder / COMMITTED).write_bytes(commit_mark(text))


def _misbehave(what: str, context: RunContext) -> None:
    if what == "raise":
        raise RuntimeError("planted fault")
    if what == "diverge":
        raise DivergedError(f"loss is nan at step {context.progress.step}")
    if what == "out_of_memory":
        raise MemoryError("planted")
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "warn":
        print("warning: planted [bold]line[/bold]", file=sys.stderr, flush=True)
    if what == "exit":
        os._exit(0)
    if what == "data":
        context.progress.phase = Phase.DATA
    if what in ("hang", "data"):  # in C, deaf to all signals but SIGKILL
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the interpreter lock: no other thread runs either
    if what == "children":
        child = subprocess.Popen(["sleep", "600"])
        (context.attempt_dir / f"child_{context.rank}").write_text(str(child.pid))


if __name__ == "__main__":
    worker.leave(worker.main(sys.argv[1:], train))
