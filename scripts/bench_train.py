"""Throughput and start-up of hp-train against bare torch, side by side in one run.

    python scripts/bench_train.py throughput     tokens/s: single process and fsdp 2, A B A B, median ratio
    python scripts/bench_train.py startup        `hp-train --cfg job`, and the time to the first step of 2 processes

Expected before measuring: throughput ratio 0.98 to 1.0 (one all-gather of 8 doubles, a JSON row and two scalars read a
step), `--cfg job` 0.3 s, first step within 1.15 times torchrun (the launcher composes, and imports what torchrun does).
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from omegaconf import OmegaConf
from torch.distributed.fsdp import fully_shard

from hp_train.config.schema import TrainerConfig
from hp_train.data.source import open_data
from hp_train.models.initial_weights import initialize
from hp_train.models.llama import Llama
from hp_train.training.run_context import RunContext
from hp_train.training.setup import build_worker
from hp_train.training.trainer import Trainer

STEPS = 100
WARM_UP_STEPS = 5
SETTINGS = {
    "model.dim": 192, "model.num_layers": 4, "model.num_heads": 6, "model.ffn_dim": 512, "trainer.seq_len": 128,
    "trainer.global_batch_size": 8, "trainer.micro_batch_size": 4, "trainer.max_steps": STEPS,
    "trainer.loss_chunk_tokens": 0, "trainer.device": "cpu", "checkpoint.every": 0, "optimizer.lr": 1e-3,
    "fsdp.implementation": "torch",
}  # fmt: skip


class Turns:
    """Lets two loops take turns, one optimizer step each, and times every turn: what slows the machine slows both."""

    def __init__(self) -> None:
        self._turn = (threading.Semaphore(1), threading.Semaphore(0))
        self.times: tuple[list[float], list[float]] = ([], [])

    def join(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """Have the loop of `optimizer` be loop 0 or 1: its turn ends, and the other's begins, as it steps."""
        self._turn[number].acquire()
        started = time.perf_counter()

        def end_turn(*_: object) -> None:
            nonlocal started
            self.times[number].append(time.perf_counter() - started)
            self._turn[1 - number].release()
            self._turn[number].acquire()
            started = time.perf_counter()

        optimizer.register_step_post_hook(end_turn)

    def leave(self, number: int) -> None:
        """Let the other loop end without waiting for this one."""
        self._turn[1 - number].release()


def make_config(world_size: int) -> TrainerConfig:
    """Return the settings of the comparison for one or more fsdp ranks."""
    config = OmegaConf.structured(TrainerConfig)
    for key, value in SETTINGS.items():
        OmegaConf.update(config, key, value)
    config.fsdp.dp_shard_size = world_size
    return OmegaConf.to_object(config)


def run_hp_train(config: TrainerConfig, rank: int, world_size: int, folder: Path, turns: Turns) -> None:
    """Run the trainer's own loop."""
    worker_context = RunContext(folder, attempt=1, rank=rank, local_rank=rank, world_size=world_size)
    worker = build_worker(config, worker_context)
    turns.join(0, worker.optimizer)
    Trainer(config, worker_context, worker).run()
    turns.leave(0)


def run_bare(config: TrainerConfig, rank: int, world_size: int, turns: Turns) -> None:
    """Run the shortest loop a person would write: the same model, engine, optimizer and data."""
    with torch.device("meta"):
        model = Llama(config.model)
    if world_size > 1:
        for block in model.blocks.values():
            fully_shard(block)
        fully_shard(model)
    model.to_empty(device="cpu")
    initialize(model, config.trainer.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.optimizer.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    turns.join(1, optimizer)
    trainer = config.trainer
    source = open_data(
        config.data, seq_len=trainer.seq_len, seed=trainer.seed, split="train", vocab_size=config.model.vocab_size
    )
    per_rank = trainer.global_batch_size // world_size
    num_microbatches = per_rank // trainer.micro_batch_size
    num_tokens = trainer.global_batch_size * trainer.seq_len
    for step in range(trainer.max_steps):
        optimizer.zero_grad()
        first = step * trainer.global_batch_size + rank * per_rank
        for index in range(num_microbatches):
            start = first + index * trainer.micro_batch_size
            batch = source.batch(range(start, start + trainer.micro_batch_size))
            tokens, targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)
            (model(tokens, targets=targets) * (world_size / num_tokens)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    turns.leave(1)


def compare_throughput(rank: int, world_size: int, folder: str, port: int) -> None:
    """Run both loops in turns, a step each; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    config = make_config(world_size)
    turns = Turns()
    loops = [
        threading.Thread(target=run_hp_train, args=(config, rank, world_size, Path(folder), turns)),
        threading.Thread(target=run_bare, args=(config, rank, world_size, turns)),
    ]
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join()
    ours, bare = (times[WARM_UP_STEPS:] for times in turns.times)
    if rank == 0:
        tokens = config.trainer.global_batch_size * config.trainer.seq_len
        ratios = [theirs / own for own, theirs in zip(ours, bare, strict=True)]
        label = "single process" if world_size == 1 else f"fsdp {world_size}"
        print(
            f"{label:15} hp-train {tokens / statistics.median(ours):8,.0f} tok/s   bare loop "
            f"{tokens / statistics.median(bare):8,.0f} tok/s   median ratio {statistics.median(ratios):.3f} "
            f"(quartiles {', '.join(f'{ratio:.3f}' for ratio in statistics.quantiles(ratios))}; {len(ratios)} pairs)",
            flush=True,
        )
    dist.destroy_process_group()


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


BARE_SCRIPT = """
import os, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import torch.distributed.checkpoint
from hp_train.models.llama import Llama
from hp_train.config.schema import ModelSection
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = Llama(ModelSection(dim=128, num_layers=4, num_heads=4, ffn_dim=384))
for block in model.blocks.values():
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.randint(0, 256, (4, 128))
model(tokens, targets=tokens).backward()
optimizer.step()
os._exit(0)
"""


def compare_startup() -> None:
    """Time the command from the shell: composing alone, and up to the first step against torchrun."""
    bin_dir = Path(sys.executable).parent
    times = [_wall_s([str(bin_dir / "hp-train"), "--cfg", "job"]) for _ in range(7)]
    print(f"hp-train --cfg job: median {statistics.median(times):.2f} s")
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "bare.py"
        script.write_text(BARE_SCRIPT)
        for turn in range(5):
            run_dir = Path(folder) / f"run{turn}"
            command = [
                str(bin_dir / "hp-train"),
                "recipe=llama_fsdp",
                f"trainer.run_dir={run_dir}",
                "trainer.max_steps=1",
            ]
            command += ["checkpoint.every=0", "trainer.eval_every=0", "trainer.device=cpu"]
            ours.append(_first_row_s(command, run_dir / "metrics.jsonl"))
            theirs.append(
                _wall_s([str(bin_dir / "torchrun"), "--nproc-per-node=2", f"--master-port={free_port()}", str(script)])
            )
    ratio = statistics.median(own / other for own, other in zip(ours, theirs, strict=True))
    print(
        f"first step of 2 processes: hp-train {statistics.median(ours):.2f} s, torchrun "
        f"{statistics.median(theirs):.2f} s to its exit; median ratio {ratio:.2f}"
    )


def _wall_s(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started


def _first_row_s(command: list[str], metrics: Path) -> float:
    """Return the time until the first row of metrics is there, then let the run end."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not (metrics.exists() and metrics.stat().st_size):
        if process.poll() is not None and not metrics.exists():
            raise RuntimeError(process.stderr.read())
        time.sleep(0.01)
    elapsed = time.perf_counter() - started
    process.communicate()
    return elapsed


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["throughput", "startup"])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if parser.parse_args().what == "startup":
        compare_startup()
        return
    for world_size in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(compare_throughput, (world_size, folder, free_port()), nprocs=world_size)


if __name__ == "__main__":
    main()
