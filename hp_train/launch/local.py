"""Runs the processes of a run on this machine: attempts, restarts, and the exit code they come to. Imports torch.

One attempt is one group of workers under torch's elastic agent with a rendezvous store on a port that the system picks.
The launcher judges the end by what the workers left: outcome.json of rank 0, or the failure accounts of any rank.
"""

from __future__ import annotations

import contextlib
import logging
import os
import site
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch.distributed.elastic.rendezvous.registry as rendezvous
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousParameters

import hp_train.errors
from hp_train.config.schema import TrainerConfig
from hp_train.errors import ConfigError, ExitCode
from hp_train.launch.agent import RankLogs, RunAgent
from hp_train.launch.devices import ProcessPlan
from hp_train.launch.failures import (
    FAILED_MARK,
    DeadWorker,
    Failure,
    collect_failures,
    describe_failures,
    first_cause,
)
from hp_train.launch.feed import Display, Feed
from hp_train.launch.lifeline import LAUNCHER_PID
from hp_train.launch.nvidia import describe_driver
from hp_train.launch.run_dir import Outcome, attempt_dir, next_attempt, read_outcome, write_outcome
from hp_train.launch.signals import StopSignals
from hp_train.launch.worker import ATTEMPT, DEVICE

WORKER = ("-m", "hp_train.launch.worker")

_STATES = {ExitCode.DIVERGED: "diverged"}


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """How one group of workers ended."""

    outcome: Outcome
    failures: tuple[Failure, ...]
    may_restart: bool


def launch(
    run_dir: Path,
    config_path: Path,
    config: TrainerConfig,
    plan: ProcessPlan,
    display: Display,
    worker: tuple[str, ...] = WORKER,
) -> Outcome:
    """Run the workers to their end, starting them again after failures as launcher.max_restarts allows.

    `worker` is what the Python interpreter is given to run one rank; the config's path follows. Returns how the run
    ended, which outcome.json then says too. Raises ConfigError if torch finds fewer GPUs than were planned with.
    """
    if plan.device == "cuda":
        _check_gpus(plan)
    restarts = config.launcher.max_restarts
    messages: SimpleQueue[str] = SimpleQueue()
    for restart in range(restarts + 1):
        end = _run_attempt(run_dir, config_path, plan, display, messages, worker)
        for line in _report(run_dir, end, plan.num_processes):
            print(line, file=sys.stderr, flush=True)
        if not end.may_restart or restart == restarts:
            break
        messages.put(f"starting again from the last checkpoint (restart {restart + 1} of {restarts})")
    write_outcome(run_dir, end.outcome)
    return end.outcome


def _check_gpus(plan: ProcessPlan) -> None:
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
    plan: ProcessPlan,
    display: Display,
    messages: SimpleQueue[str],
    worker: tuple[str, ...],
) -> AttemptEnd:
    attempt = next_attempt(run_dir)
    folder = attempt_dir(run_dir, attempt)
    folder.mkdir(parents=True)
    (run_dir / "outcome.json").unlink(missing_ok=True)
    dead: list[DeadWorker] = []

    def mark_failed(found: list[DeadWorker]) -> None:
        (folder / FAILED_MARK).touch()
        dead.extend(found)

    feed = Feed(run_dir, folder, display, messages)
    stop = StopSignals(messages, feed.current_step)
    logs = RankLogs(str(folder), _environment(attempt, plan))
    with _agent_log(folder), _worker_spec(run_dir, config_path, plan, worker) as spec:
        agent = RunAgent(spec, logs, on_failure=mark_failed, on_start=lambda: stop.watch_over(agent))
        with stop.installed(), display, feed:
            agent.run()
            stop.watch_over(None)
    step = feed.history.last.step if feed.history.last else 0
    return _judge(run_dir, attempt, plan.num_processes, dead, stop, step)


def _judge(
    run_dir: Path, attempt: int, world_size: int, dead: list[DeadWorker], stop: StopSignals, step: int
) -> AttemptEnd:
    if stop.killed:
        message = "stopped by Ctrl-C without saving"
        return AttemptEnd(Outcome("failed", attempt, step, int(ExitCode.FAILED), message), (), may_restart=False)
    if not dead:
        outcome = read_outcome(run_dir, attempt)
        assert outcome is not None, f"all workers ended well, but rank 0 left no {run_dir}/outcome.json"
        return AttemptEnd(outcome, (), may_restart=False)
    failures = collect_failures(run_dir, attempt, world_size, dead)
    cause = first_cause(failures)
    assert cause is not None, "a dead worker has a failure"
    code = ExitCode(cause.exit_code)
    outcome = Outcome(_STATES.get(code, "failed"), attempt, cause.step or step, int(code), cause.message)
    may_restart = code == ExitCode.FAILED and not stop.requested
    return AttemptEnd(outcome, tuple(failures), may_restart)


def _report(run_dir: Path, end: AttemptEnd, world_size: int) -> list[str]:
    """Return what the person is told of a bad end: a line for what has a line, else the whole account."""
    if end.outcome.state == "stopped" or end.outcome.state == "done":
        return []
    if not end.failures or end.outcome.exit_code in (ExitCode.USER_ERROR, ExitCode.DIVERGED):
        return [f"hp-train: {line}" for line in end.outcome.message.splitlines()]
    lines = describe_failures(run_dir, end.outcome.attempt, world_size, list(end.failures))
    return [f"hp-train: attempt {end.outcome.attempt} failed", *lines]


@contextlib.contextmanager
def _worker_spec(
    run_dir: Path, config_path: Path, plan: ProcessPlan, worker: tuple[str, ...]
) -> Iterator[WorkerSpec]:
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint="127.0.0.1:0",  # any free port: two runs on one machine never meet
        run_id=run_dir.name,
        min_nodes=1,
        max_nodes=1,
        local_addr="127.0.0.1",  # not the host's name, which many laptops and containers cannot resolve
    )
    handler = rendezvous.get_rendezvous_handler(parameters)
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
            local_addr="127.0.0.1",
        )
    finally:
        handler.shutdown()


def _environment(attempt: int, plan: ProcessPlan) -> dict[str, str]:
    """Return what workers get beyond the launcher's own environment; what the person has set stays."""
    threads = max(1, _usable_cores() // plan.num_processes)
    defaults = {"OMP_NUM_THREADS": str(threads)}
    if plan.device == "cpu" and Path("/sys/class/net/lo").exists():
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
