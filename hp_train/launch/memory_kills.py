"""How often the kernel has killed for want of memory where this process runs. No torch.

A process that the kernel kills leaves no word, and signal 9 alone does not tell it from a person's `kill -9`. The
count in the control group's memory.events does (cgroup v2, the kernel's Documentation/admin-guide/cgroup-v2.rst).
"""

from __future__ import annotations

from pathlib import Path


def count_memory_kills(root: Path = Path("/")) -> int:
    """Return the kills for want of memory in this process's control group; 0 where the kernel does not say."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        group = next(line.partition("::")[2] for line in lines if line.startswith("0::"))
        events = (root / "sys/fs/cgroup" / group.lstrip("/") / "memory.events").read_text()
        return next(int(line.split()[1]) for line in events.splitlines() if line.startswith("oom_kill "))
    except (OSError, StopIteration, ValueError, IndexError):
        return 0
