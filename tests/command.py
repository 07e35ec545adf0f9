"""Runs the real `hp-train` in a subprocess, in a folder of its own, with a torch that refuses to be imported."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

POISON = "raise RuntimeError('torch was imported before everything was checked')\n"


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str
    wall_s: float

    @property
    def lines(self) -> list[str]:
        """Return what it wrote to stderr, by line."""
        return self.stderr.splitlines()


def hp_train(
    *arguments: str, cwd: Path, torch: bool = False, env: dict[str, str] | None = None, stdin: str | None = None
) -> Finished:
    """Run `hp-train arguments` in `cwd`; unless `torch`, importing torch is an error in it."""
    poison = cwd / ".poison" / "torch"
    poison.mkdir(parents=True, exist_ok=True)
    (poison / "__init__.py").write_text(POISON)
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("HP_TRAIN", "HYDRA", "COMP_"))
    }
    if not torch:
        environment["PYTHONPATH"] = str(poison.parent)
    environment.update(env or {})
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "hp_train", *arguments],
        cwd=cwd, env=environment, input=stdin, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return Finished(done.returncode, done.stdout, done.stderr, time.perf_counter() - started)


def slowness_of_this_machine() -> float:
    """Return how much longer than on an idle reference machine it takes to import Hydra here and now (0.16 s there)."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import hydra.main"], check=True)
    return (time.perf_counter() - started) / 0.16
