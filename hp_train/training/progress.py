"""What each rank does now, on a page of memory that a node's workers share with their launcher. No torch.

A worker notes its step and phase in passing, half a microsecond each; the launcher reads without asking. So it can tell
where a killed process stood, which left no word, and see that a process stands still whatever it is stuck in.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

_SLOT = struct.Struct("<qqdq")  # step, 1 + index of the phase (0: nothing noted yet), time.monotonic(), first step
_SLOT_BYTES = 64  # a cache line each


class Phase(StrEnum):
    """What a rank was doing when it failed; named in the failure report."""

    START = "start"
    BUILD = "build"
    LOAD = "load checkpoint"
    DATA = "data"
    STEP = "forward and backward"
    OPTIMIZER = "optimizer"
    EVALUATE = "evaluate"
    SAVE = "save checkpoint"
    FINISH = "finish"
    ENDED = "ended"  # of its own will: the process may exit with status 0


_PHASES = tuple(Phase)
_NUMBERS = {phase: number for number, phase in enumerate(_PHASES, 1)}


@dataclass(frozen=True, slots=True)
class Note:
    """What a rank last noted."""

    step: int
    phase: Phase
    at_s: float  # time.monotonic(), one clock for all processes of a machine
    first_step: int = 0  # of this attempt; 0 before it

    @property
    def is_past_first_step(self) -> bool:
        """Say whether a whole step has been taken, and with it everything that is done but once."""
        return self.step > self.first_step > 0


class Board:
    """A file of one slot per local rank, mapped into memory. It must lie where writing cannot fail: in memory."""

    def __init__(self, path: Path, num_slots: int) -> None:
        self.path = path
        self._num_slots = num_slots
        with open(path, "r+b") as file:
            self._page = mmap.mmap(file.fileno(), num_slots * _SLOT_BYTES)

    @classmethod
    def create(cls, path: Path, num_slots: int) -> Board:
        """Make the file, empty. Raises FileExistsError."""
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600), "wb") as file:
            file.write(bytes(num_slots * _SLOT_BYTES))
        return cls(path, num_slots)

    def write(self, slot: int, step: int, phase: Phase, first_step: int = 0) -> None:
        """Note what the process in `slot` does from now on."""
        _SLOT.pack_into(self._page, slot * _SLOT_BYTES, step, _NUMBERS[phase], time.monotonic(), first_step)

    def read(self, slot: int) -> Note | None:
        """Return the last note in `slot`, None before the first."""
        step, number, at_s, first_step = _SLOT.unpack_from(self._page, slot * _SLOT_BYTES)
        return Note(step, _PHASES[number - 1], at_s, first_step) if number else None

    def read_all(self) -> list[Note | None]:
        """Return the last note of every slot."""
        return [self.read(slot) for slot in range(self._num_slots)]

    def unlink(self) -> None:
        """Take the name away; processes that have it open go on."""
        self.path.unlink(missing_ok=True)


class Progress:
    """Where a rank is now; written by the trainer as it goes, and passed on to a board if there is one."""

    __slots__ = ("_board", "_first_step", "_phase", "_slot", "_step", "coordinates", "describe_pipeline")

    def __init__(self) -> None:
        self.coordinates = ""  # "pp 1, dp_replicate 0, ..." once the mesh stands
        self.describe_pipeline: Callable[[], str] = lambda: ""  # where in the schedule this rank is
        self._step = self._first_step = 0
        self._phase = Phase.START
        self._board: Board | None = None
        self._slot = 0

    def post_on(self, board: Board, slot: int) -> None:
        """Note everything on `board` from now on."""
        self._board, self._slot = board, slot
        self.beat()

    @property
    def step(self) -> int:
        """The optimizer step in work, counted from 1; 0 before the first."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        self._first_step = self._first_step or step
        self.beat()

    @property
    def phase(self) -> Phase:
        """What this rank does."""
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._phase = phase
        self.beat()

    def beat(self) -> None:
        """Say that this rank gets on, inside a phase that may take long."""
        if self._board is not None:
            self._board.write(self._slot, self._step, self._phase, self._first_step)
