"""One of the processes by which `hp-train doctor` tries whether processes here can talk. Imports torch.

`python -m hp_train.launch.collective_probe RANK WORLD_SIZE PORT gloo|nccl`: joins a group over 127.0.0.1, as the
workers of a run on one machine do, adds up rank + 1 over the ranks, and prints the sum.
"""

from __future__ import annotations

import datetime
import sys

import torch
import torch.distributed as dist

TIMEOUT_S = 60


def main(arguments: list[str]) -> int:
    """Take part in one all-reduce and print what it came to."""
    rank, world_size, port = map(int, arguments[:3])
    backend = arguments[3]
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    total = torch.tensor([rank + 1.0], device=device)
    dist.all_reduce(total)
    print(int(total.item()))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
