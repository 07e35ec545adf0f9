"""Where a schedule comes from: a name, built in or a plugin's, a CSV file, or a builder function of a person's own.

No torch. `pkg.mod:builder` imports and calls code, so it is for whoever types the command; configuration files may name
built-in schedules, those of plugins that were loaded, and files only.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from hp_train import registry
from hp_train.errors import ScheduleError
from hp_train.schedule.builders import build_schedule
from hp_train.schedule.own_builder import call_builder
from hp_train.schedule.registry import normalize_schedule_name
from hp_train.schedule.steps import Schedule
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
    settings: Any = None,
) -> Schedule:
    """The schedule that `source` names: a name, `PATH.csv` or `file:PATH`, or `pkg.mod:builder` with allow_code.

    A builder is called with (pp_size, num_microbatches, stages_per_rank) and returns a Schedule. A name or a builder
    covers all sizes and needs the first two; a file covers its own only, so sizes given must be equal to those.
    settings: those of a plugin's schedule, None for its defaults.
    Raises ScheduleError for what can't be found, read or built, and for sizes that are missing or not the file's.
    """
    if source.startswith(FILE_PREFIX) or source.endswith(".csv") or os.sep in source:
        path = source.removeprefix(FILE_PREFIX)
        if not path:
            raise ScheduleError(f"{source}: names no file; write {FILE_PREFIX}PATH")
        schedule = load_schedule(path)
        _check_file_sizes(schedule, pp_size, num_microbatches, stages_per_rank)
        return schedule
    code = _BUILDER.fullmatch(source)
    name = normalize_schedule_name(source) if code is None else None  # an unknown name is so whatever the sizes
    if pp_size is None or num_microbatches is None:
        raise ScheduleError(f"{source}: needs a number of ranks (--pp) and of micro-batches (--microbatches)")
    if code is not None:
        if not allow_code:
            raise ScheduleError(f"{source}: a builder can't be named here; save its schedule and use {FILE_PREFIX}PATH")
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # a console script's path lacks the directory it is run from
        schedule = call_builder(source, source, pp_size, num_microbatches, stages_per_rank)
        _check_built_sizes(schedule, source, pp_size, num_microbatches, stages_per_rank)
        return schedule
    component = registry.find("pp_schedule", name)
    if component is None:
        return build_schedule(name, pp_size, num_microbatches, stages_per_rank)
    if settings is None and component.config is not None:
        settings = component.config()
    stages_per_rank = stages_per_rank or component.stages_per_rank
    schedule = call_builder(name, component.build, pp_size, num_microbatches, stages_per_rank, own=(settings,))
    _check_built_sizes(schedule, name, pp_size, num_microbatches, stages_per_rank)
    return schedule


def _check_built_sizes(
    schedule: Schedule, where: str, pp_size: int, num_microbatches: int, stages_per_rank: int | None
) -> None:
    """Raise ScheduleError unless a builder has kept to the sizes that it was asked for; None leaves it the choice."""
    held = sorted({len(schedule.stages_of_rank(rank)) for rank in range(schedule.pp_size)})
    for what, wanted, built in (
        ("ranks", pp_size, [schedule.pp_size]),
        ("micro-batches", num_microbatches, [schedule.num_microbatches]),
        ("stages a rank", stages_per_rank, held),
    ):
        if wanted is not None and built != [wanted]:
            told = " or ".join(map(str, built))
            raise ScheduleError(f"{where}: returned a Schedule of {told} {what} where {wanted} were asked for")


def _check_file_sizes(
    schedule: Schedule, pp_size: int | None, num_microbatches: int | None, stages_per_rank: int | None
) -> None:
    stages = {len(schedule.stages_of_rank(rank)) for rank in range(schedule.pp_size)}
    asked = (
        ("rank", "ranks", pp_size, {schedule.pp_size}),
        ("micro-batch", "micro-batches", num_microbatches, {schedule.num_microbatches}),
        ("stage a rank", "stages a rank", stages_per_rank, stages),
    )
    for singular, plural, wanted, own in asked:
        if wanted is not None and {wanted} != own:
            has = " or ".join(map(str, sorted(own)))
            what = singular if own == {1} else plural
            raise ScheduleError(
                f"{schedule.name}: is written for {has} {what}, not {wanted}; a file covers no other number"
            )
