"""Step time and memory of hp-train's `fully_shard` against torch's FSDP2 and `replicate`, on CPU over gloo.

    python scripts/bench_fully_shard.py time   --mode fsdp --tokens 128
    python scripts/bench_fully_shard.py memory --mode ddp
    python scripts/bench_fully_shard.py floor  --mode fsdp --tokens 128

Both engines live in the same processes, wrap the same Llama the same way (embedding, each block, the rest) and take
turns: A B A B, each turn a few AdamW steps; the figure is the ratio of the median step times. The machine's noise
hits both. `floor` times bare computation and the bytes of one step sent through gloo's own best call.

CPU time of a step is measured beside the clock: it says the same with far less noise on a machine that does other
things.

Expected before measuring, from gloo's rates (reduce_scatter 12.1 ms for 8 MB, all_reduce 11.5, all_gather 6.1, messages
5.4; 84.7, 61.1, 37.7 and 12.0 for 32 MB) and 289 ms of computation at 128 tokens: fsdp 2 at most 0.80 of FSDP2 and 0.90
of FSDP2 with async unshard, hsdp the same, ddp at most 0.88 of `replicate`; 2,048 tokens 0.96 and 1.0; memory beyond
shards, gradients, optimizer and activations at most 0.85, ddp's total at most 0.90.

Measured with torch 2.13, two cores with nothing else on them, a 32 M Llama, the trainer's optimizer (fused AdamW),
128 tokens a rank unless said otherwise; milliseconds are medians of a step by the clock, ratios ours / torch:

    case                                   ours      torch     ratio   CPU     target
    fsdp 2 vs FSDP2                        1042.1    1657.5    0.63    0.64    0.80
    fsdp 2 vs FSDP2 async, prefetch        1042.1    1458.0    0.71    0.72    0.90
    hsdp 2 x 2 vs FSDP2                    1937.3    2636.3    0.73    0.74    0.80
    hsdp 2 x 2 vs FSDP2 async, prefetch    1937.3    2693.6    0.72    0.71    0.90
    ddp 2 vs replicate                      917.2    1321.0    0.69    0.82    0.88
    8 units of 32 small parameters          101.1     149.7    0.68    0.79
    8 units of 256 small parameters         488.4     610.4    0.80    0.90
    fsdp 2, 2,048 tokens; async            10082     12968     0.78; 0.82   0.85      0.96; 1.0
    hsdp 2 x 2, 2,048 tokens; async        21359     21484     0.99; 0.96   0.99      0.96; 1.0
    with --loop-adamw, torch's default AdamW, whose loop over DTensors costs both engines the same:
    fsdp 2 vs FSDP2; async                 1042.8    1483.3    0.70; 0.76
    hsdp 2 x 2 vs FSDP2; async             2508.2    3027.4    0.83; 0.84
    ddp 2 vs replicate                     1044.0    1299.6    0.80
    8 units of 32, of 256 parameters       242.5, 1644.3       0.81, 0.92

    memory (MemTracker, exact)             ours MiB  torch MiB ratio   target
    fsdp 2, beyond the persistent          17.4      25.5      0.68    0.85
    hsdp 2 x 2, beyond the persistent      20.4      25.5      0.80    0.85
    ddp 2, total, fused AdamW              522.1     588.7     0.89    0.90
    ddp 2, total, --loop-adamw             546.1     588.7     0.93    0.90

The floor of fsdp 2 (`floor`, same run): 651 ms of computation and optimizer + 3 passes of 81 ms on the wire = 895 ms;
a step takes 1.16 times that; of hsdp 2 x 2, 1212 + 4 x 121 = 1696 ms (1.14 times); of ddp 2, 620 + 2 x 47 = 714 ms
(1.28 times). What limits it: two thirds of the time is computation and optimizer, the rest the kernel's copies into and
out of the sockets. Four processes on two cores (hsdp) add up their CPU time: at 2,048 tokens their floor is 21492 +
4 x 137 ms, what torch takes too, so that no engine could be at 0.96 of it there. In ddp the peak with --loop-adamw is
the optimizer's: 514.1 MiB of parameters, gradients and moments and two temporaries of its largest parameter (16 MiB
each) are there whatever the engine does; the engine's own peak is that of the fused line. With many small parameters
Python's cost per parameter limits both engines.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from hp_train.config.schema import ModelSection, OptimizerSection
from hp_train.fully_shard import fully_shard
from hp_train.models.llama import Llama
from hp_train.training.optimizer import build_optimizer

MESHES = {"fsdp": (2,), "ddp": (2,), "hsdp": (2, 2)}
LLAMA_31M = ModelSection(vocab_size=8192, dim=512, num_layers=8, num_heads=8, num_kv_heads=8, ffn_dim=1376)


class SmallUnits(nn.Module):
    """`num_units` units of `num_params` small vectors each: what the cost per parameter shows on."""

    def __init__(self, num_units: int, num_params: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(Scales(num_params) for _ in range(num_units))

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for unit in self.units:
            x = unit(x)
        return x.sum()


class Scales(nn.Module):
    """A chain of element-wise products."""

    def __init__(self, num_params: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(64) for _ in range(num_params))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * scale
        return x


def build_model(small_params: int) -> nn.Module:
    torch.manual_seed(0)
    return SmallUnits(8, small_params) if small_params else Llama(LLAMA_31M)


def units_of(model: nn.Module) -> list[nn.Module]:
    if isinstance(model, SmallUnits):
        return [*model.units, model]
    assert isinstance(model, Llama)
    return [model.model.embed_tokens, *model.blocks.values(), model]


def wrap(model: nn.Module, engine: str, mode: str, mesh: DeviceMesh) -> nn.Module:
    """Apply `engine`: ours, torch (its defaults), or torch_async (unshard as Work handles, prefetch one unit ahead)."""
    units = units_of(model)
    for unit in units:
        if engine == "ours":
            fully_shard(unit, mesh=mesh, mode=mode)
        elif mode == "ddp":
            replicate(unit, mesh=mesh)
        else:
            torch_fully_shard(unit, mesh=mesh)
    if engine == "torch_async":
        model._set_unshard_async_op(True)
        inner = units[:-1]
        for before, after in zip(inner[:-1], inner[1:], strict=True):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
    return model


def optimizer_for(named_parameters: dict[str, nn.Parameter], args: argparse.Namespace) -> torch.optim.Optimizer:
    """The trainer's own optimizer, or with --loop-adamw torch's default, a loop with temporaries of its own."""
    if args.loop_adamw:
        return torch.optim.AdamW(named_parameters.values(), lr=1e-4)
    return build_optimizer(named_parameters, OptimizerSection(lr=1e-4), torch.device("cpu"))


class Run:
    """A wrapped model with its optimizer and a batch; `step` is one training step."""

    def __init__(self, engine: str, args: argparse.Namespace, mesh: DeviceMesh | None) -> None:
        self.model = build_model(args.small_params)
        if mesh is not None:
            wrap(self.model, engine, args.mode, mesh)
        self.optimizer = optimizer_for(dict(self.model.named_parameters()), args)
        generator = torch.Generator().manual_seed(dist.get_rank())
        if args.small_params:
            self.inputs = torch.randn(4, 64, generator=generator)
        else:
            self.inputs = torch.randint(0, LLAMA_31M.vocab_size, (1, args.tokens), generator=generator)

    def step(self) -> tuple[float, float]:
        """Seconds the step took, by the clock and of this process's CPU time."""
        start, cpu_start = time.perf_counter(), time.process_time()
        if isinstance(self.model, Llama):
            loss = self.model(self.inputs, targets=self.inputs) / self.inputs.numel()
        else:
            loss = self.model(self.inputs, self.inputs)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start, time.process_time() - cpu_start


def take_turns(runs: dict[str, Run], args: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Step times (clock, CPU) in seconds by engine; neither the first round nor the turns' warm-up is counted."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for round_index in range(args.rounds + 1):
        for name, run in runs.items():
            dist.barrier()
            measured = [run.step() for _ in range(args.warm_up + args.steps)][args.warm_up :]
            if round_index > 0:
                times[name] += measured
    return times


def measure_time(rank: int, args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, Any]:
    engines = ["ours", "torch"] + (["torch_async"] if args.asynchronous and args.mode != "ddp" else [])
    times = take_turns({name: Run(name, args, mesh) for name in engines}, args)
    result: dict[str, Any] = {}
    for position, kind in enumerate(("clock", "cpu")):
        medians = {name: statistics.median(pair[position] for pair in pairs) for name, pairs in times.items()}
        result[f"{kind}_ms"] = {name: round(1e3 * value, 1) for name, value in medians.items()}
        result |= {f"{kind} ours/{name}": round(medians["ours"] / medians[name], 3) for name in engines[1:]}
    return result


def measure_memory(rank: int, args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, Any]:
    """Peak bytes of three steps by MemTracker, whole and beyond shards, their gradients, optimizer and activations."""
    peaks = {}
    for engine in ("ours", "torch"):
        tracker = MemTracker()
        with tracker:
            run = Run(engine, args, mesh)
            tracker.track_external(run.model, run.optimizer)
            for _ in range(3):
                run.step()
                tracker.reset_mod_stats()  # per module it follows one step only; the peak goes on
        peaks[engine] = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
        num_bytes = sum(getattr(param, "_local_tensor", param).numel() * 4 for param in run.model.parameters())
        del run, tracker
    persistent = 4 * num_bytes  # shard, gradient, two moments
    activations = _activation_bytes(args)
    beyond = {name: peak - persistent - activations for name, peak in peaks.items()}
    return {
        "peak_mib": {name: round(peak / 2**20, 1) for name, peak in peaks.items()},
        "persistent_mib": round(persistent / 2**20, 1),
        "activations_mib": round(activations / 2**20, 1),
        "beyond_mib": {name: round(value / 2**20, 1) for name, value in beyond.items()},
        "total ours/torch": round(peaks["ours"] / peaks["torch"], 3),
        "beyond ours/torch": round(beyond["ours"] / beyond["torch"], 3),
    }


def _activation_bytes(args: argparse.Namespace) -> int:
    """What the bare model's forward leaves for its backward, parameters apart."""
    model, saved = build_model(args.small_params), {}
    known = {param.untyped_storage().data_ptr() for param in model.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    inputs = torch.zeros(1, args.tokens, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(torch.randn(4, 64), inputs) if args.small_params else model(inputs, targets=inputs)
        del loss
    return sum(saved.values())


def measure_floor(rank: int, args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, Any]:
    """Bare computation, with the optimizer on this rank's share, plus the step's bytes at gloo's own best rate."""
    bare = Run("none", args, None)
    num_shards = 1 if args.mode == "ddp" else MESHES[args.mode][-1]
    shares = {
        name: nn.Parameter(param.detach().flatten()[::num_shards].clone())
        for name, param in bare.model.named_parameters()
    }
    bare.optimizer = optimizer_for(shares, args)
    times = []
    for _ in range(args.rounds * args.steps + 1):
        bare.model.zero_grad()
        for share in shares.values():
            share.grad = torch.zeros_like(share)
        dist.barrier()
        times.append(bare.step()[0])
    numel = sum(param.numel() for param in bare.model.parameters())
    return {"compute_ms": round(1e3 * statistics.median(times[1:]), 1), **_wire(numel, args.mode)}


def _wire(numel: int, mode: str) -> dict[str, Any]:
    """Milliseconds that one gather and one reduction of all parameters take as bare messages of 16 MiB."""
    unit = min(numel, 4 * 2**20)
    group = dist.group.WORLD
    assert group is not None
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, theirs = torch.zeros(unit // size), [torch.zeros(unit // size) for _ in range(size)]
    times = []
    for _ in range(15):
        dist.barrier()
        start = time.perf_counter()
        peers = [peer for peer in range(size) if peer != rank]
        works = [group.recv([theirs[peer]], peer, 7) for peer in peers]
        works += [group.send([mine], peer, 7) for peer in peers]
        for work in works:
            work.wait()
        times.append(time.perf_counter() - start)
    one_pass = statistics.median(times) * numel / unit
    passes = {"fsdp": 3, "ddp": 2, "hsdp": 4}[mode]
    return {"wire_ms_a_pass": round(1e3 * one_pass, 1), "passes": passes, "wire_ms": round(1e3 * one_pass * passes, 1)}


MEASURES: dict[str, Callable[..., dict[str, Any]]] = {
    "time": measure_time,
    "memory": measure_memory,
    "floor": measure_floor,
}


def worker(rank: int, args: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    shape = MESHES[args.mode]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=math.prod(shape))
    names = ("dp_replicate", "dp_shard")[-len(shape) :]
    result = MEASURES[args.measure](rank, args, init_device_mesh("cpu", shape, mesh_dim_names=names))
    if rank == 0:
        case = {"measure": args.measure, "mode": args.mode, "tokens": args.tokens, "small_params": args.small_params}
        print(json.dumps({**case, **result}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measure", choices=sorted(MEASURES))
    parser.add_argument("--mode", choices=sorted(MESHES), default="fsdp")
    parser.add_argument("--tokens", type=int, default=128, help="tokens a rank and step")
    parser.add_argument("--small-params", type=int, default=0, help="N small parameters a unit instead of the Llama")
    parser.add_argument("--loop-adamw", action="store_true", help="torch's default AdamW instead of the trainer's")
    parser.add_argument("--asynchronous", action="store_true", help="also FSDP2 with async unshard and prefetch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="timed steps a turn")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before those, not timed; 0 for steps of seconds")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    shape = MESHES[args.mode]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            worker, (args, str(Path(folder) / "store")), nprocs=math.prod(shape), start_method="fork"
        )


if __name__ == "__main__":
    main()
