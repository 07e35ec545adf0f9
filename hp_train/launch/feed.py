"""The thread that shows a running attempt: it follows the files that rank 0 writes and feeds a display. No torch.

It runs in the launcher, beside the agent in the main thread. What rank 0 prints (warnings above all) is shown as lines
between the display's own; the other ranks' output stays in the log.
"""

from __future__ import annotations

import threading
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol, Self

from hp_train.launch.history import History, LineTail, read_facts, rows_of
from hp_train.launch.node_log import node_log, prefix_of
from hp_train.launch.run_dir import attempt_dir

_POLL_S = 0.1
_OF_RANK_0 = prefix_of(0)


class Display(Protocol):
    """What shows a run: plain lines or a live view. Entered and left once for each attempt."""

    def __enter__(self) -> Self:
        """Take the terminal."""

    def __exit__(self, *exc_info: object) -> None:
        """Give it back."""

    def open_attempt(self, history: History) -> None:
        """The workers stand; `history.facts` is there."""

    def step(self, history: History) -> None:
        """`history.last` is new."""

    def tick(self) -> None:
        """Time has passed."""

    def line(self, text: str) -> None:
        """Show a line of text."""


class NoDisplay:
    """Shows nothing: on nodes where nobody looks."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Nothing was taken."""

    def open_attempt(self, history: History) -> None:
        """Leave it to the first node."""

    def step(self, history: History) -> None:
        """Leave it to the first node."""

    def tick(self) -> None:
        """Nothing moves."""

    def line(self, text: str) -> None:
        """Leave it to the first node."""


class Feed:
    """Follows one attempt while its `with` block runs; on leaving, what is still unread is shown."""

    def __init__(self, run_dir: Path, attempt: int, display: Display, messages: SimpleQueue[str]) -> None:
        self.history = History()
        self._attempt = attempt
        self._attempt_dir = attempt_dir(run_dir, attempt)
        self._display = display
        self._messages = messages
        self._metrics = LineTail(run_dir / "metrics.jsonl")
        self._log = LineTail(node_log(run_dir, attempt, 0))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="feed", daemon=True)

    def __enter__(self) -> Feed:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()
        self._poll(last=True)

    def current_step(self) -> int:
        """Return the step that is in work as far as the launcher knows; 0 before the workers stand."""
        facts, last = self.history.facts, self.history.last
        if facts is None:
            return 0
        return facts.first_step if last is None else min(last.step + 1, facts.max_steps)

    def _follow(self) -> None:
        while not self._stop.wait(_POLL_S):
            self._poll()

    def _poll(self, last: bool = False) -> None:
        for line in self._log.poll(torn=last):
            if line.startswith(_OF_RANK_0):
                self._display.line(line.removeprefix(_OF_RANK_0))
        self._poll_steps()
        while True:
            try:
                self._display.line(self._messages.get_nowait())
            except Empty:
                break
        self._display.tick()

    def _poll_steps(self) -> None:
        if self.history.facts is None:
            self.history.facts = read_facts(self._attempt_dir)
            if self.history.facts is None:
                return
            self._display.open_attempt(self.history)
            if self.history.facts.resumed_from is not None:
                self._display.line(f"going on from checkpoint {self.history.facts.resumed_from}")
            elif self._attempt > 1:
                self._display.line("no valid checkpoint to go on from: starting again at step 0")
        seen = self.history.facts.first_step - 1 if self.history.last is None else self.history.last.step
        for row in rows_of(self._metrics.poll()):
            if row.step > seen:  # earlier ones are another attempt's
                self.history.add(row)
                self._display.step(self.history)
