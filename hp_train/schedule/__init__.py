"""The pipeline schedule as data: built, lowered, proven, drawn, read and written without torch.

The names below load on first use: configuration reads the registry on every start of the command, and most starts need
nothing else of this package.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from hp_train.errors import ScheduleError
from hp_train.schedule.registry import SCHEDULES, check_sizes, derive_stages_per_rank, normalize_schedule_name

if TYPE_CHECKING:
    from hp_train.schedule.builders import build_schedule
    from hp_train.schedule.draw import draw, draw_text
    from hp_train.schedule.lowering import lower, select_transport
    from hp_train.schedule.simulate import Costs, Span, Timeline, simulate
    from hp_train.schedule.sources import open_schedule
    from hp_train.schedule.steps import MetaStep, MetaStepType, Schedule
    from hp_train.schedule.text import load_schedule, save_schedule, schedule_hash
    from hp_train.schedule.verify import TRANSPORTS, StageBuffers, Verification, verify

__all__ = [
    "SCHEDULES",
    "TRANSPORTS",
    "Costs",
    "MetaStep",
    "MetaStepType",
    "Schedule",
    "ScheduleError",
    "Span",
    "StageBuffers",
    "Timeline",
    "Verification",
    "build_schedule",
    "check_sizes",
    "derive_stages_per_rank",
    "draw",
    "draw_text",
    "load_schedule",
    "lower",
    "normalize_schedule_name",
    "open_schedule",
    "save_schedule",
    "schedule_hash",
    "select_transport",
    "simulate",
    "verify",
]

_HOMES = {
    "builders": ("build_schedule",),
    "draw": ("draw", "draw_text"),
    "lowering": ("lower", "select_transport"),
    "simulate": ("Costs", "Span", "Timeline", "simulate"),
    "sources": ("open_schedule",),
    "steps": ("MetaStep", "MetaStepType", "Schedule"),
    "text": ("load_schedule", "save_schedule", "schedule_hash"),
    "verify": ("TRANSPORTS", "StageBuffers", "Verification", "verify"),
}
_HOME_OF_NAME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF_NAME[name]}"), name)
    globals()[name] = value
    return value


class _Package(ModuleType):
    """Binds a submodule that holds a function of its own name (`verify`, ...) as that function.

    The import system sets every imported submodule as an attribute of its package, which would hide the function.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, ModuleType) and name in _HOME_OF_NAME:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
