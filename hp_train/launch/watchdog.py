"""Sees that a run stands still, and finds out what each process is stuck in. No torch.

Workers note what they do on a board in shared memory (`training.progress`). When no rank of this machine has noted
anything for longer than the limit, two signals ask each worker where it is: one is answered by the C code of
faulthandler, which writes the stacks of all threads even while the interpreter is blocked; the other by a thread that
knows more (which collective, which step of a pipeline schedule), if the interpreter lets it run. Before the first
optimizer step is through the limit is another, longer one: models are built, compiled and loaded then.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from hp_train.launch.files import read_json
from hp_train.launch.flight import LATEST
from hp_train.launch.hang import Standing, read_main_stack
from hp_train.launch.lifeline import SHOW_STACKS, TELL_STANDING
from hp_train.training.progress import Board, Note, Phase

BOARD = "HP_TRAIN_BOARD"  # path of the board, set for workers by the launcher
STACKS_FILE, STANDING_FILE = "stacks.txt", "standing.json"  # of a rank: beside the board, then in its log folder

_NOTICED_AT = 0.8  # share of failure_timeout after which a stand-still counts; the rest is for stacks and the end
_LOOK_EVERY_S = 0.5
_ANSWER_WITHIN_S = 2.0


class Watchdog:
    """Watches the workers of this machine, one slot of the board each, through one attempt."""

    def __init__(self, num_slots: int, *, first_step_timeout_s: float, failure_timeout_s: float) -> None:
        self.board = Board.create(_board_path(), num_slots)
        self.stands_for_s = 0.0
        self._first_limit_s = max(first_step_timeout_s, failure_timeout_s * _NOTICED_AT)
        self._limit_s = failure_timeout_s * _NOTICED_AT
        self._next_look = 0.0

    def close(self) -> None:
        """Let the board go, and what lies beside it."""
        self.board.unlink()
        for path in self.board.path.parent.glob(f"{self.board.path.name}.*"):
            path.unlink(missing_ok=True)

    def hangs(self) -> bool:
        """Say whether all workers have stood still for too long; cheap, called many times a second."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + min(_LOOK_EVERY_S, self._limit_s / 10)
        notes = [note for note in self.board.read_all() if note is not None and note.phase is not Phase.ENDED]
        if not notes:  # none has started, or all have ended: the agent sees the rest
            return False
        self.stands_for_s = now - max(note.at_s for note in notes)
        is_past_first = all(note.is_past_first_step for note in notes)
        return self.stands_for_s > (self._limit_s if is_past_first else self._first_limit_s)

    def examine(
        self, pids: Mapping[int, int], rank_dirs: Mapping[int, Path], ranks: Mapping[int, int]
    ) -> list[Standing]:
        """Ask the workers (slot -> pid) where they are and return what is found, by rank; it is kept in `rank_dirs`."""
        for pid in pids.values():
            for number in (TELL_STANDING, SHOW_STACKS):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        deadline = time.monotonic() + _ANSWER_WITHIN_S
        board = self.board.path
        while time.monotonic() < deadline and not all(_has_answered(board, slot) for slot in pids):
            time.sleep(0.05)
        notes = self.board.read_all()
        for slot in pids:
            _keep(board, slot, rank_dirs[slot])
        return sorted(
            (_standing(ranks[slot], notes[slot], board, slot) for slot in pids), key=lambda standing: standing.rank
        )


def _board_path() -> Path:
    memory = Path("/dev/shm")  # a note must not fail for a full disk, nor go over a network
    folder = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    return folder / f"hp_train_board_{os.getpid()}_{time.monotonic_ns()}"


def beside(board: Path, slot: int, name: str) -> Path:
    """Return where the worker in `slot` leaves STACKS_FILE or STANDING_FILE: in memory, like the board itself."""
    return board.with_name(f"{board.name}.{slot}.{name}")


def _has_answered(board: Path, slot: int) -> bool:
    stacks = beside(board, slot, STACKS_FILE)
    return beside(board, slot, STANDING_FILE).exists() and stacks.exists() and stacks.stat().st_size > 0


def _keep(board: Path, slot: int, folder: Path) -> None:
    """Copy a worker's answers into its log folder; what the report needs is read without them."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    for name in (STACKS_FILE, STANDING_FILE):
        with contextlib.suppress(OSError):  # it did not answer; a full disk
            shutil.copyfile(beside(board, slot, name), folder / name)


def _standing(rank: int, note: Note | None, board: Path, slot: int) -> Standing:
    step, phase = (note.step, str(note.phase)) if note is not None else (0, str(Phase.START))
    told = read_json(beside(board, slot, STANDING_FILE)) or {}
    since_s = time.monotonic() - note.at_s if note is not None else None
    collective = told.get("collective") or ""
    more = "; ".join(filter(None, (collective, told.get("pipeline"))))
    in_flight = bool(collective) and not collective.startswith(LATEST)
    frames = read_main_stack(beside(board, slot, STACKS_FILE))
    return Standing(rank, step, phase, since_s, frames, more, in_flight)
