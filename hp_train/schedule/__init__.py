"""The pipeline schedule as data: built, lowered, proven, drawn, read and written without torch."""

from __future__ import annotations

from hp_train.errors import ScheduleError
from hp_train.schedule.builders import build_schedule
from hp_train.schedule.draw import draw, draw_text
from hp_train.schedule.lowering import lower, select_transport
from hp_train.schedule.registry import SCHEDULES, check_sizes, derive_stages_per_rank, normalize_schedule_name
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
