"""Where a schedule comes from: a built-in name, a CSV file, or a builder function of a person's own.

No torch. `pkg.mod:builder` imports and calls code, so it is for whoever types the command; configuration files may name
built-in schedules and files only.
"""

from __future__ import annotations

import importlib
import os
import re
import sys

from hp_train.errors import ScheduleError
from hp_train.schedule.builders import build_schedule
from hp_train.schedule.registry import normalize_schedule_name
from hp_train.schedule.steps import MetaStep, Schedule
from hp_train.schedule.text import load_schedule

FILE_PREFIX = "file:"
_BUILDER = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")


def open_schedule(
    source: str,
    pp_size: int | None = None,
    num_microbatches: int | None = None,
    stages_per_rank: int | None = None,
    *,
    allow_code: bool = False,
) -> Schedule:
    """The schedule that `source` names: built-in, `PATH.csv` or `file:PATH`, or `pkg.mod:builder` with allow_code.

    A builder is called with (pp_size, num_microbatches, stages_per_rank) and returns a Schedule. A name or a builder
    covers all sizes and needs the first two; a file covers its own only, so sizes given must be equal to those.
    Raises ScheduleError for what can't be found, read or built, and for sizes that are missing or not the file's.
    """
    if source.startswith(FILE_PREFIX) or source.endswith(".csv") or os.sep in source:
        schedule = load_schedule(source.removeprefix(FILE_PREFIX))
        _check_file_sizes(schedule, pp_size, num_microbatches, stages_per_rank)
        return schedule
    builder = _BUILDER.fullmatch(source)
    if builder is None:
        normalize_schedule_name(source)  # a name that is unknown is so whatever the sizes
    if pp_size is None or num_microbatches is None:
        raise ScheduleError(f"{source}: needs a number of ranks (--pp) and of micro-batches (--microbatches)")
    if builder is not None:
        if not allow_code:
            raise ScheduleError(f"{source}: a builder can't be named here; save its schedule and use {FILE_PREFIX}PATH")
        return _call_builder(builder[1], builder[2], pp_size, num_microbatches, stages_per_rank)
    return build_schedule(source, pp_size, num_microbatches, stages_per_rank)


def _check_file_sizes(
    schedule: Schedule, pp_size: int | None, num_microbatches: int | None, stages_per_rank: int | None
) -> None:
    stages = {len(schedule.stages_of_rank(rank)) for rank in range(schedule.pp_size)}
    asked = (
        ("ranks", pp_size, {schedule.pp_size}),
        ("micro-batches", num_microbatches, {schedule.num_microbatches}),
        ("stages a rank", stages_per_rank, stages),
    )
    for what, wanted, own in asked:
        if wanted is not None and {wanted} != own:
            has = " or ".join(map(str, sorted(own)))
            raise ScheduleError(
                f"{schedule.name}: is written for {has} {what}, not {wanted}; a file covers no other number"
            )


def _call_builder(
    module: str, function: str, pp_size: int, num_microbatches: int, stages_per_rank: int | None
) -> Schedule:
    where = f"{module}:{function}"
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a console script's path lacks the directory it is run from
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        raise ScheduleError(f"{where}: can't be imported: {error}") from error
    except (Exception, SystemExit) as error:  # a module of a person's own may fail in any way
        raise ScheduleError(f"{where}: can't be imported: {_told(error)}") from error
    builder = getattr(loaded, function, None)
    if not callable(builder):
        raise ScheduleError(f"{where}: module {module} has no function {function}")
    call = f"{function}({pp_size}, {num_microbatches}, {stages_per_rank})"
    try:
        schedule = builder(pp_size, num_microbatches, stages_per_rank)
    except ScheduleError:
        raise
    except (Exception, SystemExit) as error:  # as may their builder, or whatever else was named in its place
        raise ScheduleError(
            f"{where}: {call} raised {_told(error)}; a builder takes (pp_size, num_microbatches, stages_per_rank)"
        ) from error
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"{where}: returned {type(schedule).__name__}, not a Schedule")
    _check_form(schedule, where)
    return schedule


def _told(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _check_form(schedule: Schedule, where: str) -> None:
    """Raise ScheduleError unless the fields have the types that `Schedule` declares; their sense is `verify`'s part."""
    if not isinstance(schedule.orders, tuple) or not all(isinstance(order, tuple) for order in schedule.orders):
        raise ScheduleError(f"{where}: returned a Schedule whose orders are no tuple of tuples of MetaSteps")
    for rank, order in enumerate(schedule.orders):
        for position, step in enumerate(order):
            if not isinstance(step, MetaStep):
                raise ScheduleError(
                    f"{where}: returned a Schedule whose rank {rank} has {step!r} at step {position}, no MetaStep"
                )
    for name in ("num_stages", "num_microbatches"):
        if type(getattr(schedule, name)) is not int:
            raise ScheduleError(f"{where}: returned a Schedule with {name}={getattr(schedule, name)!r}, no integer")
    ranks = schedule.rank_of_stage
    if not isinstance(ranks, tuple) or not all(type(rank) is int for rank in ranks):
        raise ScheduleError(f"{where}: returned a Schedule with rank_of_stage={ranks!r}, no tuple of integers")
