"""What can go wrong and how the command ends: exception types, each with its exit code.

Ground floor: imports nothing of ours and never torch. A person's mistake is a ConfigError (one line a fault,
exit 2, no traceback); a mistake of ours is an assert or any other exception (traceback, exit 1).
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """How `hp-train` ends; a scheduler decides by these whether to requeue."""

    DONE = 0
    FAILED = 1  # a fault of the system
    USER_ERROR = 2  # a fault in what the user gave
    DIVERGED = 3  # loss or gradient norm not finite: do not requeue
    REQUEUE = 75  # stopped by a signal with everything saved
    INTERRUPTED = 130  # stopped by Ctrl-C with everything saved


class HpTrainError(Exception):
    """Base of the exceptions that end the command with one line instead of a traceback."""

    exit_code: ExitCode = ExitCode.FAILED


class ConfigError(HpTrainError, ValueError):
    """What the user gave is wrong. `messages` holds one line per fault, all that were found."""

    exit_code = ExitCode.USER_ERROR

    def __init__(self, *messages: str) -> None:
        assert messages, "a ConfigError says what is wrong"
        super().__init__("\n".join(messages))
        self.messages: tuple[str, ...] = messages


class ScheduleError(ConfigError):
    """A pipeline schedule (or its text) is malformed or was refused by the proof."""


class UnrunnableScheduleError(ScheduleError):
    """The compute steps of a schedule can't run in their orders; `why` says what holds them up."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")
        self.why = why


class DivergedError(HpTrainError):
    """The loss is beyond hope: more steps, or the same again, would not help."""

    exit_code = ExitCode.DIVERGED


class NonFiniteError(DivergedError):
    """Loss or gradient norm is nan or infinite; raised before the optimizer step."""


class CheckpointError(HpTrainError):
    """A checkpoint could not be written, or one that was asked for cannot be read."""


class SupersededError(HpTrainError):
    """A newer attempt has taken over the run directory; whoever sees this stops without writing."""
