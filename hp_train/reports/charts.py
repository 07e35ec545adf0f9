"""Line charts as inline SVG: axes with round ticks, a line a series, the points for the page's hover. Pure. No torch.

Colours are CSS variables of the page, so that one picture reads on light and on dark. Long series are thinned so that
every peak and valley stays: of each run of steps the lowest and the highest value are kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 26
_MOST_POINTS = 1200  # of one line: two for each pixel

Point = tuple[int, float]  # step, value


@dataclass(frozen=True, slots=True)
class Series:
    """One line: its name in the legend and the values that are known, in the order of steps."""

    name: str
    points: tuple[Point, ...]

    @classmethod
    def of(cls, name: str, points: list[tuple[int, float | None]]) -> Series:
        """Return the series of those points that have a finite value."""
        return cls(name, tuple((x, y) for x, y in points if y is not None and math.isfinite(y)))


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over the steps that share one axis of values."""

    title: str
    series: tuple[Series, ...]
    write: Callable[[float], str]  # a value as it stands on the axis and in the hover

    @property
    def has_points(self) -> bool:
        """Say whether there is anything to draw."""
        return any(series.points for series in self.series)


def draw_chart(chart: Chart) -> str:
    """Return a figure with the title, the SVG and its points as JSON. The chart must have points."""
    drawn = [Series(series.name, thinned(series.points)) for series in chart.series if series.points]
    assert drawn, f"{chart.title}: nothing to draw"
    xs = [x for series in drawn for x, _ in series.points]
    ys = [y for series in drawn for _, y in series.points]
    x_axis = _Axis(min(xs), max(xs), _LEFT, WIDTH - _RIGHT)
    ticks = round_ticks(min(ys), max(ys), 5)
    y_axis = _Axis(min(ticks[0], *ys), max(ticks[-1], *ys), HEIGHT - _BOTTOM, _TOP)
    parts = [*_grid(ticks, y_axis, chart.write), *_steps(x_axis)]
    for number, series in enumerate(drawn, 1):
        parts.append(_line(series, x_axis, y_axis, number))
    legend = "".join(
        f'<span class="key s{number}">{escape(series.name)}</span>' for number, series in enumerate(drawn, 1)
    )
    data = {
        "left": _LEFT, "right": WIDTH - _RIGHT,
        "x": [x_axis.low, x_axis.high],
        "series": [
            [series.name, [[x, round(y_axis.at(y), 1), chart.write(y)] for x, y in series.points]] for series in drawn
        ],
    }  # fmt: skip
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<figure class="chart"><figcaption>{escape(chart.title)} {legend}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)} over the steps">'
        f'{"".join(parts)}<line class="cursor" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/></svg>'
        f'<div class="tip"></div><script type="application/json">{text}</script></figure>'
    )


@dataclass(frozen=True, slots=True)
class _Axis:
    """Maps values to pixels; a single value stands in the middle."""

    low: float
    high: float
    first_pixel: float
    last_pixel: float

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.first_pixel + share * (self.last_pixel - self.first_pixel)


def round_ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most `most` + 1 round numbers that span `low` to `high`: multiples of 1, 2 or 5 x a power of ten."""
    if not high > low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (power, 2 * power, 5 * power, 10 * power, 20 * power):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first <= most:
            break
    digits = max(0, 2 - math.floor(math.log10(step)))
    return [round(number * step, digits) for number in range(first, last + 1)]


def thinned(points: tuple[Point, ...], most: int = _MOST_POINTS) -> tuple[Point, ...]:
    """Return at most `most` of `points`: the lowest and the highest of each stretch, and both ends."""
    if len(points) <= most:
        return points
    kept = {0, len(points) - 1}
    stretches = (most - 2) // 2
    for number in range(stretches):
        indices = range(number * len(points) // stretches, (number + 1) * len(points) // stretches)
        kept.add(min(indices, key=lambda index: points[index][1]))
        kept.add(max(indices, key=lambda index: points[index][1]))
    return tuple(points[index] for index in sorted(kept))


def _grid(ticks: list[float], axis: _Axis, write: Callable[[float], str]) -> list[str]:
    parts = []
    for tick in ticks:
        y = axis.at(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{escape(write(tick))}</text>'
        )
    return parts


def _steps(axis: _Axis) -> list[str]:
    ticks = [
        tick for tick in round_ticks(axis.low, axis.high, 6) if axis.low <= tick <= axis.high and tick == int(tick)
    ]
    y = HEIGHT - 8
    return [
        f'<text class="tick" x="{axis.at(tick):.1f}" y="{y}" text-anchor="middle">{int(tick):,}</text>'
        for tick in ticks
    ]


def _line(series: Series, x_axis: _Axis, y_axis: _Axis, number: int) -> str:
    places = [(x_axis.at(x), y_axis.at(y)) for x, y in series.points]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    dots = ""
    if len(places) <= 40:  # few points: each is seen, and a single one is seen at all
        dots = "".join(f'<circle class="s{number}" cx="{x:.1f}" cy="{y:.1f}" r="2.2"/>' for x, y in places)
    return f'<path class="line s{number}" d="{path}"/>{dots}'
