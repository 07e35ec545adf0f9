"""What a worker knows of its run while it trains: where it stands, who asked it to stop, what it is doing.

The worker entry fills it in, the trainer reads `stop` and writes `progress`, the failure report reads `progress`.
No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hp_train.errors import ExitCode
from hp_train.training.progress import Phase, Progress

__all__ = ["Phase", "Progress", "RunContext", "StopRequest", "TrainOutcome"]


@dataclass(slots=True)
class StopRequest:
    """Set by a signal handler, read by the trainer between steps; all ranks then agree on the step."""

    signal_number: int = 0  # 0: nobody asked


@dataclass(slots=True)
class RunContext:
    """One worker's share of one attempt at a run."""

    run_dir: Path
    attempt: int  # counted from 1, one more with every start, resume or restart
    rank: int
    local_rank: int
    world_size: int
    recipe: str = ""
    stop: StopRequest = field(default_factory=StopRequest)
    progress: Progress = field(default_factory=Progress)

    @property
    def attempt_dir(self) -> Path:
        """Return the folder of this attempt's logs."""
        return self.run_dir / "logs" / f"attempt_{self.attempt}"


@dataclass(frozen=True, slots=True)
class TrainOutcome:
    """How a worker's training ended when nothing went wrong."""

    exit_code: ExitCode  # DONE, REQUEUE or INTERRUPTED
    step: int  # last optimizer step taken
