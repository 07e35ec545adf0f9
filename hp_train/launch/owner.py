"""Who runs in a run directory: owner.json, kept fresh by a heartbeat. No torch.

On one machine a launcher is alive when a process with its pid and start time exists; the pid alone may have been given
to somebody else. From other machines (or another pid namespace, as in a container) only the heartbeat can tell.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from hp_train.errors import ConfigError
from hp_train.launch.files import read_json, write_json

OWNER_FILE = "owner.json"
HEARTBEAT_S = 15.0
STALE_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class Owner:
    """One launcher process."""

    host: str
    machine: str  # boot and pid namespace: two processes with the same value see each other's pids
    pid: int
    process_start: float  # as `process_start` returns it; only ever compared with another such value
    heartbeat: float  # seconds since the epoch

    @classmethod
    def myself(cls) -> Owner:
        """Return this process, with a heartbeat of now."""
        start = process_start(os.getpid())
        assert start is not None, "a running process has a start time"
        return cls(socket.gethostname(), machine_identity(), os.getpid(), start, time.time())

    def lives(self) -> bool:
        """Say whether this owner still runs, as far as this machine can know."""
        if self.machine == machine_identity():
            return process_start(self.pid) == self.process_start
        return time.time() - self.heartbeat < STALE_AFTER_S

    def describe(self) -> str:
        """Return e.g. `process 4711 on node3`."""
        return f"process {self.pid} on {self.host}"


def machine_identity() -> str:
    """Return a text that two processes share exactly when they see each other under the same pids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux: no pid namespaces there
        return socket.gethostname()


def process_start(pid: int) -> float | None:
    """Return when process `pid` started (Linux: ticks since boot; elsewhere: epoch seconds); None if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
        import psutil

        return psutil.Process(pid).create_time() if psutil.pid_exists(pid) else None
    except ProcessLookupError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before may hold spaces and parentheses
    state, start_ticks = fields[0], fields[19]
    return None if state in "ZX" else float(start_ticks)


def living_owner(run_dir: Path) -> Owner | None:
    """Return the launcher that runs in `run_dir` now, if any."""
    found = read_json(run_dir / OWNER_FILE)
    if found is None:
        return None
    owner = Owner(**found)
    return owner if owner.lives() else None


@contextlib.contextmanager
def own(run_dir: Path) -> Iterator[None]:
    """Hold `run_dir` for this process while the block runs. Raises ConfigError if somebody else does."""
    _claim(run_dir)
    stop = threading.Event()
    beat = threading.Thread(target=_beat, args=(run_dir, stop), name="heartbeat", daemon=True)
    beat.start()
    try:
        yield
    finally:
        stop.set()
        beat.join()
        (run_dir / OWNER_FILE).unlink(missing_ok=True)


def _claim(run_dir: Path) -> None:
    with open(run_dir / ".owner.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two launchers that start at once look and write one after the other
        owner = living_owner(run_dir)
        if owner is not None and owner.pid != os.getpid():
            raise ConfigError(f"run directory {run_dir} is in use by {owner.describe()}")
        write_json(run_dir / OWNER_FILE, asdict(Owner.myself()))


def _beat(run_dir: Path, stop: threading.Event) -> None:
    while not stop.wait(HEARTBEAT_S):
        write_json(run_dir / OWNER_FILE, asdict(Owner.myself()))
