"""How one attempt ended: the outcome and the report, from what the workers left and what the launcher saw. No torch."""

from __future__ import annotations

import dataclasses
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from hp_train.checkpoint.layout import newest_committed, read_manifest
from hp_train.errors import CheckpointError, ExitCode
from hp_train.launch.failures import DeadWorker, Failure, collect_failures, describe_failures, first_cause
from hp_train.launch.feed import Feed
from hp_train.launch.hang import Standing, hang_cause, hang_failure
from hp_train.launch.history import read_facts, read_rows
from hp_train.launch.memory_kills import count_memory_kills
from hp_train.launch.outcome import Cause, Outcome, read_outcome
from hp_train.launch.run_dir import attempt_dir
from hp_train.launch.signals import StopSignals
from hp_train.topology import MeshSizes
from hp_train.training.progress import Note

_CAUSES = {
    ExitCode.USER_ERROR: Cause.USER_ERROR,
    ExitCode.DIVERGED: Cause.DIVERGED,
}


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """How one group of workers ended."""

    outcome: Outcome
    report: tuple[str, ...] = ()  # what the person is told of a bad end, the cause last


@dataclass(slots=True)
class AttemptRecord:
    """What the launcher gathers while an attempt runs, and its judgement afterwards."""

    run_dir: Path
    attempt: int
    sizes: MeshSizes
    started_at: float  # seconds since the epoch
    nodes: tuple[str, ...] = field(default_factory=lambda: (socket.gethostname(),))
    dead: list[DeadWorker] = field(default_factory=list)  # found before the launcher ended any itself
    notes: dict[int, Note | None] = field(default_factory=dict)  # rank -> what it did when the first was found dead
    standings: list[Standing] = field(default_factory=list)  # of all ranks, when the watchdog found them hanging
    stood_still_s: float = 0.0
    lost_node: str = ""  # whose launcher did not tell how its share of the attempt ended
    superseded: str = ""  # why nothing may be written any more
    memory_kills: int = field(default_factory=count_memory_kills)

    def stopped_before_start(self, stop: StopSignals) -> AttemptEnd:
        """Return the end of an attempt that a signal forestalled."""
        message = "before the workers were started"
        return AttemptEnd(self.outcome(stop.cause, int(stop.exit_code), 0, message=message))

    def judge(self, feed: Feed, stop: StopSignals) -> AttemptEnd:
        """Return how the attempt ended, now that all workers are gone."""
        last_step = feed.history.last.step if feed.history.last else 0
        if stop.killed:
            return self.killed(last_step)
        if self.standings:
            failure = hang_failure(self.standings, self.stood_still_s, self.sizes)
            return self.judge_failures([failure], hang_cause(self.standings))
        if self.lost_node:
            message = f"{self.lost_node} is lost: its launcher told nothing of the end of the attempt"
            outcome = self.outcome(
                Cause.LOST_NODE, int(ExitCode.FAILED), last_step, message=message, node=self.lost_node
            )
            return AttemptEnd(outcome, (f"hp-train: {message}",))
        if self.dead:
            failures = collect_failures(self.run_dir, self.attempt, self.sizes, self.dead, self.notes)
            return self.judge_failures(failures)
        found = read_outcome(self.run_dir, self.attempt)
        assert found is not None, f"all workers ended well, but rank 0 left no outcome in {self.run_dir}"
        cause = found.cause if found.cause is Cause.DONE else stop.cause
        return AttemptEnd(self.outcome(cause, found.exit_code, found.step))

    def killed(self, step: int) -> AttemptEnd:
        """Return the end of an attempt whose owner did not want to wait for the save."""
        message = "stopped by Ctrl-C without saving"
        outcome = self.outcome(Cause.CANCELLED, int(ExitCode.FAILED), step, message=message)
        return AttemptEnd(outcome, (f"hp-train: {message}",))

    def judge_failures(self, failures: list[Failure], cause: Cause | None = None) -> AttemptEnd:
        """Return the end of a failed attempt: a line for what deserves a line, else the whole account.

        `cause` is given where it is known better than the first failure tells.
        """
        first = first_cause(failures)
        cause, code = cause or self._cause_of(first), ExitCode(first.exit_code)
        outcome = self.outcome(
            cause, int(code), first.step, rank=first.rank, coordinates=first.coordinates, phase=first.phase,
            message=f"{first.type}: {first.message}" if first.type else first.message,
            node=self.nodes[first.rank * len(self.nodes) // self.sizes.world_size],
        )  # fmt: skip
        if code != ExitCode.FAILED:
            return AttemptEnd(outcome, tuple(f"hp-train: {line}" for line in first.message.splitlines()))
        lines = describe_failures(self.run_dir, self.attempt, self.sizes.world_size, len(self.nodes), failures)
        return AttemptEnd(outcome, (f"hp-train: attempt {self.attempt} failed", *lines))

    def _cause_of(self, failure: Failure) -> Cause:
        if failure.type == "NonFiniteError":
            return Cause.NON_FINITE
        if failure.is_out_of_memory or (failure.was_killed and count_memory_kills() > self.memory_kills):
            return Cause.OUT_OF_MEMORY
        if failure.is_communication:
            return Cause.COMMUNICATION
        return _CAUSES.get(ExitCode(failure.exit_code), Cause.UNKNOWN)

    def outcome(self, cause: Cause, exit_code: int, step: int, **more: object) -> Outcome:
        """Return the outcome of the attempt, which ends now; `more` holds fields that nothing here tells."""
        facts = read_facts(attempt_dir(self.run_dir, self.attempt))
        outcome = Outcome(
            self.attempt, cause, exit_code, step, started_at=self.started_at, ended_at=time.time(),
            first_step=facts.first_step if facts else 0, last_step=self._last_step(),
            committed_step=committed_step(self.run_dir), nodes=self.nodes,
        )  # fmt: skip
        return dataclasses.replace(outcome, **more)

    def _last_step(self) -> int:
        rows = read_rows(self.run_dir / "metrics.jsonl")
        return rows[-1].step if rows else 0


def committed_step(run_dir: Path) -> int:
    """Return the step of the newest complete checkpoint (sizes checked, contents not), 0 if there is none."""
    folder = newest_committed(run_dir / "checkpoints")
    try:
        return 0 if folder is None else read_manifest(folder).step
    except CheckpointError:  # taken away this very moment
        return 0
