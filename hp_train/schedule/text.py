"""Schedules as text: one cell a step, one CSV row a rank, blank cells for bubbles.

No torch. The cells are those of the CSV that `torch.distributed.pipelining` writes (`2F0`, `3SEND_F1`, `1UNSHARD`,
`(0F3;3B1)OVERLAP_F_B`), so its files load unchanged; kinds that torch lacks are named in the same style, and sends and
receives on a boundary follow a plus sign: `1F2+(1SEND_F2;1RECV_F3)`. The parser is anchored and strict: whatever is
not exactly a step is an error that names row, column and text.
"""

from __future__ import annotations

import csv
import os
import re
from pathlib import Path

from hp_train.errors import ScheduleError
from hp_train.schedule.steps import FSDP_TYPES, MetaStep, MetaStepType, Schedule

_SINGLE = re.compile(r"(0|[1-9][0-9]{0,8})([A-Z_]+)(0|[1-9][0-9]{0,8})?")
_COMPOSITE = re.compile(r"\(([^()]*)\)([A-Z_]+)")
_BOUNDARY = re.compile(r"(.*)\+\(([^()]*)\)")
_TYPE_OF_TEXT = {kind.value: kind for kind in MetaStepType}
_EXAMPLES = "a step reads like 2F0, 3SEND_F1, 1UNSHARD or (0F3;3B1)OVERLAP_F_B"


def parse_step(text: str) -> MetaStep:
    """The one step that `text` names, surrounding blanks aside. Raises ScheduleError saying what is wrong."""
    if not isinstance(text, str):
        raise ScheduleError(f"{text!r} is no step but {type(text).__name__}; {_EXAMPLES}")
    body, boundary = text.strip(), None
    if match := _BOUNDARY.fullmatch(body):
        body, boundary = match[1], tuple(parse_step(part) for part in match[2].split(";"))
    if match := _SINGLE.fullmatch(body):
        micro_index = None if match[3] is None else int(match[3])
        return MetaStep(micro_index, _parse_type(match[2], text), int(match[1]), None, boundary)
    if match := _COMPOSITE.fullmatch(body):
        subs = tuple(parse_step(part) for part in match[1].split(";"))
        return MetaStep(None, _parse_type(match[2], text), None, subs, boundary)
    raise ScheduleError(f"{text!r} is no step; {_EXAMPLES}")


def _parse_type(token: str, text: str) -> MetaStepType:
    kind = _TYPE_OF_TEXT.get(token)
    if kind is None:
        raise ScheduleError(f"{text!r} is no step: unknown type {token!r}, use one of {', '.join(_TYPE_OF_TEXT)}")
    return kind


def format_schedule(schedule: Schedule) -> str:
    """The CSV text of a schedule, one row a rank."""
    return "".join(",".join(map(str, order)) + "\n" for order in schedule.orders)


def save_schedule(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Write the schedule's CSV to `path`; `load_schedule` reads it back equal.

    Raises ScheduleError for a file that can't be written.
    """
    try:
        Path(path).write_text(format_schedule(schedule), encoding="utf-8")
    except OSError as error:
        raise ScheduleError(f"{path}: can't be written: {error.strerror}") from error


def load_schedule(path: str | os.PathLike[str]) -> Schedule:
    """Read a schedule CSV, of ours or of torch's pipelining.

    Number of stages, their ranks and the number of micro-batches follow from its cells. Raises ScheduleError for a file
    that can't be read, a cell that is no step, a step that stands twice, a stage on two ranks, or numbers with gaps.
    Whether the orders can run is for `verify` to say.
    """
    try:
        content = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ScheduleError(f"{path}: can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{path}: is no text in UTF-8") from error
    except (TypeError, ValueError) as error:  # what is no path at all, or holds a NUL
        raise ScheduleError(f"{path!r} is no path of a schedule file: {error}") from error
    return parse_schedule(content, name=os.fspath(path))


def parse_schedule(content: str, name: str) -> Schedule:
    """`load_schedule` on text; `name` stands in messages for the file."""
    try:
        rows = list(csv.reader(content.splitlines(), strict=True))
    except csv.Error as error:
        raise ScheduleError(f"{name}: is no CSV: {error}") from error
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    if not rows:
        raise ScheduleError(f"{name}: holds no step")
    orders: list[tuple[MetaStep, ...]] = []
    seen: dict[MetaStep, str] = {}
    for row, cells in enumerate(rows, start=1):
        order = []
        for column, cell in enumerate(cells, start=1):
            if cell.strip():
                order.append(_parse_cell(cell, name, f"row {row} column {column}", seen))
        orders.append(tuple(order))
    rank_of_stage, num_microbatches = _placement(orders, name)
    return Schedule(tuple(orders), len(rank_of_stage), rank_of_stage, num_microbatches, name)


def _parse_cell(cell: str, name: str, place: str, seen: dict[MetaStep, str]) -> MetaStep:
    """The step in `cell`; `seen` maps every step met so far to its place and gains this one."""
    try:
        step = parse_step(cell)
    except ScheduleError as error:
        raise ScheduleError(f"{name}: {place}: {error}") from error
    if step.meta_type in FSDP_TYPES:  # a stage may be unsharded and resharded many times
        return step
    singles = step.sub_steps if step.sub_steps else (MetaStep(step.micro_index, step.meta_type, step.stage_index),)
    for single in singles + (step.boundary_p2p or ()):
        if single in seen:
            raise ScheduleError(f"{name}: {place}: {cell.strip()!r} repeats {single}, which stands at {seen[single]}")
        seen[single] = place
    return step


def _placement(orders: list[tuple[MetaStep, ...]], name: str) -> tuple[tuple[int, ...], int]:
    """Rank of each stage and number of micro-batches, read off the compute steps."""
    ranks: dict[int, int] = {}
    micro_indices: set[int] = set()
    for rank, order in enumerate(orders):
        for step in order:
            for part in step.computes:
                micro_indices.add(part.micro_index)
                holder = ranks.setdefault(part.stage_index, rank)
                if holder != rank:
                    raise ScheduleError(f"{name}: stage {part.stage_index} stands on rank {holder} and on rank {rank}")
    if not ranks:
        raise ScheduleError(f"{name}: holds no forward and no backward step")
    for what, numbers in (("stage", ranks), ("micro-batch", micro_indices)):
        if len(numbers) != max(numbers) + 1:
            gap = next(number for number in range(max(numbers)) if number not in numbers)
            raise ScheduleError(f"{name}: {what} {gap} has no step, yet there is a {what} {max(numbers)}")
    return tuple(ranks[stage] for stage in range(len(ranks))), len(micro_indices)


def schedule_hash(schedule: Schedule, transport: str) -> str:
    """SHA-256 (hex) of all that decides what the ranks do; ranks compare it before the first step."""
    import hashlib  # loads OpenSSL, which most starts of the command do without

    head = f"{transport}\n{schedule.num_microbatches}\n{','.join(map(str, schedule.rank_of_stage))}\n"
    return hashlib.sha256((head + format_schedule(schedule)).encode()).hexdigest()
