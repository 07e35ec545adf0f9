"""What to do when a job's launchers have ended: `python -m hp_train.launch.slurm_end RUN_DIR STATE`, run by job.sbatch.

STATE is what `scontrol show job --oneliner` says. Prints one line, `ACTION CODE EXCLUDE`: requeue, resubmit or end, the
exit code of the job, and nodes to do without; the reason goes to stderr, into the job's log. `decide` is the pure part.
No torch, and no command of SLURM's: this may run inside a container.
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

from hp_train.errors import ExitCode
from hp_train.launch.outcome import Cause, Outcome, read_outcome, read_outcomes, write_outcome
from hp_train.launch.restart import nodes_to_exclude, why_not_again

REFUSED_FILE = "refused.txt"  # in the incarnation's folder: why the launcher would not start
CANCELLED_FILE = "slurm/cancelled"  # in the run directory: `hp-train cancel` was typed; a new submission removes it
ATTEMPT_FILE = "first_attempt"  # there too: number of the first attempt of this incarnation


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

    @classmethod
    def parse(cls, text: str) -> JobState:
        """Read `scontrol show job --oneliner`; an empty text gives an unknown state."""
        state = re.search(r"(?:^| )JobState=(\S+)", text)
        restarts = re.search(r"(?:^| )Restarts=(\d+)", text)
        preempted = re.search(r"(?:^| )PreemptTime=(\d\S*)", text)
        return cls(state[1] if state else "UNKNOWN", int(restarts[1]) if restarts else 0, preempted is not None)


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
    if job.state.startswith("CANCELLED"):
        return Decision(Action.END, "the job was cancelled", Cause.CANCELLED)
    if job.restarts > restart or job.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"):
        return Decision(Action.END, "SLURM has queued the job again itself")
    last = outcomes[-1]
    if last.cause is Cause.DONE:
        return Decision(Action.END, "all steps are taken")
    not_again = why_not_again(outcomes)
    if not_again is not None:
        cause = Cause.NO_PROGRESS if last.cause.may_restart else None
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
    # COMPLETING hides what came before it: cancelled by its owner, or queued again by SLURM. Neither is to go on twice.
    if job.is_preempted or job.state in ("PREEMPTED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"):
        return Decision(Action.RESUBMIT, f"{why}; SLURM has ended the job ({job.state})")
    return Decision(Action.END, f"the job is being ended by its owner or by SLURM ({job.state})")


def main(arguments: list[str]) -> int:
    """Print what to do; see the module."""
    from hp_train.launch.worker import load_config

    run_dir, state_text, config_name = Path(arguments[0]), arguments[1], arguments[2]
    launcher = load_config(run_dir / config_name).launcher
    marks = run_dir / "slurm" / os.environ["HP_TRAIN_INCARNATION"]
    refused = _read(marks / REFUSED_FILE)
    if refused:
        return _print(Decision(Action.END, refused), int(ExitCode.USER_ERROR))
    job = JobState.parse(state_text)
    outcomes = _with_this_incarnation(run_dir, marks, job)
    if not outcomes:
        return _print(Decision(Action.END, "no launcher came up; see the log above"), int(ExitCode.FAILED))
    if (run_dir / CANCELLED_FILE).exists():
        job = JobState("CANCELLED", job.restarts)
    decision = decide(
        outcomes, job,
        restart=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        continued=int(os.environ.get("HP_TRAIN_CONTINUED", "0")),
        continue_by=launcher.continue_by, max_requeues=launcher.max_requeues,
    )  # fmt: skip
    last = outcomes[-1]
    if decision.cause is not None and decision.cause is not last.cause and last.cause is not Cause.DONE:
        write_outcome(run_dir, replace(last, cause=decision.cause))
    excluded = nodes_to_exclude(outcomes)
    return _print(decision, last.exit_code, (*filter(None, [launcher.exclude]), *excluded) if excluded else ())


def _with_this_incarnation(run_dir: Path, marks: Path, job: JobState) -> list[Outcome]:
    """Return the ends of all attempts; one that its launcher did not live to tell of is added and written."""
    outcomes = list(read_outcomes(run_dir))
    begun = _read(marks / ATTEMPT_FILE)
    if not begun:
        return []
    newest = max((int(path.name.removeprefix("attempt_")) for path in (run_dir / "logs").glob("attempt_*")), default=0)
    if outcomes and outcomes[-1].attempt >= max(newest, int(begun)):
        return outcomes
    lost = job.state == "NODE_FAIL"
    message = "a node was lost" if lost else "the launcher ended without a word"
    before = read_outcome(run_dir)
    told = Outcome(
        max(newest, int(begun)), Cause.LOST_NODE if lost else Cause.UNKNOWN, int(ExitCode.FAILED),
        step=before.last_step if before else 0, message=message, ended_at=time.time(),
        first_step=_first_step(run_dir, newest), committed_step=_committed_step(run_dir),
    )  # fmt: skip
    write_outcome(run_dir, told)
    return [*outcomes, told]


def _first_step(run_dir: Path, attempt: int) -> int:
    from hp_train.launch.history import read_facts
    from hp_train.launch.run_dir import attempt_dir

    facts = read_facts(attempt_dir(run_dir, attempt))
    return facts.first_step if facts else 0


def _committed_step(run_dir: Path) -> int:
    from hp_train.launch.attempt_end import committed_step

    return committed_step(run_dir)


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
