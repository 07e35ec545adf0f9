"""Pictures of a timeline: a PNG or SVG file (`draw`), or text for a terminal (`draw_text`).

No torch; matplotlib is imported by `draw` alone. Ranks are rows, time runs to the right, each box is a forward or
backward step with its micro-batch number. Simulated and measured timelines are drawn alike; waiting in sends and
receives, which only measured ones have, is a thin grey line.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from hp_train.errors import ScheduleError
from hp_train.schedule.simulate import Number, Span, Timeline
from hp_train.schedule.steps import MetaStep, MetaStepType

_T = MetaStepType
_KINDS = {_T.FWD: "forward", _T.BWD: "backward", _T.BWD_INPUT: "input gradient", _T.BWD_WEIGHT: "weight gradient"}
# Two shades a kind: a rank's first stage and its later ones. Chosen to differ in lightness, for those who see no hue.
_COLOURS = {
    _T.FWD: ("#3d6fb6", "#9dbce4"),
    _T.BWD: ("#3f8f5b", "#a3d3b3"),
    _T.BWD_INPUT: ("#2a9d9a", "#98d8d5"),
    _T.BWD_WEIGHT: ("#d98b2b", "#f2cb94"),
}
_OTHER_COLOUR = "#9a9a9a"
_STYLES = {
    _T.FWD: "white on blue",
    _T.BWD: "black on green",
    _T.BWD_INPUT: "black on cyan",
    _T.BWD_WEIGHT: "black on yellow",
}
_SUFFIXES = (".png", ".svg")


@dataclass(frozen=True, slots=True)
class _Box:
    """A compute step to draw: its place in time and, for the two parts of an OVERLAP step, its share of the row."""

    part: MetaStep
    rank: int
    start: Number
    width: Number
    bottom: float  # 0 to 1 within the row
    height: float
    is_later_stage: bool


def caption(timeline: Timeline) -> str:
    """One line: ranks, time, bubble, and the most activations alive per rank."""
    peaks = timeline.peak_activations
    held = f"{peaks[0]} on every rank" if len(set(peaks)) == 1 else f"{max(peaks, default=0)} ({_abridged(peaks)})"
    time = f"{float(timeline.total_s):.4g} {timeline.unit}".rstrip()
    return (
        f"{timeline.name}: {len(timeline.spans)} ranks, time {time}, "
        f"bubble {100 * timeline.bubble_fraction:.1f} %, peak activations {held}"
    )


def _abridged(peaks: tuple[int, ...]) -> str:
    texts = list(map(str, peaks))
    return " ".join(texts if len(texts) <= 8 else [*texts[:4], "...", *texts[-3:]])


def draw(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Draw `timeline` into the file `path`, PNG or SVG by its suffix.

    Raises ScheduleError for another suffix, an empty timeline, times beyond 1e-100 to 1e100, a file that can't be
    written, or a missing matplotlib.
    """
    path = Path(path)
    if path.suffix.lower() not in _SUFFIXES:
        raise ScheduleError(f"{path}: a picture's name ends in {' or '.join(_SUFFIXES)}")
    if timeline.total_s <= 0:
        raise ScheduleError(f"{timeline.name}: nothing to draw, no step takes time")
    _check_times(timeline)
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter
    except ImportError as error:
        raise ScheduleError("drawing needs matplotlib; install hp-train[plots]") from error
    boxes = _boxes(timeline)
    total, num_ranks = float(timeline.total_s), len(timeline.spans)
    shortest = min((float(box.width) for box in boxes if box.width > 0), default=total)
    width_in = min(40.0, max(8.0, 0.22 * total / shortest))
    figure = Figure(figsize=(width_in, 1.3 + 0.34 * num_ranks), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _add_boxes(axes, timeline, boxes)
    axes.set_xlim(0, total)
    axes.set_ylim(num_ranks, 0)
    if timeline.unit:
        axes.xaxis.set_major_formatter(EngFormatter(timeline.unit))
    axes.set_yticks([rank + 0.5 for rank in _ticks(num_ranks)], [f"rank {rank}" for rank in _ticks(num_ranks)])
    axes.tick_params(length=0, labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_title(caption(timeline), fontsize=9, loc="left")
    if boxes:
        figure.legend(loc="outside lower left", ncols=int(width_in / 1.7), frameon=False, fontsize=8)
    figure.draw_without_rendering()  # only now the axes have their place, and boxes a size
    _add_labels(axes, boxes, points_per_time=72 * axes.get_window_extent().width / figure.dpi / total)
    try:
        with matplotlib.rc_context({"svg.hashsalt": "hp-train", "svg.fonttype": "none"}):
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise ScheduleError(f"{path}: can't be written: {error.strerror}") from error


def _check_times(timeline: Timeline) -> None:
    """Raise ScheduleError for times that leave nothing of the others on one axis, or are no numbers."""
    if timeline.total_s > 0 and not 1e-100 < timeline.total_s < 1e100:
        raise ScheduleError(
            f"{timeline.name}: takes {float(timeline.total_s):.4g} in all, too little or too much to draw"
        )


def _ticks(num_ranks: int) -> range:
    return range(0, num_ranks, max(1, num_ranks // 16))


def _boxes(timeline: Timeline) -> list[_Box]:
    """All compute steps as boxes, times counted from the timeline's start."""
    first_stage: dict[int, int] = {}
    boxes = []
    for row in timeline.spans:
        for span in row:
            parts = span.step.computes
            for index, part in enumerate(parts):
                first_stage.setdefault(span.rank, part.stage_index)
                boxes.append(
                    _Box(
                        part=part,
                        rank=span.rank,
                        start=span.start_s - timeline.start_s,
                        width=span.end_s - span.start_s,
                        bottom=0.06 + 0.88 * index / len(parts),
                        height=0.88 / len(parts),
                        is_later_stage=part.stage_index != first_stage[span.rank],
                    )
                )
    return boxes


def _add_boxes(axes: object, timeline: Timeline, boxes: list[_Box]) -> None:
    """One collection for each colour and height, whatever the number of boxes."""
    waits: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for row in timeline.spans:
        for span in row:
            if not span.step.computes and span.end_s > span.start_s:
                waits[span.rank].append((float(span.start_s - timeline.start_s), float(span.end_s - span.start_s)))
    for number, (rank, spans) in enumerate(waits.items()):
        axes.broken_barh(
            spans, (rank + 0.46, 0.08), facecolor=_OTHER_COLOUR, label=None if number else "waiting, moving"
        )
    rows: dict[tuple[MetaStepType, bool, int, float, float], list[tuple[float, float]]] = defaultdict(list)
    for box in sorted(boxes, key=lambda box: (list(_KINDS).index(box.part.meta_type), box.is_later_stage)):
        rows[box.part.meta_type, box.is_later_stage, box.rank, box.bottom, box.height].append(
            (float(box.start), float(box.width))
        )
    labelled = set()
    for (kind, is_later, rank, bottom, height), spans in rows.items():
        label = _KINDS[kind] + (", later stage" if is_later else "")
        axes.broken_barh(
            spans,
            (rank + bottom, height),
            facecolor=_COLOURS[kind][is_later],
            edgecolor="white",
            linewidth=0.4,
            label=None if label in labelled else label,
        )
        labelled.add(label)


def _add_labels(axes: object, boxes: list[_Box], points_per_time: float) -> None:
    """Micro-batch numbers, where they fit."""
    for box in boxes:
        text = str(box.part.micro_index)
        size = min(8.0, 15 * box.height, 0.85 * float(box.width) * points_per_time / (0.62 * len(text)))
        if size >= 3.5:
            axes.text(
                float(box.start + box.width / 2),
                box.rank + box.bottom + box.height / 2,
                text,
                ha="center",
                va="center_baseline",
                fontsize=size,
                color="#202020" if box.is_later_stage or box.part.meta_type is _T.BWD_WEIGHT else "white",
            )


def draw_text(timeline: Timeline, width: int = 100, *, markup: bool = False) -> str:
    """The timeline as lines of at most `width` characters: the caption, then a row a rank.

    A box shows its kind (F, B, I, W) and its micro-batch number if that fits; later stages of a rank are in lower case,
    the parts of an OVERLAP step stand side by side, dots are bubble. markup: add colours as `rich` markup.
    Raises ScheduleError for times beyond 1e-100 to 1e100.
    """
    _check_times(timeline)
    label_width = len(f"{len(timeline.spans) - 1} ")
    num_columns = max(1, width - label_width)
    total = timeline.total_s
    if total > 0:
        durations = [span.end_s - span.start_s for row in timeline.spans for span in row if span.step.computes]
        shortest = min((duration for duration in durations if duration > 0), default=total)
        digits = max((len(str(box.part.micro_index)) for box in _boxes(timeline)), default=1)
        num_columns = min(num_columns, max(1, round(min(total / shortest, num_columns)) * (digits + 1)))
    lines = [caption(timeline)]
    for rank, row in enumerate(timeline.spans):
        cells = _text_row(timeline, row, num_columns)
        lines.append(f"{rank:<{label_width}}" + (_marked_up(cells) if markup else "".join(char for char, _ in cells)))
    return "\n".join(lines)


def _text_row(timeline: Timeline, row: tuple[Span, ...], num_columns: int) -> list[tuple[str, MetaStepType | None]]:
    """A character and the kind of step per column."""
    cells: list[tuple[str, MetaStepType | None]] = [(".", None)] * num_columns
    first_stage = next((span.step.computes[0].stage_index for span in row if span.step.computes), None)
    columns_per_time = num_columns / timeline.total_s if timeline.total_s > 0 else 0
    for span in row:
        parts = span.step.computes
        for index, part in enumerate(parts):
            share = (span.end_s - span.start_s) / len(parts)
            start = span.start_s - timeline.start_s + index * share
            begin, end = round(start * columns_per_time), round((start + share) * columns_per_time)
            letter = part.meta_type.value if part.stage_index == first_stage else part.meta_type.value.lower()
            number = str(part.micro_index)
            text = letter + (number if len(number) < end - begin else "")
            for offset, char in enumerate(text.ljust(end - begin, "-")[: end - begin]):
                cells[begin + offset] = (char, part.meta_type)
    return cells


def _marked_up(cells: list[tuple[str, MetaStepType | None]]) -> str:
    marked, index = "", 0
    while index < len(cells):
        char, kind = cells[index]
        index += 1
        text = char
        while index < len(cells) and cells[index][1] is kind and not cells[index][0].isalpha():
            text += cells[index][0]
            index += 1
        marked += text if kind is None else f"[{_STYLES[kind]}]{text}[/]"
    return marked
