"""One web page on a run, whole in itself: no script, style, font or picture from elsewhere. No torch.

Everything is read from the run directory: rows of metrics.jsonl, facts and ends of the attempts, the config, and
pictures of measured pipeline steps where pp.trace_steps asked for them. Texts of the run are escaped, pictures are
embedded as images.
"""

from __future__ import annotations

import base64
import datetime
import math
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any

from hp_train.checkpoint.fence import begun_attempts
from hp_train.config.numbers import spell
from hp_train.config.schema_tree import LEAVES
from hp_train.launch import units
from hp_train.launch.history import AttemptFacts, StepRow, newest_facts, read_facts
from hp_train.launch.outcome import read_outcomes
from hp_train.launch.plain_log import mean, speed_text
from hp_train.launch.run_dir import attempt_dir
from hp_train.reports.charts import Chart, Series, draw_chart
from hp_train.reports.comparison import read_config
from hp_train.reports.page_style import SCRIPT, STYLE
from hp_train.reports.run_listing import all_rows, read_listing

_UNKNOWN = "unknown"


def page_of(run_dir: Path) -> str:
    """Return the page as HTML. Raises ConfigError when the config cannot be read."""
    rows = all_rows(run_dir)
    config = read_config(run_dir)
    facts = newest_facts(run_dir)
    sections = [
        _head(run_dir, config),
        _tiles(rows, facts),
        _charts(rows, random_tokens=config.get("data.name") == "random"),
        _mesh(config, facts),
        _timelines(run_dir),
        _attempts(run_dir),
        _config(run_dir, config),
    ]
    title = escape(f"{run_dir.parent.name}/{run_dir.name}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(filter(None, sections))
        + f"\n<script>{SCRIPT}</script>\n"
        "</body></html>\n"
    )


def _head(run_dir: Path, config: dict[str, Any]) -> str:
    state = read_listing(run_dir)
    written = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    steps = f"step {state.step:,} of {state.max_steps:,}" if state.max_steps else f"step {state.step:,}"
    return (
        f"<h1>{escape(run_dir.parent.name)}/{escape(run_dir.name)}</h1>"
        f'<p class="sub">{escape(state.state)} at {steps} &middot; {escape(str(run_dir))} &middot; '
        f"written {written}</p>"
    )


def _tiles(rows: list[StepRow], facts: AttemptFacts | None) -> str:
    tiles = []
    losses = [row for row in rows if row.loss is not None]
    if losses:
        tiles.append((f"{losses[-1].loss:.4f}", f"loss at step {losses[-1].step:,}"))
    evaluations = [row for row in rows if row.val_loss is not None]
    if evaluations:
        best = min(evaluations, key=lambda row: row.val_loss if row.val_loss is not None else math.inf)
        tiles.append((f"{evaluations[-1].val_loss:.4f}", f"validation loss at step {evaluations[-1].step:,}"))
        tiles.append((f"{best.val_loss:.4f}", f"lowest validation loss, step {best.step:,}"))
    if facts is not None:
        tiles.append((units.count_text(facts.num_parameters), "parameters"))
        tiles.extend(_speed_tiles(rows, facts))
    tokens = sum(row.tokens or 0 for row in rows)
    if tokens:
        tiles.append((units.count_text(tokens), "tokens seen"))
    note = "" if rows else '<p class="card">No step is recorded yet.</p>'
    return note + '<div class="tiles">' + "".join(_tile(*tile) for tile in tiles) + "</div>"


def _tile(figure: str, name: str) -> str:
    return f'<div class="tile"><b>{escape(figure)}</b><span>{escape(name)}</span></div>'


def _speed_tiles(rows: list[StepRow], facts: AttemptFacts) -> Iterator[tuple[str, str]]:
    mine = [row for row in rows if row.step >= facts.first_step]
    step_time_s = mean(row.step_time_s for row in mine[1:] or mine)
    if step_time_s:
        speed, _, each = speed_text(facts.tokens_per_step / step_time_s, facts).partition(" (")
        yield speed, f"mean of the last attempt{', ' if each else ''}{each.rstrip(')')}"
    mfu = mean(row.mfu for row in mine[1:] or mine)
    yield (_UNKNOWN if mfu is None else f"{mfu:.1%}"), f"MFU ({facts.device_name or facts.device})"
    peaks = [row.peak_memory_bytes for row in mine if row.peak_memory_bytes]
    if peaks:
        yield units.memory_text(max(peaks), facts.device_memory_bytes), "peak memory, largest rank"


def _charts(rows: list[StepRow], *, random_tokens: bool) -> str:
    def series(name: str, of: Callable[[StepRow], float | None]) -> Series:
        return Series.of(name, [(row.step, of(row)) for row in rows])

    def gib(row: StepRow) -> float | None:
        return None if row.peak_memory_bytes is None else row.peak_memory_bytes / units.GIB

    losses = (series("training", lambda row: row.loss), series("validation", lambda row: row.val_loss))
    loss_title = "Loss (nats per token)" + ("; random tokens, it means nothing" if random_tokens else "")
    times = (
        series("step", lambda row: row.step_time_s),
        series("wait for data", lambda row: row.data_wait_s),
        series("computing, slowest rank", lambda row: row.compute_max_s),
        series("computing, fastest rank", lambda row: row.compute_min_s),
    )
    charts = [
        Chart(loss_title, losses, lambda value: f"{value:.4g}"),
        Chart("Gradient norm before clipping", (series("norm", lambda row: row.grad_norm),), lambda v: f"{v:.3g}"),
        Chart("Learning rate", (series("lr", lambda row: row.lr),), lambda value: f"{value:.3g}"),
        Chart("Tokens per second", (series("whole job", lambda row: row.tokens_per_second),), units.count_text),
        Chart("Time of a step (s)", times, lambda value: f"{value:.3g}"),
        Chart("Peak memory, largest rank (GiB)", (series("memory", gib),), lambda value: f"{value:.3g}"),
        Chart("MFU", (series("mfu", lambda row: row.mfu),), lambda value: f"{value:.1%}"),
    ]
    drawn = [draw_chart(chart) for chart in charts if chart.has_points]
    return f'<h2>Curves</h2><div class="charts">{"".join(drawn)}</div>' if drawn else ""


def _mesh(config: dict[str, Any], facts: AttemptFacts | None) -> str:
    batch, micro = config.get("trainer.global_batch_size"), config.get("trainer.micro_batch_size")
    rows = [] if facts is None else [
        ("mesh", facts.mesh), ("processes", f"{facts.world_size:,}"), ("device", facts.device_name or facts.device),
        ("tokens a step", f"{facts.tokens_per_step:,}"),
    ]  # fmt: skip
    rows += [("data parallelism", f"{config.get('fsdp.dp_mode')}, engine {config.get('fsdp.implementation')}")]
    rows += [("batch", f"{batch} sequences of {config.get('trainer.seq_len')} tokens, micro-batches of {micro}")]
    if config.get("accelerator.pp_size", 1) > 1:
        rows += [("schedule", f"{config.get('pp.schedule')}, transport {config.get('pp.p2p_transport')}")]
    return f"<h2>Mesh</h2>{_table((), rows)}"


def _timelines(run_dir: Path) -> str:
    """Return the pictures of traced pipeline steps; those of the first pipeline stand for all."""
    pictures = sorted((run_dir / "traces").glob("dp_0/pipeline_step_*.svg"), key=_step_of)
    if not pictures:
        return ""
    parts = []
    for picture in pictures:
        kind = picture.stem.rpartition(".")[2]
        data = base64.b64encode(picture.read_bytes()).decode("ascii")
        parts.append(
            f"<figure><figcaption>Step {_step_of(picture)[0]}, {escape(kind)}</figcaption>"
            f'<img class="timeline" alt="timeline" src="data:image/svg+xml;base64,{data}"></figure>'
        )
    return f"<h2>Pipeline timeline</h2>{''.join(parts)}"


def _step_of(picture: Path) -> tuple[int, str]:
    number, _, kind = picture.name.removeprefix("pipeline_step_").partition(".")
    return (int(number) if number.isdigit() else 0), kind


def _attempts(run_dir: Path) -> str:
    facts = {attempt: read_facts(attempt_dir(run_dir, attempt)) for attempt in begun_attempts(run_dir)}
    ends = {outcome.attempt: outcome for outcome in read_outcomes(run_dir)}
    rows = []
    for attempt in sorted({*facts, *ends}):
        known, end = facts.get(attempt), ends.get(attempt)
        begin = ("", "") if known is None else (f"{known.first_step:,}", known.resumed_from or "")
        how = ("no word of its end", "", "")
        if end is not None:
            how = (end.cause.value, f"{end.last_step or end.step:,}", end.message)
        rows.append((str(attempt), *begin, *how))
    if not rows:
        return ""
    return f"<h2>Attempts</h2>{_table(('attempt', 'first step', 'from', 'end', 'last step', ''), rows)}"


def _config(run_dir: Path, config: dict[str, Any]) -> str:
    changed = [(key, spell(value)) for key, value in config.items() if key in LEAVES and value != LEAVES[key].default]
    text = escape((run_dir / "config.yaml").read_text(encoding="utf-8"))
    return (
        f"<h2>Config</h2><p class='sub'>What differs from the defaults; all of it below.</p>{_table((), changed)}"
        f'<details class="card"><summary>config.yaml</summary><pre>{text}</pre></details>'
    )


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [_table_line(["th"] * len(head), head)] if head else []
    for row in rows:
        first = "td" if head else "th"
        lines.append(_table_line([first, *["td"] * (len(row) - 1)], row))
    return f'<div class="card scroll"><table>{"".join(lines)}</table></div>'


def _table_line(tags: list[str], cells: tuple[str, ...]) -> str:
    written = (f"<{tag}>{escape(str(cell))}</{tag}>" for tag, cell in zip(tags, cells, strict=True))
    return f"<tr>{''.join(written)}</tr>"
