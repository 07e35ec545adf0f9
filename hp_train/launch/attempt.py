"""One attempt at a run on this machine: its workers under torch's agent, watched until all have ended. Imports torch.

The workers meet at a store on a port that the system picks. What the agent and the watchdog see goes into the attempt's
record, from which its end is judged when no worker is left (`attempt_end`). On a node that follows, the leader judges.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch.distributed.elastic.rendezvous.registry as rendezvous
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

from hp_train.checkpoint.fence import Fence
from hp_train.errors import SupersededError
from hp_train.launch.agent import RankLogs, RunAgent
from hp_train.launch.attempt_end import AttemptEnd, AttemptRecord
from hp_train.launch.devices import ProcessPlan, usable_cores
from hp_train.launch.failures import FAILED_MARK, DeadWorker
from hp_train.launch.feed import Display, Feed
from hp_train.launch.launch_spec import LaunchSpec
from hp_train.launch.lifeline import LAUNCHER_PID
from hp_train.launch.node_log import NodeLog, node_log
from hp_train.launch.owner import Ownership
from hp_train.launch.run_dir import attempt_dir, rank_dir
from hp_train.launch.snapshot import checkout
from hp_train.launch.watchdog import BOARD, Watchdog
from hp_train.launch.worker import ATTEMPT, DEVICE
from hp_train.training.progress import Phase


def run_attempt(spec: LaunchSpec, holder: Ownership | Fence, display: Display) -> AttemptEnd | None:
    """Run one group of workers to its end and judge it; on a node that follows, tell the leader and return None.

    `holder` knows the attempt's number and whether the run directory is still its own. Raises SupersededError when it
    is not: then all workers are gone and nothing has been written.
    """
    attempt = _RunningAttempt(spec, holder)
    feed = Feed(spec.run_dir, holder.attempt, display, spec.stop.messages)
    spec.stop.current_step = feed.current_step
    attempt.run(display, feed)
    record, group = attempt.record, spec.group
    if record.superseded:
        raise SupersededError(record.superseded)
    if group is not None and not group.leads:
        group.report(record)
        return None
    if group is not None:
        group.take_reports(record)
    return record.judge(feed, spec.stop)


class _RunningAttempt:
    """Answers the agent and keeps the record while the workers run; all in the thread that runs the agent."""

    def __init__(self, spec: LaunchSpec, holder: Ownership | Fence) -> None:
        self._spec = spec
        self._holder = holder
        self._folder = attempt_dir(spec.run_dir, holder.attempt)
        self.record = AttemptRecord(spec.run_dir, holder.attempt, spec.plan.sizes, started_at=time.time())
        if spec.group is not None:
            self.record.nodes = spec.group.names
        launcher = spec.config.launcher
        self._watchdog = Watchdog(
            spec.plan.num_processes,
            first_step_timeout_s=launcher.first_step_timeout,
            failure_timeout_s=launcher.failure_timeout,
        )
        self._node = 0 if spec.group is None else spec.group.node_rank
        self._log = NodeLog(node_log(spec.run_dir, holder.attempt, self._node))
        self._agent: RunAgent

    def run(self, display: Display, feed: Feed) -> None:
        """Start the workers, show them, and return when all are gone."""
        spec = self._spec
        environment = {**_environment(self.record.attempt, spec.plan), BOARD: str(self._watchdog.board.path)}
        with contextlib.ExitStack() as stack:
            stack.callback(self._watchdog.close)
            stack.enter_context(_agent_log(self._folder / f"agent_{self._node}.log"))
            handler = _rendezvous(spec, self.record.attempt)
            stack.callback(handler.shutdown)
            self._agent = RunAgent(
                _worker_spec(spec, handler),
                RankLogs(str(self._folder), environment, self._log),
                on_failure=self._note_dead,
                on_start=self._note_start,
                must_end=self._must_end,
                has_ended=self._has_ended,
            )
            stack.enter_context(display)
            stack.enter_context(feed)
            stack.enter_context(self._log)  # it ends first: the feed shows what the workers said last
            stack.callback(spec.stop.watch_over, None)
            self._agent.run()

    def _note_start(self) -> None:
        self._log.release()
        self._spec.stop.watch_over(self._agent)

    def _note_dead(self, dead: list[DeadWorker]) -> None:
        self._mark_failed()
        self._raise_flag()
        record = self.record
        if not record.dead and not record.standings and not record.superseded:
            record.dead.extend(replace(each, last_words=self._log.last_words(each.rank)) for each in dead)
            record.notes.update({rank: self._watchdog.board.read(slot) for slot, rank in self._agent.ranks().items()})

    def _must_end(self) -> bool:
        """Say whether the workers are to be killed: they are another attempt's by now, or hang, here or elsewhere."""
        try:
            self._holder.check()
        except SupersededError as error:
            self.record.superseded = str(error)
            return True
        if self._spec.group is not None and self._spec.group.flag_is_up(self.record.attempt):
            return True
        if self.record.standings:
            return True  # the workers have been killed and are not gone yet
        if not self._watchdog.hangs():
            return False
        self._examine()
        return True

    def _examine(self) -> None:
        """Put down where each worker stands, and tell that the attempt has failed."""
        self._mark_failed()
        ranks = self._agent.ranks()
        folders = {slot: rank_dir(self._spec.run_dir, self.record.attempt, rank) for slot, rank in ranks.items()}
        self.record.standings.extend(self._watchdog.examine(self._agent.worker_pids(), folders, ranks))
        self.record.stood_still_s = self._watchdog.stands_for_s
        self._raise_flag()  # not before: the other nodes examine their own workers meanwhile

    def _mark_failed(self) -> None:
        """Tell the workers that it is over: a stop signal has them exit at once now, instead of saving."""
        (self._folder / FAILED_MARK).touch()

    def _raise_flag(self) -> None:
        if self._spec.group is not None:
            self._spec.group.raise_flag(self.record.attempt)

    def _has_ended(self, slot: int) -> bool:
        note = self._watchdog.board.read(slot)
        return note is not None and note.phase is Phase.ENDED


def _rendezvous(spec: LaunchSpec, attempt: int) -> RendezvousHandler:
    if spec.group is not None:
        return spec.group.rendezvous(attempt)
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint="127.0.0.1:0",  # any free port: two runs on one machine never meet
        run_id=spec.run_dir.name,
        min_nodes=1,
        max_nodes=1,
        local_addr="127.0.0.1",  # not the host's name, which many laptops and containers cannot resolve
    )
    return rendezvous.get_rendezvous_handler(parameters)


def _worker_spec(spec: LaunchSpec, handler: RendezvousHandler) -> WorkerSpec:
    return WorkerSpec(
        role="rank",
        local_world_size=spec.plan.num_processes,
        entrypoint=sys.executable,
        # -P: a file in the current folder named like a module must not be imported in its place.
        args=("-u", "-P", *spec.worker, str(spec.config_path)),
        rdzv_handler=handler,
        max_restarts=0,
        monitor_interval=0.1,
        local_addr="127.0.0.1" if spec.plan.num_nodes == 1 else None,
    )


def _environment(attempt: int, plan: ProcessPlan) -> dict[str, str]:
    """Return what workers get beyond the launcher's own environment; what the person has set stays."""
    defaults = {"OMP_NUM_THREADS": str(max(1, usable_cores() // plan.num_processes))}
    if plan.device == "cpu" and plan.num_nodes == 1 and Path("/sys/class/net/lo").exists():
        defaults["GLOO_SOCKET_IFNAME"] = "lo"  # gloo asks for the host's name otherwise
    environment = {name: value for name, value in defaults.items() if name not in os.environ}
    package_root = checkout()
    if package_root is not None:  # not an installed wheel, which every Python of this environment finds
        paths = [str(package_root), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment.update({LAUNCHER_PID: str(os.getpid()), ATTEMPT: str(attempt), DEVICE: plan.device})
    return environment


@contextlib.contextmanager
def _agent_log(path: Path) -> Iterator[None]:
    """Send what torch's agent logs, if anything, to a file: on the terminal it would bury the cause of a failure."""
    logger = logging.getLogger("torch.distributed.elastic")
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        handler.close()
