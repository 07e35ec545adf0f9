"""torch's elastic agent, ending a broken group our way. Imports torch.

What torch's agent does on a failure is ask the other workers to end by the signal that also means preemption, and give
them 30 s. Here a failed attempt is marked as such first, so that workers exit at once instead of saving what their dead
peers can no longer help to save; those that cannot hear are killed after 5 s, with all their descendants.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

from hp_train.launch.failures import DeadWorker
from hp_train.launch.lifeline import STOP_SIGNALS
from hp_train.launch.node_log import NodeLog

KILL_AFTER_S = 5
_EXIT_BARRIER_S = 30.0  # for the other nodes' workers to end, once this node's have ended well


class RunAgent(LocalElasticAgent):
    """Runs one group of workers on this machine, once: restarts are the launcher's, which knows the cause."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        *,
        on_failure: Callable[[list[DeadWorker]], None],
        on_start: Callable[[], None],
        must_end: Callable[[], bool] = lambda: False,
        has_ended: Callable[[int], bool] = lambda local_rank: True,
    ) -> None:
        """Take who is asked and told, all in the thread that runs the agent.

        `on_failure` is told the dead before any other worker is ended, `on_start` that all are running. `must_end` is
        asked ten times a second whether the workers are to be killed; `has_ended` whether a worker that exited with
        status 0 had come to its end.
        """
        assert spec.max_restarts == 0, "the launcher restarts, not the agent"
        super().__init__(spec, logs_specs, exit_barrier_timeout=_EXIT_BARRIER_S)
        self._on_failure = on_failure
        self._on_start = on_start
        self._must_end = must_end
        self._has_ended = has_ended

    def ranks(self) -> dict[int, int]:
        """Return local rank -> rank in the job of this machine's workers; empty before the rendezvous."""
        workers = self._worker_group.workers
        return {worker.local_rank: worker.global_rank for worker in workers if worker.global_rank >= 0}

    def worker_pids(self) -> dict[int, int]:
        """Return local rank -> pid of the workers that have not ended yet; empty before the start."""
        if self._pcontext is None:
            return {}
        processes = {rank: handler.proc for rank, handler in self._pcontext.subprocess_handlers.items()}
        return {rank: process.pid for rank, process in processes.items() if process.returncode is None}

    def kill_workers(self) -> None:
        """Kill every worker and all its descendants now."""
        for pid in () if self._pcontext is None else self._pcontext.pids().values():
            _kill_group(pid)

    def _start_workers(self, worker_group: WorkerGroup) -> dict:
        handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        with _signals_blocked():  # workers inherit this: no signal can end one before it knows what to do with it
            started = super()._start_workers(worker_group)
            for number, handler in handlers.items():  # torch puts its own in their place
                signal.signal(number, handler)
        self._on_start()
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # torch's own look reaps who has ended and ends the others on a failure: it comes last, when no worker is left
        # or all is known.
        statuses = self._statuses()
        dead = self._who_died(statuses)
        if dead:
            self._on_failure(dead)
            self._end_broken_group(statuses)
        elif self._must_end():
            self.kill_workers()
        elif None in statuses.values():
            return RunResult(state=WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)

    def _end_broken_group(self, statuses: dict[int, int | None]) -> None:
        assert self._pcontext is not None
        for local_rank, status in statuses.items():
            if status is not None:  # a zombie still holds its pid, so its group is surely its own
                _kill_group(self._pcontext.subprocess_handlers[local_rank].proc.pid)
        self._pcontext.close(signal.SIGTERM, timeout=KILL_AFTER_S)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = KILL_AFTER_S) -> None:
        if self._pcontext is not None:
            self._pcontext.close(death_sig, min(timeout, KILL_AFTER_S))
        self.kill_workers()  # what a worker left behind in its group

    def _statuses(self) -> dict[int, int | None]:
        """Return local rank -> how the worker ended, None while it runs."""
        handlers = {} if self._pcontext is None else self._pcontext.subprocess_handlers
        return {local_rank: _status_of(handler.proc) for local_rank, handler in handlers.items()}

    def _who_died(self, statuses: dict[int, int | None]) -> list[DeadWorker]:
        """Return the workers that ended badly; with status 0 before the end of the run is as bad as any."""
        ranks, now = self.ranks(), time.time_ns()
        return [
            DeadWorker(ranks[local_rank], status, now)
            for local_rank, status in statuses.items()
            if status is not None and (status != 0 or not self._has_ended(local_rank))
        ]


def _status_of(process: subprocess.Popen) -> int | None:
    """Return how a process ended, the negative of its signal if one killed it; None while it runs. It is not reaped."""
    if process.returncode is not None:
        return process.returncode
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


class RankLogs(LogsSpecs):
    """A pipe into the node's log for what each rank prints, and what each worker's environment adds."""

    def __init__(self, attempt_dir: str, environment: dict[str, str], node_log: NodeLog) -> None:
        super().__init__(log_dir=attempt_dir)
        self._environment = environment
        self._node_log = node_log

    @property
    def root_log_dir(self) -> str:
        """Return the folder of the attempt."""
        return str(self._root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the pipes and return where each rank's streams go; torch opens them when it starts the rank."""
        logs = LogsDest()
        for local_rank, environment in envs.items():
            environment.update(self._environment)
            rank = environment["RANK"]
            logs.stdouts[local_rank] = logs.stderrs[local_rank] = self._node_log.pipe_for(int(rank))
            logs.error_files[local_rank] = os.path.join(self.root_log_dir, f"rank_{rank}", "error.json")
        return logs


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody left; macOS says EPERM for a zombie's group
        os.killpg(pid, signal.SIGKILL)
