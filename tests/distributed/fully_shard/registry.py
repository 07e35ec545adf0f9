"""Cases that run inside one process group: collected by decorator, run together, reported one by one.

A process group costs more than most cases, so a module's cases share one; a test then looks up its own case.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Case = Callable[[DeviceMesh], None]


class Registry:
    """Cases by name; `fully_shard` meshes named as hp-train names them."""

    def __init__(self) -> None:
        self.cases: dict[str, Case] = {}

    def case(self, fn: Case) -> Case:
        self.cases[fn.__name__] = fn
        return fn

    def run(self, shape: tuple[int, ...]) -> dict[str, str]:
        """Run every case on a fresh mesh; name -> '' or the traceback."""
        names = ("dp_replicate", "dp_shard")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        outcome = {}
        for name, fn in self.cases.items():
            try:
                fn(mesh)
                outcome[name] = ""
            except Exception:
                outcome[name] = traceback.format_exc()
        return outcome


def merged(per_rank: list[dict[str, str]]) -> dict[str, str]:
    """Case name -> the tracebacks of all ranks on which it failed."""
    return {
        name: "\n".join(f"rank {rank}: {texts[name]}" for rank, texts in enumerate(per_rank) if texts[name])
        for name in per_rank[0]
    }
