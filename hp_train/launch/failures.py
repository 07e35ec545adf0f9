"""Why an attempt failed: each rank's own account, which of them is the cause, and how it is told. No torch.

A worker that raises leaves failure.json; one that was killed leaves nothing, and the launcher speaks for it. When one
rank dies its peers lose their connections within milliseconds, so errors of communication rank below all others
whatever their time stamps say.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hp_train.launch.files import read_json, write_json
from hp_train.launch.node_log import node_log
from hp_train.launch.run_dir import attempt_dir, rank_dir
from hp_train.topology import MeshSizes, coordinates_of
from hp_train.training.progress import Note

FAILED_MARK = "FAILED"  # in the attempt's folder: written before the launcher ends the other workers
MOST_RANKS_LISTED = 16

# What gloo, NCCL, TCPStore and sockets say when the other side is gone or does not answer.
_COMMUNICATION = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|closed by peer|reset by peer|broken pipe|timed? ?out|"
    r"socket (closed|timeout|error)|remote process exited|ncclRemoteError|ncclSystemError|"
    r"NCCL communicator was aborted|"
    r"(recv|send) failed|failed to (recv|send)|connectFullMesh|network error|unhandled system error|"
    r"watchdog caught collective|should dump",
    re.IGNORECASE,
)
HUNG_TOGETHER = "Hung"  # all ranks stand at the same place, and none is the cause
# What torch and the sockets raise then, and what the pipeline does on ranks that only hear of another rank's end.
_COMMUNICATION_TYPES = {
    HUNG_TOGETHER, "PipelineError", "PipelineHang", "DistNetworkError", "DistStoreError", "ConnectionResetError",
    "BrokenPipeError", "EOFError",
}  # fmt: skip
_MAY_LACK_MEMORY = ("RuntimeError", "AcceleratorError", "DistBackendError")  # raised for much else: the message tells


@dataclass(frozen=True, slots=True)
class Failure:
    """One rank's end."""

    rank: int
    time_ns: int  # when it was raised, or when the launcher saw the process dead
    type: str  # of the exception; "" when the process left no account
    message: str
    traceback: str = ""
    coordinates: str = ""
    step: int = 0
    phase: str = ""
    notes: tuple[str, ...] = ()  # lines to print below the message: memory by kind and what would help
    signal_number: int = 0  # 0: not killed by a signal
    exit_code: int = 1  # of the command, if this is the cause

    @property
    def was_killed(self) -> bool:
        """Say whether the process was killed from outside, without a chance to give an account."""
        return self.signal_number == signal.SIGKILL

    @property
    def is_out_of_memory(self) -> bool:
        """Say whether memory, of the device or the machine, ran out."""
        if self.type in ("OutOfMemoryError", "MemoryError"):
            return True
        text = self.message.lower()
        return self.type in _MAY_LACK_MEMORY and ("out of memory" in text or "can't allocate memory" in text)

    @property
    def is_communication(self) -> bool:
        """Say whether this looks like the echo of another rank's end."""
        if self.type in _COMMUNICATION_TYPES:
            return True
        if self.signal_number == signal.SIGABRT and not self.traceback:  # NCCL's watchdog aborts the process
            return _COMMUNICATION.search(self.message) is not None
        torch_raised = self.type in ("RuntimeError", "DistBackendError", "DistError", "TimeoutError", "OSError")
        return torch_raised and _COMMUNICATION.search(self.message) is not None


def record_failure(folder: Path, failure: Failure) -> None:
    """Leave a rank's account in its log folder: failure.json for the launcher, traceback.txt for people."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "traceback.txt").write_text(failure.traceback, encoding="utf-8")
    write_json(folder / "failure.json", asdict(failure))


def read_failure(folder: Path) -> Failure | None:
    """Return the account in a rank's log folder, None if it left none."""
    found = read_json(folder / "failure.json")
    return None if found is None else Failure(**{**found, "notes": tuple(found["notes"])})


@dataclass(frozen=True, slots=True)
class DeadWorker:
    """A worker that the launcher found dead before it ended any itself."""

    rank: int
    status: int  # exit status; negative: the signal that killed it
    time_ns: int  # when it was seen
    last_words: str = ""  # the last lines that it printed


def collect_failures(
    run_dir: Path, attempt: int, sizes: MeshSizes, dead: list[DeadWorker], notes: Mapping[int, Note | None]
) -> list[Failure]:
    """Return the end of every rank that failed: its own account, else what the launcher saw of it.

    `notes` says what each rank was doing, as far as it is known here.
    """
    seen = {worker.rank: worker for worker in dead}
    failures = []
    for rank in range(sizes.world_size):
        failure = read_failure(rank_dir(run_dir, attempt, rank))
        if failure is None and rank in seen:
            where = coordinates_of(rank, sizes).describe()
            failure = replace(_speak_for(seen[rank]), coordinates=where)
            note = notes.get(rank)
            if note is not None:
                failure = replace(failure, step=note.step, phase=str(note.phase))
        if failure is not None:
            failures.append(failure)
    return failures


def _speak_for(worker: DeadWorker) -> Failure:
    tail = "".join(f"\n    {line}" for line in worker.last_words.splitlines())
    if worker.status >= 0:
        early = "before the end of the run " if worker.status == 0 else ""
        message = f"the process exited {early}with status {worker.status} and left no account of its own"
        return Failure(worker.rank, worker.time_ns, "", message + tail)
    number = -worker.status
    message = f"the process was killed by signal {number} ({_signal_name(number)})"
    notes: tuple[str, ...] = ()
    if number == signal.SIGKILL:
        notes = (
            "a process is most often killed so when the machine runs out of memory: `dmesg` names it then; "
            "a smaller trainer.micro_batch_size or more ranks in fsdp.dp_shard_size take less",
        )
    return Failure(worker.rank, worker.time_ns, "", message + tail, notes=notes, signal_number=number)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def first_cause(failures: list[Failure]) -> Failure:
    """Return the failure that the others follow from.

    A process killed by a signal could not say when; it had died before its peers noticed, so it goes first, then other
    errors by time, then errors of communication by time.
    """

    def order(failure: Failure) -> tuple[bool, bool, int]:
        return (failure.is_communication, failure.signal_number == 0, failure.time_ns)

    return min(failures, key=order)


def describe_failures(
    run_dir: Path, attempt: int, world_size: int, num_nodes: int, failures: list[Failure]
) -> list[str]:
    """Return the report of a failed attempt, the cause last and its traceback once."""
    cause = first_cause(failures)
    told = {failure.rank: failure for failure in failures}
    lines = []
    for rank in range(min(world_size, MOST_RANKS_LISTED)):
        log = node_log(run_dir, attempt, rank * num_nodes // world_size)
        lines.append(f"rank {rank}: {_in_short(told.get(rank), cause)}; {log}")
    if world_size > MOST_RANKS_LISTED:
        lines.append(f"ranks {MOST_RANKS_LISTED}-{world_size - 1}: {attempt_dir(run_dir, attempt)}")
    if cause.traceback:
        lines.extend(("", cause.traceback.rstrip()))
    return [*lines, "", *_describe_cause(cause)]


def _in_short(failure: Failure | None, cause: Failure) -> str:
    if failure is None:
        return "ended by the launcher"
    if failure is cause:
        return "failed" if cause.is_communication else "failed first"
    if failure.is_communication:
        return "lost its connection"
    return f"failed too ({failure.type or failure.message.splitlines()[0]})"


def _describe_cause(cause: Failure) -> list[str]:
    where = f"rank {cause.rank}" + (f" ({cause.coordinates})" if cause.coordinates else "")
    when = f" at step {cause.step}" if cause.step else ""
    when += f", {cause.phase}" if cause.phase else ""
    kind = f"{cause.type}: " if cause.type else ""
    if cause.type == HUNG_TOGETHER:
        return [*cause.notes, f"hung{when}: {cause.message}"]
    if cause.is_communication:
        head = f"no rank gave a cause; {where} was the first to lose its connection{when}: {kind}{cause.message}"
    else:
        head = f"{where} failed{when}: {kind}{cause.message}"
    return [head, *cause.notes]
