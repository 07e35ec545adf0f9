"""A SLURM cluster on this machine: the real slurmctld, slurmd and munge, each node in namespaces of its own.

A node has its own host name, processes and hosts file, so that killing its first process is a power cut. Everything
lies in one folder and listens on the loopback address; the machine's own files are left alone.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

COMMANDS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol", "unshare", "nsenter", "setpriv")
_DIE_WITH_US = ("setpriv", "--pdeathsig", "KILL")  # nothing outlives the tests, however they end
_PATIENCE_S = 60.0
_CONF = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={base}/munge/socket
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool/%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/spool/%n.pid
SlurmctldLogFile={base}/log/slurmctld.log
SlurmdLogFile={base}/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_min_interval=100000,bf_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
SlurmdTimeout=10
KillWait=10
MessageTimeout=10
MailProg=/bin/true
"""


def why_not() -> str | None:
    """Return why no cluster can be started here, None if one can."""
    missing = [name for name in COMMANDS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: slurmctld slurmd slurm-client munge)"
    if os.geteuid() != 0:
        return "needs root: nodes are namespaces"
    tried = subprocess.run(["unshare", "--uts", "--pid", "--mount", "--fork", "true"], capture_output=True, text=True)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else None


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


class Cluster:
    """Nodes by name; started and stopped once for a module of tests."""

    def __init__(self, base: Path, nodes: tuple[str, ...], cpus: int = 8) -> None:
        self.base, self.nodes, self._cpus = base, nodes, cpus
        self._port = 10_000 + os.getpid() % 500 * 16  # two clusters on one machine never meet
        self.environment = {**os.environ, "SLURM_CONF": str(base / "slurm.conf"), "PATH": _path()}
        self._daemons: list[subprocess.Popen] = []
        self._inits: dict[str, subprocess.Popen] = {}

    def start(self) -> None:
        """Start everything and wait until all nodes are idle."""
        for folder in ("state", "spool", "log", "munge"):
            (self.base / folder).mkdir(parents=True)
        (self.base / "munge/key").write_bytes(secrets.token_bytes(128))
        (self.base / "munge/key").chmod(0o400)
        self._write_conf()
        munge = self.base / "munge"
        self._run(
            "munged", "--foreground", "--force", f"--key-file={munge}/key", f"--socket={munge}/socket",
            f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed",
        )  # fmt: skip
        wait_until((munge / "socket").exists, "munged listens")
        self._run("slurmctld", "-D", "-i")
        for name in self.nodes:
            self.boot(name)
        self.wait_for_idle()

    def wait_for_idle(self) -> None:
        """Wait until all nodes are idle."""
        wait_until(lambda: self._idle() == set(self.nodes), lambda: f"nodes are idle: {self.ask('sinfo', '-N', '-l')}")

    def _write_conf(self) -> None:
        lines = [_CONF.format(host=socket.gethostname().partition(".")[0], port=self._port, base=self.base)]
        for number, name in enumerate(self.nodes, start=1):
            lines.append(
                f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={self._port + number} CPUs={self._cpus} "
                "RealMemory=4096"
            )
        lines.append("PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=20 DefaultTime=00:10:00")
        lines.append("PartitionName=urgent Nodes=ALL PriorityTier=9 PreemptMode=OFF")
        (self.base / "slurm.conf").write_text("\n".join(lines) + "\n")
        hosts = "".join(f"127.0.0.1 {name}\n" for name in ("localhost", socket.gethostname(), *self.nodes))
        (self.base / "hosts").write_text(hosts)

    def _run(self, *command: str) -> None:
        log = open(self.base / "log" / f"{command[0]}.out", "w")
        started = [*_DIE_WITH_US, *command]
        self._daemons.append(
            subprocess.Popen(started, env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        )

    def _idle(self) -> set[str]:
        try:
            return set(self.ask("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split())
        except RuntimeError:
            return set()

    def boot(self, name: str) -> None:
        """Bring a node up, for the first time or after a cut."""
        (self.base / "spool" / f"{name}.pid").unlink(missing_ok=True)
        script = 'hostname "$1"; mount --bind "$2/hosts" /etc/hosts; slurmd -N "$1"; '
        script += "while :; do sleep 60 & wait $!; done"  # which reaps orphans, as any first process must
        self._inits[name] = subprocess.Popen(
            [*_DIE_WITH_US, "unshare", "--uts", "--pid", "--mount", "--fork", "--mount-proc", "--kill-child",
             "bash", "-c", script, "node", name, str(self.base)],
            env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip

    def cut(self, name: str) -> None:
        """Cut a node's power: all its processes are gone at once. SLURM is told, as its monitoring would be."""
        init = self._inits.pop(name)
        init.kill()
        init.wait()
        self.ask("scontrol", "update", f"nodename={name}", "state=down", "reason=power")

    def inside(self, name: str, *command: str) -> str:
        """Run a command on a node and return what it prints."""
        return _output(["nsenter", *self._spaces(name), "--", *command], self.environment)

    def _spaces(self, name: str) -> list[str]:
        spaces = f"/proc/{self._inits[name].pid}/ns"
        return [f"--uts={spaces}/uts", f"--mount={spaces}/mnt", f"--pid={spaces}/pid_for_children"]

    def kill_slurmd(self, name: str) -> None:
        """Kill a node's slurmd alone; its tasks go on."""
        self.inside(name, "kill", "-KILL", (self.base / "spool" / f"{name}.pid").read_text().strip())

    def start_slurmd(self, name: str) -> None:
        """Start it again."""
        self.inside(name, "slurmd", "-N", name)

    def ask(self, *command: str) -> str:
        """Return what a command of SLURM's prints; RuntimeError if it fails."""
        return _output(list(command), self.environment)

    def state(self, job: str) -> str:
        """Return the state of a job."""
        return dict(pair.partition("=")[::2] for pair in self.show(job).split())["JobState"]

    def show(self, job: str) -> str:
        """Return what SLURM says of a job."""
        return self.ask("scontrol", "show", "job", job, "--oneliner")

    def wait_for(self, job: str, *states: str) -> None:
        """Wait until a job is in one of these states."""
        wait_until(
            lambda: self.state(job) in states, lambda: f"job {job} is {states}: {self.show(job)}", 3 * _PATIENCE_S
        )

    def release(self, job: str) -> None:
        """Let a job that was queued again start: SLURM holds it for two minutes. Not in the second of its kill."""
        wait_until(lambda: "Reason=BeginTime" in self.show(job), lambda: f"job {job} waits to begin: {self.show(job)}")
        self.ask("scontrol", "update", f"jobid={job}", "starttime=now+2")

    def stop(self) -> None:
        """End all that was started here, and nothing else."""
        for init in self._inits.values():
            init.kill()
            init.wait()
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _output(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr}")
    return done.stdout


def wait_until(happened: Callable[[], bool], what: str | Callable[[], str], patience_s: float = _PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not happened():
        if time.monotonic() > deadline:
            raise AssertionError(f"did not happen in {patience_s} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.05)
