"""Durations: what is read, what is refused and why."""

from __future__ import annotations

import pytest

from hp_train.config.durations import clock_text, parse_duration


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("30s", 30),
        ("90m", 5_400),
        ("12h", 43_200),
        ("2d", 172_800),
        ("1h30m", 5_400),
        ("1d12h", 129_600),
        ("24:00:00", 86_400),
        ("100:00:00", 360_000),
        ("00:00:10", 10),
        ("1-00:00:00", 86_400),
        ("2-03:04:05", 183_845),
    ],
)
def test_durations_that_are_read(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text, reason",
    [
        ("90", "has no unit"),
        ("1.5", "has no unit"),
        ("86400", "has no unit"),
        ("", "is not a time"),
        ("0s", "no time"),
        ("00:00:00", "no time"),
        ("10:00", "is not a time"),
        ("1-00", "is not a time"),
        ("1:60:00", "is not a time"),
        ("-5m", "is not a time"),
        ("5 m", "is not a time"),
        ("30m1h", "is not a time"),
        ("12H", "is not a time"),
        ("1h;rm", "is not a time"),
        ("1.5h", "is not a time"),
        ("24:00:00\n", "is not a time"),
    ],
)
def test_durations_that_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_duration(text)


@pytest.mark.parametrize("seconds, text", [(10, "00:00:10"), (86_400, "24:00:00"), (90_061, "1-01:01:01")])
def test_clock_text_is_read_back(seconds: int, text: str) -> None:
    assert clock_text(seconds) == text
    assert parse_duration(text) == seconds
