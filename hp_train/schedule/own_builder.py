"""Calls a builder of a person's own, and makes whatever goes wrong in it one line. No torch, unless it is theirs."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

from hp_train.errors import ScheduleError
from hp_train.registry import Builder
from hp_train.schedule.steps import Schedule
from hp_train.schedule.verify import shape_fault

_SIZES = ("pp_size", "num_microbatches", "stages_per_rank")


def call_builder(
    where: str,
    builder: Builder,
    pp_size: int,
    num_microbatches: int,
    stages_per_rank: int | None,
    *,
    own: tuple[Any, ...] = (),
) -> Schedule:
    """Return what `builder(*own, pp_size, num_microbatches, stages_per_rank)` does; it may be `pkg.mod:function`.

    where: what to call it in messages.
    Raises ScheduleError when it can't be imported or called, or returns anything but a Schedule.
    """
    function = _imported(where, builder) if isinstance(builder, str) else builder
    sizes = (pp_size, num_microbatches, stages_per_rank)
    try:
        schedule = function(*own, *sizes)
    except ScheduleError:
        raise
    except (Exception, SystemExit) as error:  # a function of a person's own may fail in any way
        call = f"{getattr(function, '__name__', function)}({', '.join(map(repr, (*own, *sizes)))})"
        takes = ", ".join(("own",) * len(own) + _SIZES)
        raise ScheduleError(f"{where}: {call} raised {_told(error)}; a builder takes ({takes})") from error
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"{where}: returned {type(schedule).__name__}, not a Schedule")
    _check_form(schedule, where)
    return replace(schedule, name=where)


def _imported(where: str, builder: str) -> Any:
    module, _, name = builder.partition(":")
    try:
        loaded = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # as may their module
        told = error if isinstance(error, ImportError) else _told(error)
        raise ScheduleError(f"{where}: can't be imported: {told}") from error
    function = getattr(loaded, name, None)
    if not callable(function):
        raise ScheduleError(f"{where}: module {module} has no function {name}")
    return function


def _told(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _check_form(schedule: Schedule, where: str) -> None:
    """Raise ScheduleError unless the fields have the types that `Schedule` declares and its sizes fit together."""
    if not isinstance(schedule.orders, tuple) or not all(isinstance(order, tuple) for order in schedule.orders):
        raise ScheduleError(f"{where}: returned a Schedule whose orders are no tuple of tuples of MetaSteps")
    for name in ("num_stages", "num_microbatches"):
        if type(getattr(schedule, name)) is not int:
            raise ScheduleError(f"{where}: returned a Schedule with {name}={getattr(schedule, name)!r}, no integer")
    ranks = schedule.rank_of_stage
    if not isinstance(ranks, tuple) or not all(type(rank) is int for rank in ranks):
        raise ScheduleError(f"{where}: returned a Schedule with rank_of_stage={ranks!r}, no tuple of integers")
    fault = shape_fault(schedule)
    if fault is not None:
        raise ScheduleError(f"{where}: returned a Schedule that is none: {fault}")
