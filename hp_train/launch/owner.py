"""Who runs in a run directory: owner.json, kept fresh by a heartbeat. No torch, no file locks.

On one machine a launcher is alive when a process with its pid and start time exists; the pid alone may have been given
to somebody else. From other machines (or another pid namespace, as in a container) only the heartbeat can tell, except
that a scheduler runs a job once at a time: another incarnation of the owner's job takes over at once. What decides
between two that start together is who makes the attempt's folder; see `checkpoint.fence`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from hp_train.checkpoint.fence import OWNER_FILE, Fence, newest_attempt
from hp_train.errors import ConfigError, SupersededError
from hp_train.launch.files import damaged, read_json, write_json

HEARTBEAT_S = 15.0
STALE_AFTER_S = 60.0
_RIVAL_WAIT_S = 1.0  # for whoever made an attempt's folder first to write its name


@dataclass(frozen=True, slots=True)
class Owner:
    """One launcher process."""

    host: str
    machine: str  # boot and pid namespace: two processes with the same value see each other's pids
    pid: int
    process_start: float  # as `process_start` returns it; only ever compared with another such value
    heartbeat: float  # seconds since the epoch
    attempt: int = 0
    job_id: str = ""  # of the scheduler; empty outside of one

    @classmethod
    def myself(cls, attempt: int = 0) -> Owner:
        """Return this process, with a heartbeat of now."""
        start = process_start(os.getpid())
        assert start is not None, "a running process has a start time"
        return cls(socket.gethostname(), machine_identity(), os.getpid(), start, time.time(), attempt, job_id())

    def lives(self) -> bool:
        """Say whether this owner still runs, as far as this machine can know."""
        if self.machine == machine_identity():
            return process_start(self.pid) == self.process_start
        if self.job_id and self.job_id == job_id():
            return False  # of our own job, on a machine where it ran before
        return time.time() - self.heartbeat < STALE_AFTER_S

    def is_me(self) -> bool:
        """Say whether this is the calling process."""
        mine = (machine_identity(), os.getpid(), process_start(os.getpid()))
        return (self.machine, self.pid, self.process_start) == mine

    def describe(self) -> str:
        """Return e.g. `process 4711 on node3` or `process 4711 on node3 (job 815)`."""
        return f"process {self.pid} on {self.host}" + (f" (job {self.job_id})" if self.job_id else "")


def job_id(environ: Mapping[str, str] = os.environ) -> str:
    """Return the scheduler's id of the job that this process belongs to; empty outside of one."""
    return environ.get("SLURM_JOB_ID", "")


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
    after_name = stat.rpartition(")")[2].split()  # the name before may hold spaces and parentheses
    state, start_ticks = after_name[0], after_name[19]
    return None if state in "ZX" else float(start_ticks)


def living_owner(run_dir: Path) -> Owner | None:
    """Return the launcher that runs in `run_dir` now, if any."""
    owner = last_owner(run_dir)
    return owner if owner is not None and owner.lives() else None


def last_owner(run_dir: Path) -> Owner | None:
    """Return the launcher that runs in `run_dir`, or ran there last and did not live to take its note away."""
    found = read_json(run_dir / OWNER_FILE)
    if found is None:
        return None
    known = {field.name for field in fields(Owner)}
    try:
        return Owner(**{name: value for name, value in found.items() if name in known})
    except TypeError as error:
        raise damaged(run_dir / OWNER_FILE, str(error)) from None


class Ownership:
    """This process's hold on a run directory, through one attempt after the other."""

    def __init__(self, run_dir: Path, attempt: int) -> None:
        self._run_dir = run_dir
        self._lock = threading.Lock()  # between the heartbeat and `next_attempt`
        self._take(attempt)

    def _take(self, attempt: int) -> None:
        self.attempt = attempt
        self._fence = Fence(self._run_dir, attempt)

    def next_attempt(self) -> int:
        """Begin another attempt and return its number. Raises SupersededError if somebody else has begun one."""
        with self._lock:
            self._fence.check()
            attempt = newest_attempt(self._run_dir) + 1
            try:
                (self._run_dir / "logs" / f"attempt_{attempt}").mkdir()
            except FileExistsError:
                raise SupersededError(f"attempt {attempt} has taken over {self._run_dir} this very moment") from None
            self._take(attempt)
            self._write()
        return attempt

    def check(self) -> None:
        """Raise SupersededError if somebody else has taken over: nothing is to be written any more."""
        self._fence.check()

    def _write(self) -> None:
        write_json(self._run_dir / OWNER_FILE, asdict(Owner.myself(self.attempt)))

    def beat(self) -> None:
        """Renew the heartbeat, unless the directory is somebody else's by now."""
        with self._lock:
            if self._fence.newer_attempt() is None:
                self._write()

    def release(self) -> None:
        """Take the note away if it is still ours."""
        found = read_json(self._run_dir / OWNER_FILE)
        if found is not None and found.get("attempt") == self.attempt and found.get("pid") == os.getpid():
            (self._run_dir / OWNER_FILE).unlink(missing_ok=True)


@contextlib.contextmanager
def own(run_dir: Path) -> Iterator[Ownership]:
    """Hold `run_dir` for this process while the block runs, and begin an attempt. Raises ConfigError if it is taken."""
    ownership = _claim(run_dir)
    stop = threading.Event()
    beat = threading.Thread(target=_beat, args=(ownership, stop), name="heartbeat", daemon=True)
    beat.start()
    try:
        yield ownership
    finally:
        stop.set()
        beat.join()
        with contextlib.suppress(OSError, ConfigError):  # lost, read-only or damaged: the heartbeat grows old by itself
            ownership.release()


def _claim(run_dir: Path) -> Ownership:
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    while True:
        _refuse_if_taken(run_dir)
        attempt = newest_attempt(run_dir) + 1
        folder = run_dir / "logs" / f"attempt_{attempt}"
        try:
            folder.mkdir()
        except FileExistsError:  # somebody else, this very moment
            time.sleep(_RIVAL_WAIT_S)
            continue
        try:
            _refuse_if_taken(run_dir)
        except ConfigError:
            folder.rmdir()
            raise
        write_json(run_dir / OWNER_FILE, asdict(Owner.myself(attempt)))
        return Ownership(run_dir, attempt)


def _refuse_if_taken(run_dir: Path) -> None:
    owner = living_owner(run_dir)
    if owner is not None and not owner.is_me():
        raise ConfigError(f"run directory {run_dir} is in use by {owner.describe()}")


def _beat(ownership: Ownership, stop: threading.Event) -> None:
    failed = False
    while not stop.wait(HEARTBEAT_S):
        try:
            ownership.beat()
            failed = False
        except OSError as error:  # a full disk does not end a run; the next beat may get through
            if not failed:
                print(f"hp-train: warning: owner.json cannot be renewed: {error}", file=sys.stderr, flush=True)
            failed = True
