"""Does host memory grow? Watch every process of a real run from outside, and draw it.

    python scripts/measure_rss.py --folder /tmp/rss --svg docs/host_memory.svg

Runs the real command for 2,000 steps of a tiny model with a checkpoint, an evaluation and a log line every 20 steps,
and reads the resident memory of the launcher and the workers four times a second. Ends with status 1 when a process
holds more at the end than after the first quarter, beyond 2 % and 4 MB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import psutil

SETTINGS = [
    "model.dim=32", "model.num_layers=2", "model.num_heads=4", "model.ffn_dim=64", "trainer.seq_len=32",
    "trainer.global_batch_size=4", "trainer.micro_batch_size=1", "trainer.device=cpu", "trainer.eval_every=20",
    "trainer.eval_batches=1", "checkpoint.every=20", "checkpoint.async_save=true", "trainer.log_every=20",
]  # fmt: skip
MOST_GROWTH, MOST_GROWTH_BYTES = 0.02, 4 << 20

Samples = dict[str, list[tuple[int, int]]]  # name -> (step, resident bytes)


def watch(process: subprocess.Popen, run_dir: Path) -> Samples:
    """Return what each process held at each step, until the launcher ends."""
    samples: Samples = defaultdict(list)
    launcher = psutil.Process(process.pid)
    while process.poll() is None:
        time.sleep(0.25)
        metrics = run_dir / "metrics.jsonl"
        lines = metrics.read_bytes().splitlines() if metrics.exists() else []
        try:
            step = json.loads(lines[-1])["step"] if lines else 0
            workers = [each for each in launcher.children() if "hp_train.launch.worker" in each.cmdline()]
            for name, each in [("launcher", launcher), *((f"rank {n}", each) for n, each in enumerate(workers))]:
                if step:
                    samples[name].append((step, each.memory_info().rss))
        except (psutil.NoSuchProcess, ValueError):  # it ended while it was looked at; half a row
            continue
    return samples


def growth(samples: list[tuple[int, int]], last_step: int) -> tuple[float, float]:
    """Return the mean bytes of the second quarter of the run and of the last."""
    early = [held for step, held in samples if last_step // 4 <= step < last_step // 2]
    late = [held for step, held in samples if step >= last_step * 3 // 4]
    return sum(early) / len(early), sum(late) / len(late)


def draw(samples: Samples, path: Path) -> None:
    """Write a picture of resident memory over steps."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3))
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    for name, points in samples.items():
        axes.plot([step for step, _ in points], [held / 2**20 for _, held in points], label=name, linewidth=1)
    axes.set(xlabel="step", ylabel="resident memory (MiB)", ylim=(0, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    """Run, watch, print a table; 1 when some process grew."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True, help="the run's directory; must not exist")
    parser.add_argument("--svg", type=Path, help="where to draw")
    args = parser.parse_args()
    words = [*SETTINGS, f"fsdp.dp_shard_size={args.processes}", f"trainer.max_steps={args.steps}"]
    words.append(f"trainer.run_dir={args.folder.absolute()}")
    process = subprocess.Popen([sys.executable, "-m", "hp_train", *words], stdout=subprocess.DEVNULL)
    samples = watch(process, args.folder)
    if process.returncode != 0:
        print(f"the run ended with status {process.returncode}")
        return 1
    grew = False
    for name, points in samples.items():
        early, late = growth(points, args.steps)
        grew |= late - early > max(MOST_GROWTH * early, MOST_GROWTH_BYTES)
        print(f"{name:9} {early / 2**20:6.1f} MiB in the second quarter, {late / 2**20:6.1f} MiB in the last "
              f"({(late - early) / 2**10:+,.0f} KiB)")  # fmt: skip
    if args.svg is not None:
        draw(samples, args.svg)
    return int(grew)


if __name__ == "__main__":
    sys.exit(main())
