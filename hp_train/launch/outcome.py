"""How each attempt at a run ended, and why: outcome.json. No torch.

    <run>/outcome.json                  of the last attempt
    <run>/logs/attempt_N/outcome.json   of attempt N

What ended an attempt is one of the classes of `Cause`; whether the run is worth starting again is told from outcomes
alone, so that a scheduler's script and a launcher decide alike. Exit codes of processes in between are not trusted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from hp_train.checkpoint.fence import begun_attempts
from hp_train.errors import ConfigError
from hp_train.launch.files import damaged, read_json, write_json
from hp_train.launch.run_dir import attempt_dir

OUTCOME_FILE = "outcome.json"


class Cause(StrEnum):
    """Why an attempt ended."""

    DONE = "done"  # all steps are taken
    STOPPED = "stopped"  # somebody asked, and everything is saved
    USER_ERROR = "user_error"  # what the user gave is wrong
    OUT_OF_MEMORY = "out_of_memory"  # of a device or of the machine
    DIVERGED = "diverged"  # the loss is finite and yet lost
    NON_FINITE = "non_finite"  # loss or gradient norm is nan or infinite
    COMMUNICATION = "communication"  # a connection broke or a collective did not end, and nobody says why
    LOST_NODE = "lost_node"  # a machine, or the launcher on it, is gone
    PREEMPTED = "preempted"  # the scheduler wanted the machines; everything is saved
    CANCELLED = "cancelled"  # by its owner
    TIME_LIMIT = "time_limit"  # of the allocation; everything is saved
    NO_PROGRESS = "no_progress"  # no step within the limit; or attempts that come no further, see `Outcome.gave_up`
    UNKNOWN = "unknown"  # an error of ours or of the system: the message tells

    @property
    def is_saved(self) -> bool:
        """Say whether the attempt ended by its own will, with its last step saved."""
        return self in (Cause.DONE, Cause.STOPPED, Cause.PREEMPTED, Cause.TIME_LIMIT)


_MAY_RESTART = frozenset({
    Cause.OUT_OF_MEMORY, Cause.COMMUNICATION, Cause.LOST_NODE, Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.NO_PROGRESS,
    Cause.UNKNOWN,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one attempt."""

    attempt: int
    cause: Cause
    exit_code: int  # of the command, were this the last attempt
    step: int  # optimizer step in work when it failed; the last one taken when it ended by its own will
    rank: int | None = None  # that failed first; None where no rank failed
    coordinates: str = ""  # of that rank in the mesh
    phase: str = ""  # what that rank was doing
    message: str = ""
    started_at: float = 0.0  # seconds since the epoch; 0: not known
    ended_at: float = 0.0
    first_step: int = 0  # first optimizer step of this attempt; 0: it came to none
    last_step: int = 0  # last optimizer step taken and recorded, by this attempt or those before it
    committed_step: int = 0  # of the newest complete checkpoint at the end; 0: there is none
    nodes: tuple[str, ...] = ()  # host names, in the order of their ranks
    node: str = ""  # of them, the one where `rank` failed, or that was lost
    gave_up: bool = False  # two attempts brought no new checkpoint, or failed the same way at the same step

    @property
    def may_restart(self) -> bool:
        """Say whether the same run can go further when it is started again by itself."""
        return self.cause in _MAY_RESTART and not self.gave_up


def write_outcome(run_dir: Path, outcome: Outcome) -> None:
    """Say how an attempt ended; each of the two files appears whole or stays as it was.

    What a newer attempt has said of the run stays. Raises OSError where the directory cannot be written.
    """
    values = asdict(outcome)
    attempt_dir(run_dir, outcome.attempt).mkdir(parents=True, exist_ok=True)
    write_json(attempt_dir(run_dir, outcome.attempt) / OUTCOME_FILE, values)
    last = read_outcome(run_dir)
    if last is None or last.attempt <= outcome.attempt:
        write_json(run_dir / OUTCOME_FILE, values)


def read_outcome(run_dir: Path, attempt: int | None = None) -> Outcome | None:
    """Return how the last attempt (or exactly `attempt`) ended; None if it left no word."""
    folder = run_dir if attempt is None else attempt_dir(run_dir, attempt)
    try:
        return _decode(read_json(folder / OUTCOME_FILE))
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise damaged(folder / OUTCOME_FILE, str(error)) from None


def read_outcomes(run_dir: Path) -> tuple[Outcome, ...]:
    """Return the ends of all attempts that left one, in order. A killed launcher leaves none."""
    outcomes = (read_outcome(run_dir, attempt) for attempt in begun_attempts(run_dir))
    return tuple(outcome for outcome in outcomes if outcome is not None)


def _decode(values: dict[str, Any] | None) -> Outcome | None:
    if values is None or "cause" not in values:
        return None
    known = {field.name for field in fields(Outcome)}
    values = {name: value for name, value in values.items() if name in known}
    return Outcome(**{**values, "cause": Cause(values["cause"]), "nodes": tuple(values.get("nodes", ()))})
