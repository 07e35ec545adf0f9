"""`hp-train runs`, `compare` and `report` on directories of runs, and `rerun` up to the start of the new run."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hp_train import cli
from hp_train.commands import train as train_command
from hp_train.config.compose import compose
from hp_train.launch.outcome import Cause
from hp_train.launch.owner import own
from hp_train.reports.charts import Chart, Series, draw_chart, round_ticks, thinned
from tests.commands.run_folders import make_run


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Runs `hp-train WORDS` in this process; gives the exit code, the lines of stdout and those of stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HP_TRAIN_RUNS", raising=False)

    def run(*words: str) -> tuple[int, list[str], list[str]]:
        monkeypatch.setattr(sys, "argv", ["hp-train", *words])
        code = cli.main()
        shown = capsys.readouterr()
        return code, shown.out.splitlines(), shown.err.splitlines()

    return run


DAY_S = 86_400.0


def falling(num_steps: int) -> list[float]:
    return [5.0 - 0.05 * step for step in range(1, num_steps + 1)]


def test_runs_are_listed_newest_first_with_where_they_stand(told, tmp_path: Path) -> None:
    now = time.time()
    make_run(tmp_path / "runs" / "a" / "1", falling(60), at=now - 3 * DAY_S)
    make_run(tmp_path / "runs" / "a" / "2", falling(30), cause=None, at=now - 2 * DAY_S)
    alive = make_run(tmp_path / "runs" / "b" / "3", falling(12), cause=None, at=now - 5 * DAY_S)
    (make_run(tmp_path / "runs" / "4", [], cause=Cause.USER_ERROR, at=now - 7 * DAY_S) / "metrics.jsonl").unlink()
    with own(alive):
        code, lines, errors = told("runs")
    assert (code, errors) == (0, [])
    cells = [line.split() for line in lines]
    assert cells[0] == ["run", "state", "step", "loss", "val", "age"]
    # holding b/3 began an attempt, so that it comes first
    assert [row[0] for row in cells[1:]] == ["b/3", "a/2", "a/1", "4"]
    assert cells[1][1:5] == ["running", "12/60", "4.400", "4.600"]
    assert cells[2][1:] == ["lost", "30/60", "3.500", "3.600", "2d00h"]
    assert cells[3][1:] == ["done", "60/60", "2.000", "2.100", "3d00h"]
    assert cells[4][1:] == ["user_error", "0/60", "-", "-", "7d00h"]


def test_a_killed_attempt_after_one_that_ended_is_lost(told, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "a" / "1", falling(60))
    (run / "logs" / "attempt_2").mkdir()
    assert told("runs")[1][1].split()[:2] == ["a/1", "lost"]


def test_many_runs_are_listed_at_once_and_damage_is_passed_over(told, tmp_path: Path) -> None:
    first = make_run(tmp_path / "runs" / "a" / "0000", falling(2000))
    for number in range(1, 120):
        shutil.copytree(
            first, tmp_path / "runs" / "a" / f"{number:04}", copy_function=lambda a, b: Path(b).symlink_to(a)
        )
    (first / "logs" / "attempt_1" / "outcome.json").write_text("{")
    with (first / "metrics.jsonl").open("a") as file:
        file.write('7\n{"step": 2001, "lo')
    started = time.process_time()
    code, lines, _ = told("runs", "-n", "0")
    assert code == 0 and len(lines) == 121
    assert time.process_time() - started < 1.5
    assert sum("unreadable  2000/60" in line for line in lines) == 120
    assert told("runs")[1][-1] == "and 100 older; -n 0 lists all 120"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("runs nowhere", "nowhere is not a folder"),
        ("runs -n few", "-n few is not a count"),
        ("runs --newest", "unrecognized arguments"),
        ("compare last", "required: RUN_B"),
        ("compare last gone", "gone"),
        ("report gone", "gone"),
        ("report last --out nowhere/page.html", "cannot be written"),
        ("rerun gone", "gone"),
        ("rerun trainer.seed=1", "rerun needs a run directory"),
        ("rerun last trainer.max_stepz=1", "trainer.max_steps"),
        ("rerun last recipe=nope", "recipe=nope"),
        ("doctor now", "unrecognized arguments: now"),
        ("completion tcsh", "use bash, zsh, fish"),
        ("completion", "which shell?"),
    ],
)
def test_wrong_inputs_are_answered_in_a_line(told, tmp_path: Path, words: str, said: str) -> None:
    make_run(tmp_path / "runs" / "a" / "1", falling(3))
    code, lines, errors = told(*words.split())
    assert code == 2 and lines == [] and len(errors) == 1
    assert said in errors[0]


def test_compare_tells_settings_and_where_losses_part(told, tmp_path: Path) -> None:
    losses = falling(20)
    make_run(tmp_path / "runs" / "a" / "1", losses, trainer={"seed": 1, "run_dir": "one"})
    other = [*losses[:6], *(loss * (1 + 1e-7) for loss in losses[6:9]), *(loss + 0.5 for loss in losses[9:15])]
    make_run(
        tmp_path / "runs" / "a" / "2", other, trainer={"seed": 2, "run_dir": "two"}, optimizer={"betas": [0.9, 0.99]}
    )
    code, lines, errors = told("compare", "1", "2")
    assert (code, errors) == (0, [])
    text = "\n".join(lines)
    assert re.search(r"^  trainer\.seed +1 +2$", text, flags=re.M)
    assert re.search(r"^  optimizer\.betas +\[0\.9,0\.95\] +\[0\.9,0\.99\]$", text, flags=re.M)
    assert "run_dir" not in text and "circumstances: the same" in text
    assert "losses: 15 common steps" in text
    assert (
        "first unequal at step 7: 4.65 and 4.65 (B - A = +4.6e-07)" in text
        or "first unequal at step 7: 4.65 and" in text
    )
    assert "apart by more than 1e-05 of their size from step 10: 4.5 and 5 (B - A = +5.0e-01)" in text
    assert lines[-1].startswith("  at the last common step 15: 4.25 and 4.75")
    assert told("compare", "1", "1")[1][2:] == [
        "config: the same", "circumstances: the same", "losses: the same number in all 20 common steps",
    ]  # fmt: skip


def test_rerun_starts_anew_from_the_old_config(told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(train_command, "start_run", lambda config, **more: calls.append((config, more)) or 0)
    old = {"seed": 7, "max_steps": 3, "run_dir": "runs/old", "resume": "must"}
    make_run(tmp_path / "runs" / "old", falling(3), trainer=old)
    assert told("rerun", "old", "trainer.max_steps=5")[0] == 0
    assert told("rerun", "old", "optimizer=sgd", "trainer.run_dir=new")[0] == 0
    (plain, more), (grouped, _) = calls
    assert (plain.trainer.seed, plain.trainer.max_steps, plain.trainer.run_dir) == (7, 5, None)
    assert plain.trainer.resume == grouped.trainer.resume == "never"
    assert compose(more["overrides"]).config == plain, "what is recorded composes the same again"
    assert (grouped.trainer.seed, grouped.optimizer.name, grouped.trainer.run_dir) == (7, "sgd", "new")


class _Page(HTMLParser):
    """Collects what a page would fetch, and whether its tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in ("meta", "img", "line", "circle", "path"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_report_stands_alone_and_holds_everything(told, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "a" / "1", falling(60), trainer={"run_name": "<b>alert(1)<b>"})
    (run / "traces" / "dp_0").mkdir(parents=True)
    (run / "traces" / "dp_0" / "pipeline_step_10.measured.svg").write_text("<svg xmlns='x'/>")
    code, lines, errors = told("report", "last")
    assert (code, errors) == (0, []) and lines == [f"wrote {run / 'report.html'}"]
    text = (run / "report.html").read_text()
    page = _Page()
    page.feed(text)
    assert page.open == [] and page.tags.count("svg") == 6
    assert all(value.startswith("data:image/svg+xml;base64,") for value in page.fetched) and len(page.fetched) == 1
    assert not re.search(r"@import|url\(|https?:", text)
    assert "<b>alert" not in text and "&lt;b&gt;alert(1)&lt;b&gt;" in text
    for part in (
        "2.0000",
        "validation",
        "Gradient norm",
        "Learning rate",
        "Tokens per second",
        "Peak memory",
        "MFU (cpu)",
        "unknown",
        "pp 2 x dp_shard 2",
        "prefers-color-scheme: dark",
        "trainer.run_name",
        "done at step 60 of 60",
    ):
        assert part in text, part
    points = json.loads(re.findall(r'<script type="application/json">(.*?)</script>', text)[0])
    assert [name for name, _ in points["series"]] == ["training", "validation"]
    assert points["series"][0][1][0][0] == 1 and points["series"][0][1][-1][2] == "2"


def test_a_report_on_a_run_without_steps(told, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "a" / "1", [], cause=None)
    assert told("report", "last", "--out", "here.html")[0] == 0
    assert "No step is recorded yet" in (tmp_path / "here.html").read_text() and not (run / "report.html").exists()


@pytest.mark.parametrize(
    "low, high", [(0.0, 1.0), (1.65, 5.76), (-3e-5, 7e-5), (8030.0, 8031.0), (2.0, 2.0), (0.0, 0.0)]
)
def test_ticks_are_round_few_and_span_the_values(low: float, high: float) -> None:
    ticks = round_ticks(low, high, 5)
    assert 2 <= len(ticks) <= 6 and ticks[0] <= low and ticks[-1] >= high
    step = ticks[1] - ticks[0]
    assert f"{step:.0e}"[0] in "125"


def test_thinning_keeps_peaks_valleys_and_both_ends() -> None:
    points = tuple((step, 1.0) for step in range(10_000))
    points = (*points[:5000], (5000, 9.0), *points[5001:7000], (7000, -9.0), *points[7001:])
    kept = thinned(points, 100)
    assert len(kept) <= 100 and {(5000, 9.0), (7000, -9.0), points[0], points[-1]} <= set(kept)
    assert list(kept) == sorted(kept)


def test_a_chart_leaves_out_what_is_not_finite() -> None:
    series = Series.of("loss", [(1, 2.0), (2, float("nan")), (3, None), (4, float("inf")), (5, 1.0)])
    assert series.points == ((1, 2.0), (5, 1.0))
    assert draw_chart(Chart("</script>", (series,), str)).count("</script>") == 1
