"""Run a function on every rank of a small gloo group, under a fork server that has torch loaded already.

    losses = run_ranks(4, worker, arg)      # worker(rank, world_size, arg) -> picklable

`worker` is a module-level function; rank 0..N-1 results come back as a list. A rank that raises, dies or outlasts
`timeout_s` fails the call with every rank's traceback, and all others are killed: no test leaves a process behind.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",  # the first optimizer of a process imports it: a second of work on every rank
        "torch.distributed",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
    ]
)


class RankFailure(AssertionError):
    """Some ranks raised or died. `tracebacks` maps rank to text."""

    def __init__(self, tracebacks: dict[int, str]) -> None:
        self.tracebacks = tracebacks
        super().__init__("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(tracebacks.items())))


def _rank_main(
    pipe: Connection, rank: int, world_size: int, store: str, fn: Callable, args: tuple, timeout_s: float
) -> None:
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size)
    )
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        result = fn(rank, world_size, *args)
        dist.destroy_process_group()
        # Plain pickle copies tensors; the connection's own pickler would send handles that die with this process.
        pipe.send_bytes(pickle.dumps((True, result)))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        pipe.close()
    os._exit(0)  # skip atexit: gloo threads of a failed group may never join


def run_ranks(world_size: int, fn: Callable, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Call `fn(rank, world_size, *args)` on `world_size` gloo ranks and return their results by rank.

    Raises RankFailure if any rank raises, dies or is still running after `timeout_s` seconds.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        for rank in range(world_size):
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_rank_main,
                args=(sender, rank, world_size, str(Path(folder) / "store"), fn, args, timeout_s),
                daemon=True,
            )
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        try:
            return _collect(pipes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                if process.is_alive():
                    process.join(timeout=2)
                if process.is_alive():
                    process.kill()
                process.join()


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    pending = {pipe: rank for rank, pipe in enumerate(pipes)}
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            failures.update({rank: "no result before the timeout" for rank in pending.values()})
            break
        for pipe in ready:
            rank = pending.pop(pipe)
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                succeeded, value = False, "the process died without a traceback"
            (results if succeeded else failures)[rank] = value
        if failures:
            deadline = min(deadline, time.monotonic() + 5)  # peers of a failed rank get 5 s to tell their side
    if failures:
        raise RankFailure(failures)
    return [results[rank] for rank in range(len(pipes))]
