"""Runs the processes of a run on this machine: attempts, restarts, and the exit code they come to. Imports torch.

One attempt is one group of workers under torch's elastic agent with a rendezvous store on a port that the system picks.
How it ended is judged in `attempt_end`, by what the workers left; whether to start again in `restart`. In a job of
several nodes the first node's launcher does this (`launch`), the others run their share of each attempt (`follow`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import site
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed.elastic.rendezvous.registry as rendezvous
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

import hp_train.errors
from hp_train.checkpoint.fence import Fence
from hp_train.config.schema import LauncherSection, TrainerConfig
from hp_train.errors import ConfigError, SupersededError
from hp_train.launch.agent import RankLogs, RunAgent
from hp_train.launch.attempt_end import AttemptEnd, AttemptRecord
from hp_train.launch.devices import ProcessPlan
from hp_train.launch.failures import FAILED_MARK, DeadWorker
from hp_train.launch.feed import Display, Feed, NoDisplay
from hp_train.launch.lifeline import LAUNCHER_PID
from hp_train.launch.nodes import NodeGroup
from hp_train.launch.nvidia import describe_driver
from hp_train.launch.outcome import Cause, Outcome, write_outcome
from hp_train.launch.owner import Ownership
from hp_train.launch.restart import why_not_again
from hp_train.launch.run_dir import attempt_dir, rank_dir
from hp_train.launch.signals import StopSignals
from hp_train.launch.watchdog import BOARD, Watchdog
from hp_train.launch.worker import ATTEMPT, DEVICE
from hp_train.training.progress import Phase

WORKER = ("-m", "hp_train.launch.worker")


def launch(
    run_dir: Path,
    config_path: Path,
    config: TrainerConfig,
    plan: ProcessPlan,
    display: Display,
    stop: StopSignals,
    ownership: Ownership,
    group: NodeGroup | None = None,
    worker: tuple[str, ...] = WORKER,
) -> AttemptEnd:
    """Run the workers to their end, starting them again after failures as launcher.max_restarts allows.

    `stop` is installed already. `worker` is what the Python interpreter is given to run one rank; the config's path
    follows; `group` the launchers of all nodes, where there are several. Returns how the last attempt ended;
    outcome.json says it of each. Raises ConfigError if torch finds fewer GPUs than were planned with, SupersededError
    when another launcher has taken over the run directory.
    """
    if plan.device == "cuda":
        check_gpus(plan)
    outcomes: list[Outcome] = []
    for restart in range(config.launcher.max_restarts + 1):
        if restart:
            ownership.next_attempt()
        end = _run_round(restart, run_dir, config_path, config, plan, display, stop, ownership, worker, group)
        outcomes.append(end.outcome)
        ownership.check()
        reason = why_not_again(outcomes)
        if reason is not None and end.outcome.cause.may_restart:
            message = f"{reason}: {end.outcome.message}"
            outcome = dataclasses.replace(end.outcome, cause=Cause.NO_PROGRESS, message=message)
            end = dataclasses.replace(end, outcome=outcome, report=(*end.report, f"not started again: {reason}"))
        _write_outcome(run_dir, end.outcome)
        if reason is not None or stop.requested or restart == config.launcher.max_restarts:
            break
        again = f"starting again from the last checkpoint (restart {restart + 1} of {config.launcher.max_restarts})"
        print(*end.report, again, sep="\n", file=sys.stderr, flush=True)
    if group is not None:
        group.tell_round(len(outcomes), 0)
        group.leave()
    return end


def _run_round(
    number: int,
    run_dir: Path,
    config_path: Path,
    config: TrainerConfig,
    plan: ProcessPlan,
    display: Display,
    stop: StopSignals,
    ownership: Ownership,
    worker: tuple[str, ...],
    group: NodeGroup | None,
) -> AttemptEnd:
    """Run one attempt on all nodes, unless a signal has come already: then none starts it."""
    stopped = stop.requested
    if group is not None:
        group.tell_round(number, 0 if stopped else ownership.attempt)
    if stopped:
        record = AttemptRecord(run_dir, ownership.attempt, plan.sizes, started_at=time.time())
        return record.stopped_before_start(stop)
    end = _run_attempt(run_dir, config_path, config.launcher, plan, display, stop, ownership, worker, group)
    assert end is not None, "the node that leads judges"
    return end


def follow(
    run_dir: Path, config_path: Path, config: TrainerConfig, plan: ProcessPlan, stop: StopSignals, group: NodeGroup
) -> None:
    """Run this node's share of every attempt that the first node's launcher begins, until it says that all is over.

    Raises NodesError when that launcher is gone.
    """
    if plan.device == "cuda":
        check_gpus(plan)
    number = 0
    while attempt := group.hear_round(number):
        share = Share(run_dir, attempt)
        _run_attempt(run_dir, config_path, config.launcher, plan, NoDisplay(), stop, share, WORKER, group)
        number += 1
    group.leave()


class Share:
    """A follower's part of an attempt: it writes nothing of the run's, and must notice a newer attempt all the same."""

    def __init__(self, run_dir: Path, attempt: int) -> None:
        self.attempt = attempt
        self.check = Fence(run_dir, attempt).check


def _write_outcome(run_dir: Path, outcome: Outcome) -> None:
    try:
        write_outcome(run_dir, outcome)
    except OSError as error:  # a full disk, a lost folder: the exit code still tells
        print(f"hp-train: warning: outcome.json cannot be written: {error}", file=sys.stderr, flush=True)


def check_gpus(plan: ProcessPlan) -> None:
    """Raise ConfigError unless torch finds the GPUs that were planned with."""
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < plan.num_processes:
        raise ConfigError(
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds {found} usable GPUs of the "
            f"{plan.num_processes} that this run takes; {describe_driver()}; see `python -m torch.utils.collect_env`, "
            "or train on the CPU with trainer.device=cpu"
        )


def _run_attempt(
    run_dir: Path,
    config_path: Path,
    launcher: LauncherSection,
    plan: ProcessPlan,
    display: Display,
    stop: StopSignals,
    ownership: Ownership | Share,
    worker: tuple[str, ...],
    group: NodeGroup | None = None,
) -> AttemptEnd | None:
    """Run one group of workers to its end and judge it; on a node that follows, tell the leader instead."""
    attempt = ownership.attempt
    record = AttemptRecord(run_dir, attempt, plan.sizes, started_at=time.time())
    if group is not None:
        record.nodes = group.names
    folder = attempt_dir(run_dir, attempt)
    feed = Feed(run_dir, attempt, display, stop.messages)
    stop.current_step = feed.current_step
    watchdog = Watchdog(
        plan.num_processes,
        first_step_timeout_s=launcher.first_step_timeout,
        failure_timeout_s=launcher.failure_timeout,
    )

    def note_dead(dead: list[DeadWorker]) -> None:
        (folder / FAILED_MARK).touch()
        if group is not None:
            group.raise_flag(attempt)
        if not record.dead and not record.standings and not record.superseded:
            record.dead.extend(dead)
            record.notes.update({rank: watchdog.board.read(slot) for slot, rank in agent.ranks().items()})

    def must_end() -> bool:
        try:
            ownership.check()
        except SupersededError as error:
            record.superseded = str(error)
            return True
        if group is not None and group.flag_is_up(attempt):
            return True
        if record.standings:
            return True  # the workers have been killed and are not gone yet
        if not watchdog.hangs():
            return False
        (folder / FAILED_MARK).touch()
        ranks = agent.ranks()
        folders = {slot: rank_dir(run_dir, attempt, rank) for slot, rank in ranks.items()}
        record.standings.extend(watchdog.examine(agent.worker_pids(), folders, ranks))
        record.stood_still_s = watchdog.stands_for_s
        if group is not None:
            group.raise_flag(attempt)
        return True

    def has_ended(slot: int) -> bool:
        note = watchdog.board.read(slot)
        return note is not None and note.phase is Phase.ENDED

    logs = RankLogs(str(folder), {**_environment(attempt, plan), BOARD: str(watchdog.board.path)})
    meeting = _rendezvous(run_dir, attempt, group)
    with _agent_log(folder), _worker_spec(run_dir, config_path, plan, worker, meeting) as spec:
        agent = RunAgent(
            spec, logs, on_failure=note_dead, on_start=lambda: stop.watch_over(agent), must_end=must_end,
            has_ended=has_ended,
        )  # fmt: skip
        with display, feed:
            try:
                agent.run()
            finally:
                stop.watch_over(None)
                watchdog.close()
    if record.superseded:
        raise SupersededError(record.superseded)
    if group is not None and not group.leads:
        group.report(record)
        return None
    if group is not None:
        group.take_reports(record)
    return record.judge(feed, stop)


def _rendezvous(run_dir: Path, attempt: int, group: NodeGroup | None) -> RendezvousHandler:
    if group is not None:
        return group.rendezvous(attempt)
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint="127.0.0.1:0",  # any free port: two runs on one machine never meet
        run_id=run_dir.name,
        min_nodes=1,
        max_nodes=1,
        local_addr="127.0.0.1",  # not the host's name, which many laptops and containers cannot resolve
    )
    return rendezvous.get_rendezvous_handler(parameters)


@contextlib.contextmanager
def _worker_spec(
    run_dir: Path, config_path: Path, plan: ProcessPlan, worker: tuple[str, ...], handler: RendezvousHandler
) -> Iterator[WorkerSpec]:
    # -P: a file in the current folder named like a module must not be imported in its place.
    arguments = ("-u", "-P", *worker, str(config_path))
    try:
        yield WorkerSpec(
            role="rank",
            local_world_size=plan.num_processes,
            entrypoint=sys.executable,
            args=arguments,
            rdzv_handler=handler,
            max_restarts=0,
            monitor_interval=0.1,
            local_addr="127.0.0.1" if plan.num_nodes == 1 else None,
        )
    finally:
        handler.shutdown()


def _environment(attempt: int, plan: ProcessPlan) -> dict[str, str]:
    """Return what workers get beyond the launcher's own environment; what the person has set stays."""
    threads = max(1, _usable_cores() // plan.num_processes)
    defaults = {"OMP_NUM_THREADS": str(threads)}
    if plan.device == "cpu" and plan.num_nodes == 1 and Path("/sys/class/net/lo").exists():
        defaults["GLOO_SOCKET_IFNAME"] = "lo"  # gloo asks for the host's name otherwise
    environment = {name: value for name, value in defaults.items() if name not in os.environ}
    package_root = str(Path(hp_train.errors.__file__).parents[1])
    if package_root not in (*site.getsitepackages(), site.getusersitepackages()):  # a checkout, not an installed wheel
        paths = [package_root, os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment.update({LAUNCHER_PID: str(os.getpid()), ATTEMPT: str(attempt), DEVICE: plan.device})
    return environment


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _agent_log(folder: Path) -> Iterator[None]:
    """Send what torch's agent logs to a file: on the terminal it would bury the cause of a failure."""
    logger = logging.getLogger("torch.distributed.elastic")
    handler = logging.FileHandler(folder / "agent.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        handler.close()
