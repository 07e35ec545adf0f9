"""Where each rank stands when a run stands still, who of them is missing, and how that is told. No torch.

The stacks come from what faulthandler wrote: the frames of torch.distributed and of our own transfers at its top say
that a rank waits for others, and in what. Ranks that wait nowhere are those that the others wait for.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from hp_train.launch.failures import HUNG_TOGETHER, MOST_RANKS_LISTED, Failure
from hp_train.launch.outcome import Cause
from hp_train.topology import MeshSizes, coordinates_of
from hp_train.training.progress import Phase

_FRAMES_SHOWN = 6
_AT_FILES = (Phase.DATA, Phase.LOAD, Phase.SAVE)  # where a process that does not answer waits for a disk
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)')
_WAITS_IN = re.compile(
    r"torch/distributed/|hp_train/fully_shard/(collectives|reduction|replicated)|"
    r"hp_train/pipeline_parallel/(transport|mailbox)"
)
_SAY_NOTHING = frozenset({"wrapper", "_coalescing_manager", "__exit__", "wait", "inner", "decorate_context"})


@dataclass(frozen=True, slots=True)
class Frame:
    """One call on a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        parts = self.file.split("/")
        known = [index for index, part in enumerate(parts) if part in ("hp_train", "torch")]
        short = "/".join(parts[known[-1] :]) if known else parts[-1]
        return f"{self.function} ({short}:{self.line})"


@dataclass(frozen=True, slots=True)
class Standing:
    """Where one rank was found when its run stood still."""

    rank: int
    step: int
    phase: str
    since_s: float | None  # how long ago it last got on; None if it never noted anything
    frames: tuple[Frame, ...] = ()  # of its main thread, innermost first
    more: str = ""  # the collective in flight and the place in the pipeline's schedule, where it could be asked
    in_flight: bool = False  # whether a collective of its was surely under way, as NCCL's recorder can tell

    @property
    def collective(self) -> str:
        """Return the collective or transfer that it waits in; empty if it waits in none."""
        if not self.frames or not _WAITS_IN.search(self.frames[0].file):
            return ""
        named = (frame.function for frame in self.frames if frame.function not in _SAY_NOTHING)
        return next(named, self.frames[0].function)

    @property
    def stands_alone(self) -> bool:
        """Say whether it is known to be stuck in work of its own, outside of all communication."""
        return not (self.collective or self.in_flight) and (bool(self.frames) or self.phase in _AT_FILES)

    def describe(self) -> str:
        """Return e.g. `step 7, data, in __next__ (hp_train/data/loader.py:85)`."""
        where = f"step {self.step}, {self.phase}" if self.step else self.phase
        if self.collective:
            ours = next((frame for frame in self.frames if "/hp_train/" in frame.file), self.frames[0])
            where += f", waiting in {self.collective}, called from {ours}"
        elif self.frames:
            where += f", in {self.frames[0]}"
        else:
            where += ", says nothing"
        return f"{where}; {self.more}" if self.more else where

    def stack_lines(self) -> list[str]:
        """Return the innermost calls, one line each."""
        return [f"    {frame}" for frame in self.frames[:_FRAMES_SHOWN]]


def missing_ranks(standings: list[Standing]) -> list[int]:
    """Return the ranks that the others wait for: those in no collective, else those that are behind the others.

    Nobody is missing when all wait at the same place: then it is a connection or a device that does not answer.
    """
    busy = [standing.rank for standing in standings if not standing.collective]
    if 0 < len(busy) < len(standings):
        return busy
    phases = tuple(Phase)
    places = {standing.rank: (standing.step, phases.index(standing.phase)) for standing in standings}
    if len(set(places.values())) == 1:
        return busy if len(standings) == 1 else []
    return [rank for rank, place in places.items() if place == min(places.values())]


def hang_cause(standings: list[Standing]) -> Cause:
    """Return what class of end a stand-still is.

    no_progress: a rank that the others wait for (or all of them, or the only one) is found at work of its own, be it
    forward, reading data or saving. communication: those that are waited for are in a collective or transfer, too, or
    do not answer.
    """
    missing = missing_ranks(standings)
    waited_for = [each for each in standings if each.rank in missing] or standings
    alone = len(standings) == 1 and not standings[0].collective
    return Cause.NO_PROGRESS if alone or any(each.stands_alone for each in waited_for) else Cause.COMMUNICATION


def read_main_stack(path: Path) -> tuple[Frame, ...]:
    """Return the main thread's stack in what faulthandler wrote, innermost call first; empty if there is none.

    faulthandler lists the newest thread first, so the main thread comes last.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ()
    blocks = re.split(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*$", text, flags=re.MULTILINE)
    matches = (_FRAME.fullmatch(line) for line in blocks[-1].splitlines())
    return tuple(Frame(match["file"], int(match["line"]), match["function"]) for match in matches if match)


def hang_failure(standings: list[Standing], stood_still_s: float, sizes: MeshSizes) -> Failure:
    """Return the account of a run that stood still: of the first rank that the others wait for, if there is one."""
    missing = missing_ranks(standings)
    cause = next((each for each in standings if each.rank in missing), standings[0])
    others = [each for each in standings if each.rank not in missing]
    message = f"no rank has come further for {stood_still_s:.0f} s; this one stands at {cause.describe()}"
    if missing and others:
        message += f"; {_ranks_text(missing)} missing, {_ranks_text([each.rank for each in others], 'wait')}"
    elif others:
        message += "; no rank is missing: all stand there"
    notes = []
    for each in standings[:MOST_RANKS_LISTED]:
        notes.append(f"rank {each.rank} ({coordinates_of(each.rank, sizes).describe()}): {each.describe()}")
        notes.extend(each.stack_lines())
    notes.append("the stacks of all threads are in stacks.txt of each rank")
    return Failure(
        cause.rank, time.time_ns(), "" if missing else HUNG_TOGETHER, message, "",
        coordinates_of(cause.rank, sizes).describe(), cause.step, cause.phase, tuple(notes),
    )  # fmt: skip


def _ranks_text(ranks: list[int], verb: str = "") -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    if len(ranks) == 1:
        return f"rank {shown} {verb + 's' if verb else 'is'}"
    return f"ranks {shown} {verb or 'are'}"
