"""Learning-rate curves against their closed forms."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_train.config.schema import LrSchedulerSection
from hp_train.training.lr_schedule import learning_rate

PEAK = 3e-4
NAMES = ("cosine", "wsd", "linear", "constant")


def curve(steps: int, **fields: object) -> list[float]:
    config = LrSchedulerSection(**fields)
    return [learning_rate(step, config, PEAK, steps) for step in range(1, steps + 1)]


@pytest.mark.parametrize("name", NAMES)
def test_warm_up_rises_linearly_to_the_peak_and_starts_above_zero(name: str) -> None:
    rates = curve(100, name=name, warmup_steps=10)
    assert rates[:10] == pytest.approx([PEAK * step / 10 for step in range(1, 11)], rel=1e-12)
    assert rates[9] == PEAK == max(rates)


def test_cosine() -> None:
    rates = curve(110, name="cosine", warmup_steps=10, min_lr_ratio=0.2)
    expected = [PEAK * (0.2 + 0.4 * (1 + math.cos(math.pi * done / 100))) for done in range(101)]
    assert rates[9:] == pytest.approx(expected, rel=1e-12)


def test_linear() -> None:
    rates = curve(110, name="linear", warmup_steps=10, min_lr_ratio=0.2)
    assert rates[9:] == pytest.approx([PEAK * (1 - 0.8 * done / 100) for done in range(101)], rel=1e-12)


def test_wsd_stays_at_the_peak_and_falls_over_the_last_fifth() -> None:
    rates = curve(100, name="wsd", warmup_steps=10, min_lr_ratio=0.1)
    assert rates[9:80] == [PEAK] * 71
    assert rates[80:] == pytest.approx([PEAK * (1 - 0.9 * done / 20) for done in range(1, 21)], rel=1e-12)


def test_constant() -> None:
    assert curve(50, name="constant", warmup_steps=5)[4:] == [PEAK] * 46


@pytest.mark.parametrize("name", ["cosine", "wsd", "linear"])
@pytest.mark.parametrize("warmup_steps", [0, 7])
def test_the_last_step_reaches_the_floor_and_later_ones_stay(name: str, warmup_steps: int) -> None:
    for floor in (0.0, 0.1, 1.0):
        config = LrSchedulerSection(name=name, warmup_steps=warmup_steps, min_lr_ratio=floor, total_steps=40)
        for step in (40, 41, 10_000):
            assert learning_rate(step, config, PEAK, max_steps=10_000) == pytest.approx(PEAK * floor, abs=1e-20)


def test_total_steps_fix_the_curve_whatever_the_run_length() -> None:
    config = LrSchedulerSection(name="cosine", warmup_steps=3, total_steps=10)
    short = [learning_rate(step, config, PEAK, 5) for step in range(1, 6)]
    assert short == curve(10, name="cosine", warmup_steps=3)[:5]


@settings(deadline=None)  # a busy machine is no fault of the curve
@given(
    name=st.sampled_from(NAMES),
    steps=st.integers(1, 400),
    warmup_steps=st.integers(0, 500),
    floor=st.floats(1e-3, 1),
)
def test_every_curve_stays_positive_below_the_peak_and_falls_after_warm_up(
    name: str, steps: int, warmup_steps: int, floor: float
) -> None:
    rates = curve(steps, name=name, warmup_steps=warmup_steps, min_lr_ratio=floor)
    assert all(0 < rate <= PEAK for rate in rates)
    after = rates[warmup_steps:]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in zip(after, after[1:], strict=False))
    assert all(rate >= PEAK * floor * (1 - 1e-12) for rate in after)


def test_step_zero_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="counted from 1"):
        learning_rate(0, LrSchedulerSection(), PEAK, 10)
