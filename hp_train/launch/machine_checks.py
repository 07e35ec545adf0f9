"""What a machine must have to train, each thing tried, with the way out where it lacks: `hp-train doctor`. No torch.

A check never raises for what it finds: a machine that lacks something is an answer. torch is imported only by the
probe of the collectives, in processes of its own.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hp_train.launch.capsule import version_of
from hp_train.launch.devices import usable_cores
from hp_train.launch.find_run import folder_of_runs
from hp_train.launch.nvidia import describe_driver, torch_obstacle, visible_devices
from hp_train.launch.run_dir import nearest_standing

PYTHONS = ((3, 11), (3, 13))
TORCHES = ((2, 11), (2, 14))
_PROBE_LIMIT_S = 120.0
_LEAST_SHM_BYTES = 2**30  # NCCL and data loaders keep segments there; containers come with 64 MiB
_LEAST_FREE_BYTES = 10**9
_GOOD_FREE_BYTES = 20 * 10**9
_LEAST_FILES, _GOOD_FILES = 256, 4096
_SLURM_TOOLS = ("sbatch", "srun", "squeue", "scontrol", "scancel", "sacct")


class Verdict(StrEnum):
    """What a check came to."""

    OK = "ok"
    WARNING = "warning"  # some runs will miss it
    FAILED = "failed"  # no run will work, or none on these devices


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    verdict: Verdict
    found: str
    way_out: str = ""

    def line(self) -> str:
        """Return it on one line."""
        way_out = f"; way out: {self.way_out}" if self.way_out else ""
        return f"{self.verdict.value:<8} {self.name:<14} {self.found}{way_out}"


def check_machine() -> Iterator[Check]:
    """Yield every check in turn, the slow one (collectives) after those it depends on."""
    yield check_python(sys.version_info[:3])
    torch = check_torch(version_of("torch"))
    yield torch
    yield check_driver()
    num_gpus = visible_devices().visible
    yield check_devices()
    if torch.verdict is not Verdict.FAILED:
        yield check_collectives("gloo")
        if num_gpus > 1 and torch_obstacle(num_gpus) is None:
            yield check_collectives("nccl")
    yield check_host_name(socket.gethostname())
    yield check_shared_memory(Path("/dev/shm"), num_gpus)
    yield check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE))
    yield check_free_space(folder_of_runs())
    yield check_slurm()


def check_python(found: tuple[int, ...]) -> Check:
    """Say whether this Python is one that hp-train runs on."""
    text = ".".join(map(str, found))
    low, high = (".".join(map(str, end)) for end in PYTHONS)
    if PYTHONS[0] <= found[:2] <= PYTHONS[1]:
        return Check("python", Verdict.OK, f"{text} ({sys.executable})")
    return Check("python", Verdict.FAILED, f"{text} is not {low} to {high}", f"make a venv with Python {high}")


def check_torch(found: str | None) -> Check:
    """Say whether torch is there in a version that hp-train runs on."""
    low, high = (".".join(map(str, end)) for end in TORCHES)
    if found is None:
        return Check("torch", Verdict.FAILED, "is not installed", f"pip install 'torch>={low}'")
    number = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
    if TORCHES[0] <= number <= TORCHES[1]:
        return Check("torch", Verdict.OK, found)
    return Check(
        "torch", Verdict.FAILED, f"{found} is not {low} to {high}", f"pip install 'torch>={low}' in a new venv"
    )


def check_driver() -> Check:
    """Say which NVIDIA driver is there and whether torch was built for it."""
    num_gpus = visible_devices().total
    if not num_gpus:
        return Check("driver", Verdict.OK, "no NVIDIA GPU, so none is needed")
    obstacle = torch_obstacle(num_gpus)
    if obstacle is None:
        return Check("driver", Verdict.OK, describe_driver())
    found, _, way_out = obstacle.partition("; ")
    return Check("driver", Verdict.FAILED, found, way_out)


def check_devices() -> Check:
    """Say on what runs will train."""
    devices = visible_devices()
    cores = usable_cores()
    if devices.visible:
        return Check("devices", Verdict.OK, f"{devices.visible} of {devices.total} NVIDIA GPUs, {cores} CPU cores")
    if devices.total:
        return Check(
            "devices", Verdict.WARNING, f"{devices.total} NVIDIA GPUs, none visible", "unset CUDA_VISIBLE_DEVICES"
        )
    return Check("devices", Verdict.OK, f"CPU only, {cores} cores: small models train, large ones are refused")


def check_collectives(backend: str) -> Check:
    """Add up a number over two real processes, as the workers of a run do."""
    name = f"{backend} x 2"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = dict(os.environ)
    if backend == "gloo" and Path("/sys/class/net/lo").exists():
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # as the launcher sets it: no name is asked for
    words = [sys.executable, "-P", "-m", "hp_train.launch.collective_probe"]
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        ranks = [
            subprocess.Popen(
                [*words, str(rank), "2", str(port), backend],
                env=environment, stdout=subprocess.PIPE, stderr=errors, text=True,
            )
            for rank in (0, 1)
        ]  # fmt: skip
        try:
            told = [rank.communicate(timeout=_PROBE_LIMIT_S)[0].strip() for rank in ranks]
        except subprocess.TimeoutExpired:
            told = [f"no answer in {_PROBE_LIMIT_S:.0f} s"]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        errors.seek(0)
        last_words = [line.strip() for line in errors.read().splitlines() if line.strip()]
    if told == ["3", "3"]:
        return Check(name, Verdict.OK, f"two processes added up 1 + 2 in {time.monotonic() - started:.1f} s")
    reason = last_words[-1] if last_words else f"the sum 1 + 2 came to {', '.join(told)}"
    variable = "GLOO_SOCKET_IFNAME" if backend == "gloo" else "NCCL_DEBUG=INFO; NCCL_SOCKET_IFNAME"
    return Check(name, Verdict.FAILED, reason, f"allow connections over 127.0.0.1; see {variable}")


def check_host_name(name: str) -> Check:
    """Say whether this machine finds itself by its name, as machines of one run find each other."""
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
    except OSError:
        return Check(
            "host name", Verdict.WARNING, f"{name} has no address; runs on one machine do without",
            f"add `127.0.1.1 {name}` to /etc/hosts, or have it entered in DNS",
        )  # fmt: skip
    return Check("host name", Verdict.OK, f"{name} is {', '.join(addresses)}")


def check_shared_memory(folder: Path, num_gpus: int) -> Check:
    """Say whether there is room for what processes of one machine share."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return Check(str(folder), Verdict.WARNING, "is not there", "mount a tmpfs on it")
    found = f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"
    if usage.free >= _LEAST_SHM_BYTES:
        return Check(str(folder), Verdict.OK, found)
    verdict = Verdict.FAILED if num_gpus > 1 else Verdict.WARNING
    return Check(
        str(folder), verdict, f"{found}; NCCL and compiled code want 1 GiB", "start the container with --shm-size=8g"
    )


def check_open_files(limits: tuple[int, int]) -> Check:
    """Say whether a process may open enough files (every rank's logs, connections, token files)."""
    soft, hard = limits
    unlimited = resource.RLIM_INFINITY
    found = "unlimited" if soft == unlimited else f"{soft} (at most {'any' if hard == unlimited else hard})"
    if soft == unlimited or soft >= _GOOD_FILES:
        return Check("open files", Verdict.OK, found)
    verdict = Verdict.FAILED if soft < _LEAST_FILES else Verdict.WARNING
    most = 65536 if hard == unlimited else min(hard, 65536)
    way_out = f"ulimit -n {most}" if most > soft else "raise nofile in /etc/security/limits.conf"
    return Check("open files", verdict, f"{found}; many ranks on one machine want {_GOOD_FILES}", way_out)


def check_free_space(folder: Path) -> Check:
    """Say whether runs can be written where they will be."""
    standing = nearest_standing(folder)
    elsewhere = "set $HP_TRAIN_RUNS or trainer.runs_root to a folder on another disk"
    if not standing.is_dir():
        return Check("runs", Verdict.FAILED, f"{folder} cannot be made: {standing} is not a folder", elsewhere)
    if not os.access(standing, os.W_OK | os.X_OK):
        return Check("runs", Verdict.FAILED, f"{folder} is not writable", elsewhere)
    free = shutil.disk_usage(standing).free
    found = f"{free / 1e9:,.1f} GB free for {folder}"
    if free >= _GOOD_FREE_BYTES:
        return Check("runs", Verdict.OK, found)
    verdict = Verdict.WARNING if free >= _LEAST_FREE_BYTES else Verdict.FAILED
    return Check("runs", verdict, f"{found}; a checkpoint takes 12 bytes a parameter, three are kept", elsewhere)


def check_slurm() -> Check:
    """Say whether SLURM's tools are there, all or none."""
    missing = [tool for tool in _SLURM_TOOLS if shutil.which(tool) is None]
    if not missing:
        return Check("slurm", Verdict.OK, f"{', '.join(_SLURM_TOOLS)} are there")
    if len(missing) == len(_SLURM_TOOLS):
        return Check("slurm", Verdict.OK, "not on this machine; only hp-train submit needs it")
    return Check(
        "slurm", Verdict.WARNING, f"{', '.join(missing)} missing", "load the cluster's slurm module, or extend PATH"
    )
