"""What saving costs: the pause of training and the loss of throughput, in the background, at once, and not at all.

    python scripts/bench_save.py [--processes 2] [--steps 36] [--every 10] [--dim 512]

Trains the same model three times with the real trainer, on GPUs where there are any, else on the CPU, and prints a
table. The pause is the time that training stands still for a save; throughput counts everything from the end of the
warm-up to the beginning of the last step. With `--steps` a few above a multiple of `--every`, what the last save still
writes in the background is counted too, and the save at the end of the run, which is made at once in any way, is not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hp_train.checkpoint.size import size_text
from hp_train.config.schema import TrainerConfig
from hp_train.training.checkpointing import CheckpointSession
from hp_train.training.run_context import RunContext
from hp_train.training.setup import build_worker
from hp_train.training.trainer import Trainer

WARM_UP = 5  # steps


def make_config(args: argparse.Namespace, way: str) -> TrainerConfig:
    """Return the run of one way to save."""
    config = TrainerConfig()
    config.model.dim, config.model.ffn_dim, config.model.num_layers = args.dim, 3 * args.dim, args.layers
    config.model.num_heads, config.model.vocab_size = max(1, args.dim // 64), args.vocab
    config.data.name = "random"
    config.trainer.seq_len, config.trainer.micro_batch_size = 128, 1
    config.trainer.global_batch_size = 2 * args.processes
    config.trainer.max_steps, config.fsdp.dp_shard_size = args.steps, args.processes
    config.checkpoint.every = 0 if way == "none" else args.every
    config.checkpoint.every_minutes, config.checkpoint.keep_last = None, 1
    config.checkpoint.async_save = way == "in the background"
    return config


def run(rank: int, args: argparse.Namespace, way: str, folder: Path) -> None:
    """Train on one rank and leave its figures in `folder`."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(args.processes), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    on_gpu = torch.cuda.is_available()
    torch.set_num_threads(1)
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", init_method=f"file://{folder}/store",
                            rank=rank, world_size=args.processes)  # fmt: skip
    context = RunContext(folder / "run", attempt=1, rank=rank, local_rank=rank, world_size=args.processes)
    config = make_config(args, way)
    worker = build_worker(config, context)
    pauses: list[float] = []
    save = CheckpointSession.save

    def timed_save(session: CheckpointSession, step: int, *more: object, must_succeed: bool) -> None:
        started = time.perf_counter()
        save(session, step, *more, must_succeed=must_succeed)
        if step < args.steps:
            pauses.append(time.perf_counter() - started)

    CheckpointSession.save = timed_save
    starts: list[float] = []
    worker.optimizer.register_step_pre_hook(lambda *_: starts.append(time.perf_counter()))
    Trainer(config, context, worker).run()
    if rank == 0:
        tokens = (len(starts) - 1 - WARM_UP) * worker.batch_plan.tokens_per_step
        sizes = [path.stat().st_size for path in (folder / "run/checkpoints").glob("step_*/*")]
        rate = tokens / (starts[-1] - starts[WARM_UP])
        figures = {"pauses": pauses, "tokens_per_second": rate, "bytes": sum(sizes)}
        (folder / "figures.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


def main() -> None:
    """Measure the three ways, each `--repeats` times in turn, and print the best of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("processes", 2), ("steps", 36), ("every", 10), ("dim", 512), ("layers", 4), ("repeats", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; default: the temporary folder")
    args = parser.parse_args()
    found: dict[str, dict] = {}
    for _ in range(args.repeats):
        for way in ("none", "at once", "in the background"):
            folder = Path(tempfile.mkdtemp(dir=args.folder))
            (folder / "run").mkdir()
            mp.spawn(run, args=(args, way, folder), nprocs=args.processes)
            figures = json.loads((folder / "figures.json").read_text())
            shutil.rmtree(folder)
            if way not in found or figures["tokens_per_second"] > found[way]["tokens_per_second"]:
                found[way] = figures
    base = found["none"]["tokens_per_second"]
    size = size_text(found["at once"]["bytes"])
    print(f"checkpoint of {size}, every {args.every} steps, {args.processes} processes")
    for way, figures in found.items():
        pauses = figures["pauses"]
        text = f"mean {1000 * sum(pauses) / len(pauses):.0f} ms, longest {1000 * max(pauses):.0f} ms" if pauses else "-"
        rate = figures["tokens_per_second"]
        print(f"{way:18} {rate:9,.0f} tokens/s ({rate / base - 1:+.1%})  pause {text}")


if __name__ == "__main__":
    main()
