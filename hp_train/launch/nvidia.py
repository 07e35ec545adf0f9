"""Which NVIDIA devices a process here would see, and whether torch could use them; asked without importing torch.

Devices are counted from /dev and /proc, and `nvidia-smi` is asked only where a driver shows but no device node does
(WSL). The CUDA version of torch is read from the text of its version.py, that of the driver from libcuda.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Devices:
    """NVIDIA devices of this machine, as CUDA_VISIBLE_DEVICES leaves them."""

    total: int  # in the machine
    names: tuple[str, ...]  # of the visible ones: numbers, or what CUDA_VISIBLE_DEVICES calls them

    @property
    def visible(self) -> int:
        """Return how many this process may use."""
        return len(self.names)


def visible_devices(root: Path = Path("/"), environ: dict[str, str] | None = None) -> Devices:
    """Return the NVIDIA devices that a process started here would see. `root` stands for / in tests."""
    environ = dict(os.environ) if environ is None else environ
    total = _count_devices(root)
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return Devices(total, tuple(str(index) for index in range(total)))
    return Devices(total, _select(chosen, total))


def _select(chosen: str, total: int) -> tuple[str, ...]:
    """Read CUDA_VISIBLE_DEVICES as the driver does: everything from the first bad entry on is ignored."""
    names: list[str] = []
    for entry in (entry.strip() for entry in chosen.split(",")):
        is_number = re.fullmatch(r"\d+", entry) is not None
        known = int(entry) < total if is_number else entry.startswith(("GPU-", "MIG-")) and total > 0
        if not known:
            break
        if entry in names:
            return ()  # a device named twice hides all of them
        names.append(entry)
    return tuple(names)


def _count_devices(root: Path) -> int:
    nodes = [node for node in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", node.name)]
    if nodes:
        return len(nodes)
    listed = list((root / "proc/driver/nvidia/gpus").glob("*"))
    if listed:
        return len(listed)
    if not any((root / hint).exists() for hint in ("proc/driver/nvidia", "dev/nvidiactl", "dev/dxg")):
        return 0
    try:
        told = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return len(re.findall(r"^GPU \d+:", told.stdout, flags=re.MULTILINE))


def torch_obstacle(num_devices: int) -> str | None:
    """Return why the installed torch cannot use this machine's NVIDIA devices, with the versions; None if it can."""
    torch_version, torch_cuda = _torch_build()
    driver_cuda = _driver_cuda_version()
    have = f"{num_devices} NVIDIA GPU{'s' if num_devices > 1 else ''} ({describe_driver()})"
    way_out = "or train on the CPU with trainer.device=cpu"
    if torch_cuda is None:
        return (
            f"{have} that torch {torch_version} cannot use: it is built without CUDA; install a CUDA build, {way_out}"
        )
    wanted = ".".join(map(str, torch_cuda))
    if driver_cuda is None:
        return (
            f"{have} that torch {torch_version} for CUDA {wanted} cannot use: the driver's libcuda.so.1 does not load; "
            f"repair the driver, {way_out}"
        )
    if driver_cuda[0] < torch_cuda[0]:  # within one major version newer toolkits run on older drivers
        return (
            f"{have} too old for torch {torch_version}, built for CUDA {wanted}; "
            f"update the driver or install a torch for CUDA {driver_cuda[0]}, {way_out}"
        )
    return None


def describe_driver() -> str:
    """Return e.g. `driver 550.54.14, CUDA 12.4`."""
    cuda = _driver_cuda_version()
    return f"driver {_driver_version() or 'unknown'}" + (f", CUDA {cuda[0]}.{cuda[1]}" if cuda else "")


def _torch_build() -> tuple[str, tuple[int, ...] | None]:
    spec = importlib.util.find_spec("torch")  # finds the folder without running it
    assert spec is not None and spec.origin is not None, "torch is a dependency of this package"
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    version = re.search(r"^__version__ = '([^']+)'", text, flags=re.MULTILINE)
    cuda = re.search(r"^cuda(?::[^=]+)? = '(\d+)\.(\d+)", text, flags=re.MULTILINE)
    return (version[1] if version else "unknown"), (int(cuda[1]), int(cuda[2])) if cuda else None


def _driver_version() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else None


def _driver_cuda_version() -> tuple[int, int] | None:
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if libcuda.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10
