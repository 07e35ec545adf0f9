"""One node of a SLURM job: `python -m hp_train.launch.slurm_job RUN_DIR CONFIG`, started by srun once on each node.

The first node's launcher leads (see `nodes`): it owns the run directory and writes what the job's script asks
afterwards. Exit status 0 says that the end was orderly, whatever it was; anything else has srun end the other nodes.
No command of SLURM's is called: this may run inside a container. torch is imported after everything is checked.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from hp_train.checkpoint.inspection import slowest_save_s
from hp_train.config.schema import TrainerConfig
from hp_train.errors import ConfigError, ExitCode, HpTrainError
from hp_train.launch.devices import ProcessPlan, plan_node
from hp_train.launch.files import write_text
from hp_train.launch.history import LineTail, rows_of
from hp_train.launch.outcome import read_outcome
from hp_train.launch.owner import Owner
from hp_train.launch.run_of_job import ATTEMPT_FILE
from hp_train.launch.slurm_end import JUDGED_FILE, REFUSED_FILE, settle_end
from hp_train.launch.snapshot import HASH_FILE, code_hash
from hp_train.launch.worker import load_config

_CLOCK_POLL_S = 1.0
_SAFETY_S = 10.0  # for the launchers and the script to end after the save
DOWN = "HP_TRAIN_DOWN"  # set by the script: nodes that are down, by commas, when a job starts again
STOP_FILE = "stop"  # in the incarnation's folder: the warning came before anybody listened


def main(arguments: list[str]) -> int:
    """Run this node's share of the job and return the exit status for srun."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until a launch listens; the script's file tells what was missed
    run_dir, config_path = Path(arguments[0]), Path(arguments[0]) / arguments[1]
    node_rank, num_nodes = int(os.environ["SLURM_NODEID"]), int(os.environ["SLURM_STEP_NUM_NODES"])
    marks = run_dir / "slurm" / os.environ["HP_TRAIN_INCARNATION"]
    try:
        config = load_config(config_path)
        plan = _plan(config, num_nodes)
        _check_rendezvous(node_rank, num_nodes)
        if node_rank == 0:
            _say(*_warnings(run_dir, plan))
        return _run(run_dir, config_path, config, plan, node_rank, marks)
    except ConfigError as error:
        lines = [f"{socket.gethostname()}: {message}" for message in error.messages]
        write_text(marks / REFUSED_FILE, "\n".join(lines) + "\n")
        print(*(f"hp-train: {line}" for line in lines), sep="\n", file=sys.stderr, flush=True)
        return int(ExitCode.USER_ERROR)
    except HpTrainError as error:
        print(f"hp-train: {error}", file=sys.stderr, flush=True)
        return int(error.exit_code)


def _plan(config: TrainerConfig, num_nodes: int) -> ProcessPlan:
    if num_nodes != config.launcher.nodes:
        raise ConfigError(
            f"launcher.nodes={config.launcher.nodes} and the job has {num_nodes}; the mesh needs them all"
        )
    plan = plan_node(config)
    if plan.faults:
        raise ConfigError(*plan.faults)
    return plan


def _check_rendezvous(node_rank: int, num_nodes: int) -> None:
    """Raise ConfigError if the first node cannot be found under its name; it is never taken to be this one."""
    host = _endpoint()[0]
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise ConfigError(
            f"the name of the job's first node, {host}, cannot be resolved here: {error.args[-1]}"
        ) from None
    name = os.environ.get("SLURMD_NODENAME", host)
    if node_rank == 0 and num_nodes > 1 and name.partition(".")[0] != host.partition(".")[0]:
        raise ConfigError(
            f"SLURM counts {name} as the job's first node and lists {host} first; cannot tell where to meet"
        )


def _endpoint() -> tuple[str, int]:
    host, _, port = os.environ["HP_TRAIN_RENDEZVOUS"].rpartition(":")
    return host, int(port)


def _warnings(run_dir: Path, plan: ProcessPlan) -> list[str]:
    found = []
    cores = len(os.sched_getaffinity(0))
    if cores < plan.num_processes:
        found.append(
            f"warning: {cores} cores for {plan.num_processes} processes; ask for more by launcher.cpus_per_node"
        )
    recorded = run_dir / "slurm" / HASH_FILE
    if recorded.is_file() and recorded.read_text().strip() != code_hash():
        found.append("warning: the code is not the one that this run was submitted with")
    return found


def _run(
    run_dir: Path, config_path: Path, config: TrainerConfig, plan: ProcessPlan, node_rank: int, marks: Path
) -> int:
    from hp_train.launch.launch_spec import LaunchSpec
    from hp_train.launch.local import follow  # torch is loaded here
    from hp_train.launch.nodes import NodeGroup
    from hp_train.launch.owner import last_owner, own
    from hp_train.launch.signals import StopSignals
    from hp_train.launch.start import run_attempts

    with StopSignals().installed() as stop:
        if (marks / STOP_FILE).exists():
            os.kill(os.getpid(), signal.SIGUSR1)
        spec = LaunchSpec(run_dir, config_path, config, plan, stop)
        if node_rank > 0:
            follow(replace(spec, group=NodeGroup(node_rank, plan.num_nodes, *_endpoint())))
            return 0
        before = last_owner(run_dir)
        with own(run_dir) as ownership:
            write_text(marks / ATTEMPT_FILE, str(ownership.attempt))
            _settle_the_one_before(run_dir, ownership.attempt - 1, before)
            group = NodeGroup(0, plan.num_nodes, *_endpoint()) if plan.num_nodes > 1 else None
            _stop_before_the_limit(run_dir)
            run_attempts(replace(spec, group=group), ownership)
    return 0


def _settle_the_one_before(run_dir: Path, attempt: int, owner: Owner | None) -> None:
    """See that the attempt before this one has an end, and the right one if its script was killed with a node.

    owner: the last launcher that did not take its note away.
    """
    begun = {int(path.read_text()): path.parent for path in (run_dir / "slurm").glob(f"*/{ATTEMPT_FILE}")}
    first = max((number for number in begun if number <= attempt), default=0)
    if not first or (begun[first] / JUDGED_FILE).exists():
        return
    told = read_outcome(run_dir, attempt)
    names = [*([owner.host] if owner is not None and owner.attempt == attempt else []), *(told.nodes if told else ())]
    down = {name.partition(".")[0] for name in os.environ.get(DOWN, "").split(",")}
    settle_end(run_dir, attempt, next((name for name in names if name.partition(".")[0] in down), ""))


def _stop_before_the_limit(run_dir: Path) -> None:
    """Watch the clock: stop this job in time for a save should the scheduler's warning be too late, or not come."""
    end = float(os.environ.get("HP_TRAIN_END") or 0)
    if not end:
        return

    def watch() -> None:
        steps = LineTail(run_dir / "metrics.jsonl")
        step_s = 0.0
        while time.time() < end - slowest_save_s(run_dir / "checkpoints") - step_s - _SAFETY_S:
            step_s = max([step_s, *(row.step_time_s or 0.0 for row in rows_of(steps.poll()))])
            time.sleep(_CLOCK_POLL_S)
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Thread(target=watch, name="time-limit", daemon=True).start()


def _say(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.exit(status)
