"""Durations as people type them: `90m`, `12h`, `1h30m`, `24:00:00`, `1-00:00:00`. No torch.

A bare number is refused: SLURM reads it as minutes, most other tools as seconds. Two fields (`10:00`) are refused for
the same reason: SLURM reads minutes and seconds, people hours and minutes.
"""

from __future__ import annotations

import re

FORMS = "a time such as 90m, 12h, 1h30m, 24:00:00 or 1-00:00:00"

_UNITS_S = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_WITH_UNITS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)")


def parse_duration(text: str) -> int:
    """Return the seconds that `text` says, at least 1. Raises ValueError that says what is wrong after `key=text`."""
    clock = _CLOCK.fullmatch(text)
    units = _WITH_UNITS.fullmatch(text) if text else None
    found = clock or units
    if found is None:
        if re.fullmatch(r"\d+(\.\d+)?", text):
            raise ValueError(f"has no unit; use {FORMS}")
        raise ValueError(f"is not {FORMS}")
    seconds = sum(int(part or 0) * size for part, size in zip(found.groups(), _UNITS_S.values(), strict=True))
    if seconds == 0:
        raise ValueError(f"is no time at all; use {FORMS}")
    return seconds


def clock_text(seconds: int) -> str:
    """Return a duration as SLURM writes it: `24:00:00`, `1-12:30:00` from the second day on."""
    days, rest = divmod(seconds, 86_400)
    if days == 1 and rest == 0:
        days, rest = 0, 86_400
    hours, rest = divmod(rest, 3_600)
    return f"{f'{days}-' if days else ''}{hours:02d}:{rest // 60:02d}:{rest % 60:02d}"
