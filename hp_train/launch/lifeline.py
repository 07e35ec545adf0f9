"""A worker's tie to its launcher: it hears signals even while stuck in a collective, and never outlives its parent.

Signals are blocked in every thread and taken by one thread that waits for them, because a handler of Python's would not
run before the main thread returns from C. The launcher blocks them in the child before it starts (see `agent`), so
that none can hit the interpreter while it still loads. No torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hp_train.training.run_context import StopRequest

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # the last: a scheduler's warning
LAUNCHER_PID = "HP_TRAIN_LAUNCHER_PID"  # set for workers by the launcher
_PR_SET_PDEATHSIG = 1
# Not SIGHUP: the kernel sends it while the launcher is still dying, when getppid() does not tell yet.
_PARENT_DIED = getattr(signal, "SIGRTMIN", signal.SIGUSR2)
_PARENT_POLL_S = 0.5
# What the watchdog asks with: the first is answered by faulthandler, in C, the second by the thread below.
if hasattr(signal, "SIGRTMIN"):
    SHOW_STACKS, TELL_STANDING = signal.SIGRTMIN + 1, signal.SIGRTMIN + 2
else:  # macOS has no real-time signals, and these are ignored by default
    SHOW_STACKS, TELL_STANDING = int(signal.SIGINFO), int(signal.SIGIO)


_TAKEN = (*STOP_SIGNALS, _PARENT_DIED, TELL_STANDING)


def hold_on(stop: StopRequest, failed_mark: Path, tell_standing: Callable[[], None] = lambda: None) -> None:
    """Tie this worker to its launcher; call before torch is imported, since threads inherit the blocked signals.

    TELL_STANDING calls `tell_standing` in a thread of its own. The stop signals set `stop`, unless `failed_mark`
    exists: then the worker exits at once, with nothing saved, because its peers are gone. When the launcher dies the
    worker's process group is killed.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _TAKEN)
    os.register_at_fork(after_in_child=_let_go)
    arguments = (stop, failed_mark, tell_standing)
    threading.Thread(target=_take_signals, args=arguments, name="take-signals", daemon=True).start()
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is not None:
        _signal_when_parent_dies(_PARENT_DIED)
        if os.getppid() != int(launcher):
            _end_group()  # it died before the signal was asked for
        threading.Thread(target=_watch_parent, args=(int(launcher),), name="watch-parent", daemon=True).start()


def _take_signals(stop: StopRequest, failed_mark: Path, tell_standing: Callable[[], None]) -> None:
    while True:
        number = signal.sigwait(_TAKEN)
        if number == _PARENT_DIED:
            _end_group()
        if number == TELL_STANDING:
            tell_standing()
            continue
        if failed_mark.exists():
            os._exit(1)
        if stop.signal_number == 0:  # the first one says how the run ends
            stop.signal_number = int(number)


def _watch_parent(launcher: int) -> None:
    """Where the kernel cannot signal a parent's death, or the signal went by, ask now and then."""
    while os.getppid() == launcher:
        time.sleep(_PARENT_POLL_S)
    _end_group()


def _end_group() -> None:
    """Kill this process and all its descendants that did not leave its group."""
    if os.getpgrp() == os.getpid():  # the agent starts each worker in a session of its own
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def _let_go() -> None:
    """In a child forked from a worker: hear signals as usual again."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TAKEN)


def _signal_when_parent_dies(number: signal.Signals) -> None:
    """Ask the kernel to send `number` when the parent's forking thread ends (prctl(2); Linux only)."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):  # a libc without prctl: `_watch_parent` remains
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
