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
    report: tuple[str, ...] = ()  # what the person is told of a bad end, the cause last
    may_restart: bool = False


def launch(
    run_dir: Path,
    config_path: Path,
    config: TrainerConfig,
    plan: ProcessPlan,
    display: Display,
    stop: StopSignals,
    worker: tuple[str, ...] = WORKER,
) -> AttemptEnd:
    """Run the workers to their end, starting them again after failures as launcher.max_restarts allows.

    `stop` is installed already. `worker` is what the Python interpreter is given to run one rank; the config's path
    follows. Returns how the last attempt ended, which outcome.json then says too. Raises ConfigError if torch finds
    fewer GPUs than were planned with.
    """
    if plan.device == "cuda":
        _check_gpus(plan)
    restarts = config.launcher.max_restarts
    for restart in range(restarts + 1):
        end = _run_attempt(run_dir, config_path, plan, display, stop, worker)
        if not end.may_restart or restart == restarts:
            break
        again = f"starting again from the last checkpoint (restart {restart + 1} of {restarts})"
        print(*end.report, again, sep="\n", file=sys.stderr, flush=True)
    write_outcome(run_dir, end.outcome)
    return end


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
    stop: StopSignals,
    worker: tuple[str, ...],
) -> AttemptEnd:
    attempt = next_attempt(run_dir)
    if stop.requested:
        return AttemptEnd(Outcome("stopped", attempt, 0, int(stop.exit_code), "before the workers were started"))
    folder = attempt_dir(run_dir, attempt)
    folder.mkdir(parents=True)
    (run_dir / "outcome.json").unlink(missing_ok=True)
    dead: list[DeadWorker] = []

    def mark_failed(found: list[DeadWorker]) -> None:
        (folder / FAILED_MARK).touch()
        dead.extend(found)

    feed = Feed(run_dir, attempt, display, stop.messages)
    stop.current_step = feed.current_step
    logs = RankLogs(str(folder), _environment(attempt, plan))
    with _agent_log(folder), _worker_spec(run_dir, config_path, plan, worker) as spec:
        agent = RunAgent(spec, logs, on_failure=mark_failed, on_start=lambda: stop.watch_over(agent))
        with display, feed:
            try:
                agent.run()
            finally:
                stop.watch_over(None)
    last_step = feed.history.last.step if feed.history.last else 0
    if stop.killed:
        message = "stopped by Ctrl-C without saving"
        outcome = Outcome("failed", attempt, last_step, int(ExitCode.FAILED), message)
        return AttemptEnd(outcome, (f"hp-train: {message}",))
    if dead:
        failures = collect_failures(run_dir, attempt, plan.sizes, dead, feed.current_step())
        return _judge(run_dir, attempt, failures, plan, may_restart=not stop.requested)
    found = read_outcome(run_dir, attempt)
    assert found is not None, f"all workers ended well, but rank 0 left no {run_dir}/outcome.json"
    return AttemptEnd(found)


def _judge(
    run_dir: Path, attempt: int, failures: list[Failure], plan: ProcessPlan, *, may_restart: bool
) -> AttemptEnd:
    """Return the end of a failed attempt: a line for what deserves a line, else the whole account."""
    cause = first_cause(failures)
    code = ExitCode(cause.exit_code)
    outcome = Outcome(_STATES.get(code, "failed"), attempt, cause.step, int(code), cause.message)
    if code != ExitCode.FAILED:
        return AttemptEnd(outcome, tuple(f"hp-train: {line}" for line in cause.message.splitlines()))
    lines = describe_failures(run_dir, attempt, plan.num_processes, failures)
    return AttemptEnd(outcome, (f"hp-train: attempt {attempt} failed", *lines), may_restart)


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
