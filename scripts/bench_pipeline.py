"""The pipeline engine against torch.distributed.pipelining: step time and peak live bytes, same model, same gloo.

    python scripts/bench_pipeline.py              # everything, about five minutes on two cores
    python scripts/bench_pipeline.py time --dim 64 --schedule 1f1b --microbatches 8 --seconds 30
    python scripts/bench_pipeline.py memory
    python scripts/bench_pipeline.py overhead

Expectation, written before measuring. Both engines run the same kernels and move the same bytes; what differs is what
happens between: torch validates shapes, walks its communication lists, posts each receive right before it waits and
waits for each send; here receives are posted ahead and a step is one call. At dim 64 a micro-batch computes about as
long as such work takes, so the ratio should be at most 0.92; at dim 256 computing dominates, so at most 1.00, and
below that where torch leaves waiting exposed (gpipe: at most 0.92). With equal stages no engine can beat
(m + (p - 1) / v)(F + B), the floor that is printed beside. Memory: torch keeps m receive buffers a stage and direction
for good, a proven schedule needs its peak in flight, so the peak at m = 32 should be lower by at least the difference.

Measured (torch 2.13, two shared cores, plain transport; ratios to torch with the 95 % interval of the median, 20 to
45 s a case, several series; `least` is a loop for this one model that only computes, sends and receives):

    dim  schedule          m   ours ms  torch ms  ratio                  least  floor ms  bound
     64  gpipe             8      74.5      88.9  0.845 [0.810, 0.869]   0.770      70.3   0.92
     64  gpipe            32     280.3     336.4  0.810 [0.773, 0.861]   0.790     309.0   0.92
     64  1f1b              8      75.5      81.1  0.936 [0.919, 0.954]   0.918      70.4   0.92
     64  1f1b             32     275.6     300.6  0.925 [0.893, 0.936]   0.859     248.1   0.92
     64  interleaved_1f1b  8      82.8     109.6  0.756 [0.744, 0.779]              66.1   0.92
     64  interleaved_1f1b 32     301.6     380.6  0.791 [0.762, 0.834]             270.4   0.92
    256  gpipe             8     641.9     698.1  0.922 [0.907, 0.962]   0.927     622.5   0.92
    256  1f1b              8     653.5     664.0  0.986 [0.950, 1.005]   0.976     660.6   1.00
    256  interleaved_1f1b  8     662.2     705.3  0.942 [0.915, 0.991]             656.1   1.00

These are figures of a machine that others disturb. In an undisturbed hour the same work runs 2.6 times as
fast, and two bounds lie under the floor that is printed beside them:

     64  1f1b              8      30.0      31.1  0.974 [0.968, 0.980]   0.951      28.8   0.92
    256  gpipe             8     416.2     433.0  0.950 [0.928, 1.019]   0.944     409.2   0.92

There torch itself is within 8 % (1f1b at dim 64) and 6 % (gpipe at dim 256) of that floor, which is 0.926 and 0.945 of
its time, and the loop that does nothing else misses 0.92 as well. (The floor takes the slower stage for both; counting
each stage's own time, computing alone would be 26.7 ms or 0.86 in the first case, with no message sent.) The last
rank, which also makes the loss, is busy from its first input to its last gradient; of 3.3 ms a micro-batch there, 3.0
are the model's, 0.1 gloo's, 0.1 Python's. All memory bounds are met; 5 to 10 microseconds a MetaStep.

Two processes, one thread each, each on a core of its own with gloo's threads: unbound, ranks meet on one core now and
then, and medians scatter by 5 %. Engines take turns step by step, in the same processes; a step's time is that of the
slower rank, a ratio the median of the ratios of neighbouring steps, with the interval in which that median lies
with 95 % confidence. The ratio of the best steps says what a busy machine hides.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hp_train.pipeline_parallel import PipelineRuntime, StageInputs
from hp_train.schedule import build_schedule, lower, verify
from scripts.pipeline_engines import (
    CPU,
    PP_SIZE,
    SHAPES,
    Least,
    Ours,
    Shape,
    Torchs,
    batch_of,
    loss_of,
    modules_of,
    schedule_of,
)  # fmt: skip


def timed_turn(engine: Ours | Torchs | Least) -> float:
    """The slower rank's seconds for one step."""
    for module in engine.modules.values():
        module.zero_grad()
    dist.barrier()
    begin = time.perf_counter()
    engine.step()
    both = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return both.item()


def measure_floor(shape: Shape, name: str, num_microbatches: int, rank: int) -> float:
    """(m + (p - 1) / v)(F + B): seconds that computing alone takes, with both ranks computing at once."""
    schedule = schedule_of(name, num_microbatches)
    modules = modules_of(shape, schedule, rank)
    tokens, targets = batch_of(shape, 1)
    hidden = torch.randn(shape.rows, shape.seq_len, shape.dim)
    times = []
    for _ in range(25):
        dist.barrier()
        begin = time.perf_counter()
        for stage, module in modules.items():
            out = module(tokens if stage == 0 else hidden.detach().requires_grad_())
            out = loss_of(out, targets) if stage == schedule.num_stages - 1 else out
            out.backward(torch.ones_like(out))
        times.append(time.perf_counter() - begin)
    both = torch.tensor(statistics.median(times))
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    stages_per_rank = schedule.num_stages // PP_SIZE
    return (num_microbatches + (PP_SIZE - 1) / stages_per_rank) * both.item()


def turns_of(engines: list[Ours | Torchs | Least], seconds: float) -> list[list[float]]:
    """Steps of all engines in turn, as often as the time allows, and at least eight times."""
    turns: list[list[float]] = []
    end = time.monotonic() + seconds
    while True:
        turns.append([timed_turn(engine) for engine in engines])
        goes_on = torch.tensor(int(len(turns) < 8 or time.monotonic() < end))
        dist.all_reduce(goes_on, op=dist.ReduceOp.MIN)
        if not goes_on:
            return turns


def median_interval(values: list[float]) -> tuple[float, float]:
    """Where the median lies with 95 % confidence, whatever the distribution: order statistics by the binomial law."""
    ordered, reach = sorted(values), 0.98 * len(values) ** 0.5
    middle = (len(ordered) - 1) / 2
    return ordered[max(0, round(middle - reach))], ordered[min(len(ordered) - 1, round(middle + reach))]


def bench_time(
    rank: int, dim: int, name: str, bound: float, num_microbatches: int, options: argparse.Namespace
) -> dict:
    shape, transport = SHAPES[dim], options.transport
    engines = [Ours(shape, name, num_microbatches, rank, transport), Torchs(shape, name, num_microbatches, rank)]
    if not name.startswith("interleaved"):
        engines.append(Least(shape, name, num_microbatches, rank))
    losses = [engine.step() for engine in engines]
    if losses[0] is not None:
        assert all(torch.allclose(losses[0], each) for each in losses), f"the engines disagree on the loss: {losses}"
    turns = turns_of(engines, options.seconds)
    floor = measure_floor(shape, name, num_microbatches, rank)
    engines[0].close()
    ours, theirs, *least = zip(*turns, strict=True)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "dim": dim, "schedule": name, "m": num_microbatches, "transport": transport,
        "ours_ms": 1e3 * statistics.median(ours), "torch_ms": 1e3 * statistics.median(theirs),
        "ratio": statistics.median(ratios), "bound": bound, "floor_ms": 1e3 * floor,
        "interval": median_interval(ratios), "num_turns": len(turns), "best_ratio": min(ours) / min(theirs),
        "least": statistics.median(c / b for c, b in zip(least[0], theirs, strict=True)) if least else None,
    }  # fmt: skip


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensor storages that are made under it and still live."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._known: weakref.WeakSet = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves(out):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                if storage not in self._known:
                    self._known.add(storage)
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return out

    def _free(self, nbytes: int) -> None:
        self.live -= nbytes


def peak_live_bytes(engine_of: Callable[[], Ours | Torchs]) -> int:
    """Most bytes live during two steps, parameters and everything that the engine allocates included."""
    with LiveBytes() as counter:
        engine = engine_of()
        for _ in range(2):
            for module in engine.modules.values():
                module.zero_grad()
            engine.step()
        engine.close()
    return counter.peak


def bench_memory(rank: int, dim: int, name: str, num_microbatches: int) -> dict:
    shape = SHAPES[dim]
    ours = peak_live_bytes(lambda: Ours(shape, name, num_microbatches, rank))
    theirs = peak_live_bytes(lambda: Torchs(shape, name, num_microbatches, rank))
    schedule = schedule_of(name, num_microbatches)
    buffer_bytes = 4 * shape.rows * shape.seq_len * shape.dim
    kept = sum((stage > 0) + (stage < schedule.num_stages - 1) for stage in schedule.stages_of_rank(rank))
    needed = verify(lower(schedule, "plain"), "plain").recv_buffers[rank]
    return {
        "rank": rank, "dim": dim, "schedule": name, "m": num_microbatches, "ours": ours, "torch": theirs,
        "spared": (kept * num_microbatches - needed) * buffer_bytes,
    }  # fmt: skip


def measure_overhead() -> float:
    """Seconds per MetaStep of a pipeline of one rank whose stages compute nothing."""

    class Nothing:
        def __init__(self, stage_index: int, num_stages: int) -> None:
            self.stage_index, self.num_stages = stage_index, num_stages
            self.output = (torch.zeros(1, requires_grad=True),)

        def forward(self, micro_index, inputs, kwargs, targets):
            return self.output

        def backward(self, micro_index, output_grads):
            return output_grads

        def begin_step(self, swapped) -> None: ...

        reduce_grad = reshard = lambda self: None

    schedule = lower(build_schedule("interleaved_1f1b", 1, 64, 4), "plain")
    stages = [Nothing(stage, 4) for stage in range(4)]
    runtime = PipelineRuntime(
        stages, schedule, "plain", dist.new_group([dist.get_rank()], use_local_synchronization=True), CPU
    )
    inputs = [StageInputs((torch.zeros(1),), {}, None)] * 64
    times = []
    for _ in range(30):
        begin = time.perf_counter()
        runtime.step(inputs)
        times.append((time.perf_counter() - begin) / len(schedule.orders[0]))
    runtime.close()
    return statistics.median(times)


def worker(rank: int, world_size: int, options: argparse.Namespace) -> dict[str, list[dict] | float]:
    # Before any group is made, so that gloo's threads stay there as well.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    results: dict[str, list[dict] | float] = {"time": [], "memory": []}
    for dim, shape in SHAPES.items():
        for name, bound in shape.bounds:
            if (options.dim or dim) != dim or (options.schedule or name) != name:
                continue
            if options.what in ("all", "time"):
                for num_microbatches in [options.microbatches] if options.microbatches else (8, 32):
                    row = bench_time(rank, dim, name, bound, num_microbatches, options)
                    results["time"].append(row)
                    if rank == 0:
                        print(describe_time(row), flush=True)
            if options.what in ("all", "memory"):
                results["memory"].append(bench_memory(rank, dim, name, 32))
    if options.what in ("all", "overhead"):
        results["overhead"] = measure_overhead()
    return results


def describe_time(row: dict) -> str:
    verdict = "met" if row["ratio"] <= row["bound"] else "MISSED"
    return (
        f"dim {row['dim']:3} {row['schedule']:16} m {row['m']:2} {row['transport']:12} "
        f"ours {row['ours_ms']:7.2f} ms  torch {row['torch_ms']:7.2f} ms  ratio {row['ratio']:.3f} "
        f"[{row['interval'][0]:.3f}, {row['interval'][1]:.3f}] of {row['num_turns']} turns "
        f"(bound {row['bound']:.2f}: {verdict})  "
        f"best steps {row['best_ratio']:.3f}  "
        + (f"least loop {row['least']:.3f}  " if row["least"] else "")
        + f"floor {row['floor_ms']:7.2f} ms"
    )


def describe_memory(row: dict) -> str:
    lower_by = row["torch"] - row["ours"]
    return (
        f"dim {row['dim']:3} {row['schedule']:16} m {row['m']:2} rank {row['rank']} peak live bytes "
        f"ours {row['ours']:>11,}  torch {row['torch']:>11,}  lower by {lower_by:>10,} "
        f"(buffers spared {row['spared']:>10,}: {'met' if lower_by >= row['spared'] else 'MISSED'})"
    )


def report(results: list[dict]) -> bool:
    """Print what has not been printed while measuring; return whether every bound is met."""
    met = all(row["ratio"] <= row["bound"] for row in results[0]["time"])
    for rows in zip(*(result["memory"] for result in results), strict=True):
        for row in rows:
            met &= row["torch"] - row["ours"] >= row["spared"]
            print(describe_memory(row))
    if "overhead" in results[0]:
        overhead_us = max(result["overhead"] for result in results) * 1e6
        met &= overhead_us < 40
        print(f"interpreter: {overhead_us:.1f} microseconds a MetaStep (bound 40)")
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="all", choices=("all", "time", "memory", "overhead"))
    parser.add_argument("--dim", type=int, choices=tuple(SHAPES))
    parser.add_argument("--schedule", choices=("gpipe", "1f1b", "interleaved_1f1b"))
    parser.add_argument("--microbatches", type=int, choices=(8, 32))
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the engines take turns in each case")
    parser.add_argument("--transport", default="plain", choices=("plain", "batch", "multi_stream", "boundary"))
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    from tests.distributed.ranks import run_ranks

    return 0 if report(run_ranks(PP_SIZE, worker, options, timeout_s=600)) else 1


if __name__ == "__main__":
    sys.exit(main())
