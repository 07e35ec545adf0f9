"""What to do when a job's launchers have ended: `python -m hp_train.launch.slurm_end RUN_DIR STATE CONFIG DOWN`.

job.sbatch runs it. STATE is what `scontrol show job --oneliner` says, DOWN the job's nodes that are down. Prints one
line, `ACTION CODE EXCLUDE`: requeue, resubmit or end, the exit code of the job, and nodes to do without; the reason
goes to stderr, into the job's log. `decide` is the pure part. No torch, and no command of SLURM's: this may run inside
a container.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from hp_train.checkpoint.fence import newest_attempt
from hp_train.errors import ExitCode
from hp_train.launch.history import read_facts, read_rows
from hp_train.launch.outcome import Cause, Outcome, read_outcome, read_outcomes, write_outcome
from hp_train.launch.restart import nodes_to_exclude, why_not_again
from hp_train.launch.run_dir import attempt_dir
from hp_train.launch.run_of_job import ATTEMPT_FILE

REFUSED_FILE = "refused.txt"  # in the incarnation's folder: why the launcher would not start
# What an attempt seems to end of when SLURM takes a job off a node that it has lost: a signal, a broken connection.
# STOPPED: the signal came to another node only, and all ranks saved.
_MAY_BE_A_NODE = (Cause.PREEMPTED, Cause.STOPPED, Cause.COMMUNICATION, Cause.NO_PROGRESS, Cause.UNKNOWN)
JUDGED_FILE = "judged"  # in the incarnation's folder: its script came to its end
CANCELLED_FILE = "slurm/cancelled"  # in the run directory: `hp-train cancel` was typed; a new submission removes it

_TAKEN_DOWN = ("PREEMPTED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


class Action(StrEnum):
    """What job.sbatch does."""

    END = "end"
    REQUEUE = "requeue"
    RESUBMIT = "resubmit"


@dataclass(frozen=True, slots=True)
class JobState:
    """What SLURM says of the job while its script still runs."""

    state: str  # RUNNING, unless something has been done to it already
    restarts: int = 0
    is_preempted: bool = False
    reason: str = ""

    @property
    def is_taken_down(self) -> bool:
        """Say whether SLURM ends the job for its own reasons, and has not queued it again."""
        return self.is_preempted or self.state in _TAKEN_DOWN or self.reason in ("NodeDown", "TimeLimit")

    @property
    def is_cancelled(self) -> bool:
        """Say whether its owner ends the job, or has: while a job ends, that is the one end without a reason."""
        is_ending_so = self.state == "COMPLETING" and self.reason == "None" and not self.is_preempted
        return is_ending_so or self.state.startswith("CANCELLED")

    @classmethod
    def parse(cls, text: str) -> JobState:
        """Read `scontrol show job --oneliner`; an empty text gives an unknown state."""
        state = re.search(r"(?:^| )JobState=(\S+)", text)
        restarts = re.search(r"(?:^| )Restarts=(\d+)", text)
        preempted = re.search(r"(?:^| )PreemptTime=(\d\S*)", text)
        reason = re.search(r"(?:^| )Reason=(\S+)", text)
        return cls(
            state[1] if state else "UNKNOWN", int(restarts[1]) if restarts else 0, preempted is not None,
            reason[1] if reason else "",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, and why in words."""

    action: Action
    reason: str
    cause: Cause | None = None  # what the attempt ended of, where SLURM knows better than the launcher


def decide(
    outcomes: Sequence[Outcome], job: JobState, *, restart: int, continued: int, continue_by: str, max_requeues: int
) -> Decision:
    """Return whether the job goes on, once, and how.

    outcomes: of all attempts at the run, the last one this incarnation's. restart: times that SLURM has started this
    job again. continued: incarnations of the run under earlier job ids.
    """
    if job.restarts > restart or job.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"):
        return Decision(Action.END, "SLURM has queued the job again itself")
    if job.is_cancelled:
        return Decision(Action.END, "the job was cancelled", Cause.CANCELLED)
    last = outcomes[-1]
    if last.cause is Cause.DONE:
        return Decision(Action.END, "all steps are taken")
    not_again = why_not_again(outcomes)
    if not_again is not None:
        cause = Cause.NO_PROGRESS if last.may_restart else None
        return Decision(Action.END, not_again, cause)
    if continue_by == "none":
        return Decision(Action.END, "launcher.continue_by=none")
    if continued + restart >= max_requeues:
        return Decision(
            Action.END, f"the run has gone on {continued + restart} times (launcher.max_requeues={max_requeues})"
        )
    why = f"attempt {last.attempt} ended as {last.cause} at step {last.step}"
    if job.state == "RUNNING":
        return Decision(Action.RESUBMIT if continue_by == "resubmit" else Action.REQUEUE, why)
    if continue_by == "requeue":
        return Decision(Action.END, f"a job in state {job.state} cannot be queued again (launcher.continue_by=requeue)")
    if job.is_taken_down:
        return Decision(Action.RESUBMIT, f"{why}; SLURM has ended the job ({job.state})")
    return Decision(Action.END, f"the job is being ended by its owner or by SLURM ({job.state})")


def main(arguments: list[str]) -> int:
    """Print what to do; see the module."""
    from hp_train.launch.worker import load_config

    run_dir, state_text, config_name, down = Path(arguments[0]), arguments[1], arguments[2], arguments[3]
    launcher = load_config(run_dir / config_name).launcher
    marks = run_dir / "slurm" / os.environ["HP_TRAIN_INCARNATION"]
    refused = _read(marks / REFUSED_FILE)
    if refused:
        return _print(Decision(Action.END, refused), int(ExitCode.USER_ERROR))
    job = JobState.parse(state_text)
    (marks / JUDGED_FILE).touch()
    if _is_superseded(run_dir, marks):
        return _print(Decision(Action.END, "a later start of the run has taken over"), int(ExitCode.FAILED))
    outcomes = _with_this_incarnation(run_dir, marks, down)
    if not outcomes:
        return _print(Decision(Action.END, "no launcher came up; see the log above"), int(ExitCode.FAILED))
    if (run_dir / CANCELLED_FILE).exists():
        job = replace(job, state="CANCELLED")
    decision = decide(
        outcomes, job,
        restart=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        continued=int(os.environ.get("HP_TRAIN_CONTINUED", "0")),
        continue_by=launcher.continue_by, max_requeues=launcher.max_requeues,
    )  # fmt: skip
    last = outcomes[-1]
    if decision.cause is not None and last.cause is not Cause.DONE:
        told = replace(last, cause=decision.cause, gave_up=decision.cause is Cause.NO_PROGRESS)
        if told != last:
            write_outcome(run_dir, told)
    excluded = nodes_to_exclude(outcomes)
    return _print(decision, last.exit_code, (*filter(None, [launcher.exclude]), *excluded) if excluded else ())


def _is_superseded(run_dir: Path, marks: Path) -> bool:
    """Say whether the run has been started again elsewhere: SLURM gave this node up, and the script lives on there."""
    begun = [int(_read(path)) for path in (run_dir / "slurm").glob(f"*/{ATTEMPT_FILE}")]
    return max(begun, default=0) > int(_read(marks / ATTEMPT_FILE) or max(begun, default=0))


def _with_this_incarnation(run_dir: Path, marks: Path, down: str) -> list[Outcome]:
    """Return the ends of all attempts; what the last one's launcher could not know, or not tell, is written."""
    outcomes = list(read_outcomes(run_dir))
    begun = _read(marks / ATTEMPT_FILE)
    if not begun:
        return []
    newest = max(newest_attempt(run_dir), int(begun))
    last = settle_end(run_dir, newest, down.partition(",")[0])
    return [*(outcome for outcome in outcomes if outcome.attempt < newest), last]


def settle_end(run_dir: Path, attempt: int, lost_node: str) -> Outcome:
    """Return how an attempt ended, written anew if its launcher did not live to tell or could not know of a lost node.

    lost_node: of those that it ran on, one that is down; empty if none is.
    """
    told = read_outcome(run_dir, attempt)
    if told is None or (not told.ended_at and told.cause is not Cause.DONE):  # rank 0's word is not the launcher's
        return _account_for(run_dir, attempt, lost_node)
    if lost_node and told.cause in _MAY_BE_A_NODE:
        told = replace(told, cause=Cause.LOST_NODE, node=lost_node, message=_lost(lost_node, told.message))
        write_outcome(run_dir, told)
    return told


def _account_for(run_dir: Path, attempt: int, lost_node: str) -> Outcome:
    from hp_train.launch.attempt_end import committed_step

    rows, facts = read_rows(run_dir / "metrics.jsonl"), read_facts(attempt_dir(run_dir, attempt))
    word = "the launcher ended without a word"
    outcome = Outcome(
        attempt, Cause.LOST_NODE if lost_node else Cause.UNKNOWN, int(ExitCode.FAILED),
        step=rows[-1].step if rows else 0, message=_lost(lost_node, word) if lost_node else word,
        ended_at=time.time(), first_step=facts.first_step if facts else 0, last_step=rows[-1].step if rows else 0,
        committed_step=committed_step(run_dir), node=lost_node,
    )  # fmt: skip
    write_outcome(run_dir, outcome)
    return outcome


def _lost(node: str, message: str) -> str:
    return f"{node} is down" + (f": {message}" if message else "")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""


def _print(decision: Decision, code: int, exclude: Sequence[str] = ()) -> int:
    word = {
        Action.END: "not queued again",
        Action.REQUEUE: "queueing the job again",
        Action.RESUBMIT: "submitting again",
    }
    print(f"hp-train: {word[decision.action]}: {decision.reason}", file=sys.stderr, flush=True)
    print(decision.action, code, ",".join(exclude), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
