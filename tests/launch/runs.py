"""Starts real launchers for tests (see fake_launch.py) and looks for processes they left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

_PATIENCE_S = 180.0  # for a loaded machine to import torch three times


class Run:
    """One launcher process in `folder`, its stdout and stderr in files."""

    def __init__(self, folder: Path, plan: dict, **settings: int) -> None:
        self.folder = folder
        self._out, self._err = folder.with_suffix(".out"), folder.with_suffix(".err")
        words = [sys.executable, str(Path(__file__).with_name("fake_launch.py")), str(folder), json.dumps(plan)]
        words += [f"{key}={value}" for key, value in settings.items()]
        with open(self._out, "w") as out, open(self._err, "w") as err:
            # From another folder, in a session of its own: nothing here may depend on where pytest runs.
            self.process = subprocess.Popen(words, cwd=folder.parent, stdout=out, stderr=err, start_new_session=True)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    @property
    def outcome(self) -> dict:
        return json.loads((self.folder / "outcome.json").read_text())

    def step(self) -> int:
        """Return how many steps rank 0 has recorded."""
        metrics = self.folder / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: self.step() >= step or self.process.poll() is not None, f"step {step}")
        assert self.step() >= step, f"the launcher ended early:\n{self.out}\n{self.err}"

    def end(self) -> int:
        """Wait for the launcher and return its exit code."""
        return self.process.wait(timeout=_PATIENCE_S)

    def processes(self) -> list[psutil.Process]:
        """Return the living workers of this run and the children that the workers noted."""
        notes = [*self.folder.glob("logs/attempt_*/pid_*"), *self.folder.glob("logs/attempt_*/child_*")]
        pids = [int(note.read_text()) for note in notes]
        assert pids, "no worker ever stood"
        return [process for process in map(_living, pids) if process is not None]


def _living(pid: int) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process
    except psutil.NoSuchProcess:
        return None


def wait_until(happened: Callable[[], bool], what: str, patience_s: float = _PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not happened():
        assert time.monotonic() < deadline, f"{what} did not happen in {patience_s} s"
        time.sleep(0.05)


@contextmanager
def started(*runs: Run) -> Iterator[None]:
    """Leave nothing behind, whatever the test finds."""
    try:
        yield
    finally:
        for run in runs:
            if run.process.poll() is None:
                run.process.kill()
                run.process.wait()
            for note in run.folder.glob("logs/attempt_*/pid_*"):
                if _living(int(note.read_text())) is not None:
                    os.killpg(int(note.read_text()), signal.SIGKILL)
