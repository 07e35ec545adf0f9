"""One log for all ranks of a node: logs/attempt_N/node_K.log, every line behind its rank. No torch.

    [rank 37] warning: the learning rate is 0

A file for each stream of each rank would be a thousand for 512 ranks, on shared file systems, where making files is
what is slow. So workers write into pipes, and a thread of their launcher writes what has come, whole lines in one go.
Pipes are emptied whatever becomes of the file: a full disk holds up no worker.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import threading
from collections import deque
from pathlib import Path
from typing import Self

from hp_train.launch.run_dir import attempt_dir

_GATHER_S = 0.05  # what comes within so long is written in one go
_LONGEST_LINE = 1 << 16  # bytes; what has no end by then is cut
_MOST_KEPT = 1 << 20  # bytes that wait for a disk with room
_LAST_LINES = 20  # of each rank, for the report of its death


def node_log(run_dir: Path, attempt: int, node: int) -> Path:
    """Return the file that the ranks of a node print to; it appears with the first line."""
    return attempt_dir(run_dir, attempt) / f"node_{node}.log"


def node_logs(run_dir: Path, attempt: int) -> list[Path]:
    """Return the logs of all nodes that have printed anything, in the order of the nodes."""
    found = [re.fullmatch(r"node_(\d+)\.log", path.name) for path in attempt_dir(run_dir, attempt).glob("node_*.log")]
    return [node_log(run_dir, attempt, node) for node in sorted(int(match[1]) for match in found if match)]


def prefix_of(rank: int) -> str:
    """Return what stands before each line of a rank."""
    return f"[rank {rank}] "


class NodeLog:
    """The pipes of this machine's workers and the file that they end in, while the `with` block runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._streams: dict[int, _Stream] = {}  # by rank
        self._write_ends: list[int] = []
        self._selector = selectors.DefaultSelector()
        self._unwritten = bytearray()
        self._lost_bytes = 0
        self._lock = threading.Lock()  # between the thread and who asks for last words
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="node-log", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Write what the workers left, torn lines too, and close; whoever still holds a pipe writes to nobody."""
        self._stop.set()
        self._thread.join()
        self.release()
        with self._lock:
            self._pump(torn=True)
            self._selector.close()
            for stream in self._streams.values():
                os.close(stream.fd)
            if self._file >= 0:
                os.close(self._file)

    def pipe_for(self, rank: int) -> str:
        """Return the path by which this process opens a new pipe for a rank's output, until `release` is called."""
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        with self._lock:
            self._streams[rank] = _Stream(read_end, prefix_of(rank).encode())
            self._selector.register(read_end, selectors.EVENT_READ)
            self._write_ends.append(write_end)
        return f"/dev/fd/{write_end}"

    def release(self) -> None:
        """Let go of the workers' ends of the pipes, now that the workers have theirs."""
        while self._write_ends:
            os.close(self._write_ends.pop())

    def last_words(self, rank: int) -> str:
        """Return the last lines that a rank has printed; empty if it printed none or is not one of this machine's."""
        with self._lock:
            self._pump()
            stream = self._streams.get(rank)
            return "" if stream is None else stream.last_lines()

    def _follow(self) -> None:
        while not self._stop.wait(_GATHER_S):
            with self._lock:
                self._pump()

    def _pump(self, *, torn: bool = False) -> None:
        """Empty the pipes and write what is whole, with `torn` the rest as well."""
        ready = {key.fd for key, _ in self._selector.select(timeout=0)}
        for stream in self._streams.values():
            if stream.fd in ready:
                self._unwritten += stream.read()
                if stream.has_ended:
                    self._selector.unregister(stream.fd)
            if torn:
                self._unwritten += stream.rest()
        if self._unwritten:
            self._write()

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # no room, or a lost folder: the next time may go better
            if self._file < 0:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            if self._lost_bytes:
                os.write(self._file, b"[launcher] %d bytes could not be written here\n" % self._lost_bytes)
                self._lost_bytes = 0
            while self._unwritten:
                del self._unwritten[: os.write(self._file, self._unwritten)]
        if len(self._unwritten) > _MOST_KEPT:
            start = self._unwritten.rfind(b"\n", 0, len(self._unwritten) - _MOST_KEPT // 2) + 1
            self._lost_bytes += start
            del self._unwritten[:start]


class _Stream:
    """What one rank prints: lines as they are whole."""

    def __init__(self, fd: int, prefix: bytes) -> None:
        self.fd = fd
        self.has_ended = False
        self._prefix = prefix
        self._pending = bytearray()
        self._last: deque[bytes] = deque(maxlen=_LAST_LINES)

    def read(self) -> bytes:
        """Take what is there and return the whole lines, each with its prefix."""
        for _ in range(64):  # of 64 KiB: one that never stops printing must not keep the others waiting
            try:
                data = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                self.has_ended = True
                break
            self._pending += data
        *whole, rest = bytes(self._pending).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            whole, rest = [*whole, rest], b""
        self._pending = bytearray(rest)
        return self._lines(whole)

    def rest(self) -> bytes:
        """Return the line that was not ended, as one."""
        rest = [bytes(self._pending)] if self._pending else []
        self._pending.clear()
        return self._lines(rest)

    def last_lines(self) -> str:
        """Return the last lines, and the one that is not ended yet."""
        lines = [*self._last, bytes(self._pending)] if self._pending else [*self._last]
        return b"\n".join(lines).decode("utf-8", errors="replace")

    def _lines(self, lines: list[bytes]) -> bytes:
        self._last.extend(lines)
        return b"".join(self._prefix + line + b"\n" for line in lines)
