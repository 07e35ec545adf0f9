"""The live view of a run on a terminal: progress, loss with a sparkline, speed, memory, mesh. No torch.

Drawn anew a few times a second from the history; lines (warnings of rank 0, messages) scroll by above it. rich honours
NO_COLOR and the terminal's width.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from hp_train.launch import units
from hp_train.launch.history import AttemptFacts, History, StepRow
from hp_train.launch.plain_log import mean, speed_text

_BARS = "▁▂▃▄▅▆▇█"
_REDRAW_S = 0.25
_MOST_WIDTH = 110  # wider terminals do not stretch the view: figures far from their names read badly


class LiveView:
    """Shows one attempt at a time on a console."""

    def __init__(self, console: Console, *, loss_means_nothing: bool = False) -> None:
        self._console = console
        self._loss_means_nothing = loss_means_nothing
        self._history: History | None = None
        self._live: Live | None = None
        self._shown: RenderableType = ""
        self._width = 0  # of the terminal when that was drawn
        self._stale = False
        self._drawn_at = 0.0

    def __enter__(self) -> Self:
        self._history = None
        self._shown, self._width = self._render(), self._console.width
        self._live = Live(self._shown, console=self._console, auto_refresh=False, transient=False)
        self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._live is not None
        self._draw()
        with contextlib.suppress(OSError):
            self._live.stop()
        self._live = None

    def open_attempt(self, history: History) -> None:
        """Take the facts of the workers, and all rows to come, from `history`."""
        self._history = history
        self._stale = True

    def step(self, history: History) -> None:
        """The next tick draws it."""
        self._stale = True

    def tick(self) -> None:
        """Draw what is new, a few times a second at most: the workers need the cores."""
        if self._stale and time.monotonic() - self._drawn_at >= _REDRAW_S:
            self._draw()

    def _draw(self) -> None:
        assert self._live is not None, "a view is drawn inside its `with` block"
        self._stale = False
        self._drawn_at = time.monotonic()
        with contextlib.suppress(OSError):  # the terminal hung up: the run goes on
            self._follow_resizing()
            self._shown = self._render()
            self._live.update(self._shown, refresh=True)

    def _follow_resizing(self) -> None:
        """After the terminal became narrower or wider, clear what is left of the last drawing.

        A narrower terminal has broken its lines, so that they take more rows than rich counts, which would go up too
        little and leave the rest standing.
        """
        width = self._console.width
        if width == self._width:
            return
        lines = self._console.render_lines(self._shown, self._console.options.update_width(self._width), pad=False)
        rows = sum(max(1, math.ceil(sum(part.cell_length for part in line) / width)) for line in lines)
        clear, up = (ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)
        to_the_top = Control(*[clear, up] * (rows - 1), clear)
        back_to_where_rich_starts = Control(*[(ControlType.CURSOR_DOWN, len(lines) - 1)] if len(lines) > 1 else [])
        self._console.control(to_the_top, back_to_where_rich_starts)
        self._width = width

    def line(self, text: str) -> None:
        """Print a line above the view, as it is: no markup, no highlighting."""
        with contextlib.suppress(OSError):
            self._follow_resizing()
            self._console.print(Text(text), highlight=False)

    def _render(self) -> RenderableType:
        history = self._history
        if history is None or history.facts is None:
            return Text("starting workers ...", style="dim")
        return render(history, self._console.width, loss_means_nothing=self._loss_means_nothing)


def render(history: History, width: int, *, loss_means_nothing: bool = False) -> RenderableType:
    """Return the panel for a terminal `width` columns wide."""
    facts = history.facts
    assert facts is not None, "there is nothing to show before the workers stand"
    inner = min(width, _MOST_WIDTH) - 4
    body = Group(
        _progress(history, facts, inner),
        _loss_line(history, inner, loss_means_nothing),
        _figures(history, facts, inner),
    )
    device = facts.device_name or facts.device
    title = f"{units.count_text(facts.num_parameters)} parameters · {facts.mesh} · {device}"
    return Panel(body, title=Text(title, overflow="ellipsis", no_wrap=True), title_align="left", width=inner + 4)


def _progress(history: History, facts: AttemptFacts, width: int) -> Table:
    step = history.last.step if history.last else facts.first_step - 1
    remaining_s = history.remaining_s()
    left = f"step {step}/{facts.max_steps}"
    right = f"{step / facts.max_steps:.0%}"
    if remaining_s is not None:
        right += f" eta {units.duration_text(remaining_s)}"
    bar = ProgressBar(
        total=facts.max_steps,
        completed=step,
        width=max(8, width - len(left) - len(right) - 2),
        style="bright_black",  # rich's own colours for a bar vanish on a light terminal
        complete_style="green",
        finished_style="green",
    )
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_row(Text(left, style="bold"), bar, Text(right))
    return grid


def _loss_line(history: History, width: int, loss_means_nothing: bool) -> Text:
    text = Text("loss ", no_wrap=True, overflow="ellipsis")
    if loss_means_nothing or not history.losses:
        return text.append("-")
    text.append(f"{history.losses[-1]:.3f}", style="bold")
    if history.val_loss is not None:
        text.append("  val ").append(f"{history.val_loss:.3f}", style="bold")
    text.append("  ").append(sparkline(history.losses, max(8, width - len(text) - 2)))
    return text


def sparkline(values: list[float], width: int) -> str:
    """Return a row of at most `width` blocks, each the mean of its share of `values`; the lowest is the smallest."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    columns = min(width, len(finite))
    bounds = [index * len(finite) // columns for index in range(columns + 1)]
    means = [sum(finite[low:high]) / (high - low) for low, high in zip(bounds, bounds[1:], strict=False)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in means)


def _figures(history: History, facts: AttemptFacts, width: int) -> Table:
    """Return the other figures, as many side by side as fit."""
    cells = [Text.assemble((f"{name} ", "dim"), value) for name, value in _named_figures(history, facts)]
    columns = max(1, min(len(cells), width // 34 if cells else 1))
    grid = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(columns):
        grid.add_column(no_wrap=True, overflow="ellipsis")
    for start in range(0, len(cells), columns):
        grid.add_row(*cells[start : start + columns])
    return grid


def _named_figures(history: History, facts: AttemptFacts) -> list[tuple[str, str]]:
    row = history.last
    if row is None:
        return [("waiting for", f"step {facts.first_step}")]
    figures = _speed_figures(list(history.recent)[-10:], facts)
    if row.grad_norm is not None:
        figures.append(("grad norm", units.grad_norm_text(row.grad_norm)))
    if row.lr is not None:
        figures.append(("lr", f"{row.lr:.1e}"))
    if row.peak_memory_bytes:
        figures.append(("memory", units.memory_text(row.peak_memory_bytes, facts.device_memory_bytes)))
    return figures


def _speed_figures(rows: list[StepRow], facts: AttemptFacts) -> list[tuple[str, str]]:
    figures = []
    step_time_s, mfu = mean(row.step_time_s for row in rows), mean(row.mfu for row in rows)
    if step_time_s:
        figures.append(("speed", speed_text(facts.tokens_per_step / step_time_s, facts)))
        figures.append(("time", units.step_time_text(step_time_s)))
    if mfu is not None or facts.lacks_mfu:
        figures.append(("mfu", "unknown" if mfu is None else f"{mfu:.0%}"))
    return figures
