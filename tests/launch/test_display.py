"""What the terminal shows: plain lines, the live view at two widths, the summary; and how files are followed."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path
from queue import SimpleQueue

import pytest
from rich.console import Console

from hp_train.config.schema import TrainerConfig
from hp_train.launch import units
from hp_train.launch.feed import Feed
from hp_train.launch.history import AttemptFacts, History, LineTail, StepRow
from hp_train.launch.outcome import Cause, Outcome
from hp_train.launch.plain_log import PlainLog, format_step
from hp_train.launch.run_dir import attempt_dir
from hp_train.launch.summary import continue_command, summarize
from hp_train.launch.view import LiveView, render, sparkline

EIGHT_GPUS = AttemptFacts("cuda", "NVIDIA H100", 80 * 2**30, 8, "pp 2 x dp_shard 4", 8_030_261_248, 1, 2000, 523_240)
ONE_CPU = AttemptFacts("cpu", None, None, 1, "1 process", 800_000, 1, 2000, 1024)
FULL = StepRow(40, 2.312, None, 1.308, 3e-4, 523_240, 412_000.0, 51_500.0, 1.27, 0.01, 0.41, 62 * 2**30)


def _history(facts: AttemptFacts, rows: list[StepRow]) -> History:
    history = History(facts)
    for row in rows:
        history.add(row)
    return history


def test_full_line_has_the_documented_form() -> None:
    assert format_step([FULL], EIGHT_GPUS, 41 * 60) == (
        "step 40/2000 loss 2.312 grad 1.31 lr 3.0e-04 412k tok/s (51.5k/GPU) mfu 41% mem 62/80 GiB 1.27 s/step eta 41m"
    )


def test_line_leaves_out_what_is_unknown() -> None:
    assert format_step([StepRow(1)], ONE_CPU, None) == "step 1/2000"
    row = StepRow(40, loss=1.5, val_loss=1.87, step_time_s=0.0128, peak_memory_bytes=2**29)
    assert format_step([row], ONE_CPU, 25.0) == (
        "step 40/2000 loss 1.500 val 1.870 80k tok/s mem 0.5 GiB 0.0128 s/step eta 25s"
    )
    assert format_step([row], ONE_CPU, None, loss_means_nothing=True).startswith("step 40/2000 loss - val - ")


def test_speeds_are_means_over_the_steps_of_a_line() -> None:
    rows = [StepRow(step, step_time_s=time) for step, time in ((1, 3.0), (2, 1.0))]
    assert "512 tok/s 2 s/step" in format_step(rows, ONE_CPU, None)


def test_plain_log_prints_every_tenth_step_evaluations_and_the_last() -> None:
    stream, history = io.StringIO(), History(AttemptFacts("cpu", None, None, 1, "1 process", 10, 1, 23, 8))
    log = PlainLog(stream, 10)
    for step in range(1, 24):
        history.add(StepRow(step, loss=1.0, val_loss=2.0 if step == 15 else None))
        log.step(history)
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["10/23", "15/23", "20/23", "23/23"]


def test_a_closed_pipe_does_not_end_the_log() -> None:
    stream = io.StringIO()
    stream.close()
    PlainLog(stream, 10).line("nobody reads this")


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0"),
        (9.996, "10"),
        (987.6, "988"),
        (999.6, "1k"),
        (51_500, "51.5k"),
        (412_345, "412k"),
        (999_600, "1M"),
        (1.27e6, "1.27M"),
        (8_030_261_248, "8.03G"),
        (2.5e12, "2.5T"),
    ],
)
def test_counts(value: float, text: str) -> None:
    assert units.count_text(value) == text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.2, "0s"),
        (41, "41s"),
        (99.6, "2m"),
        (2460, "41m"),
        (7500, "2h05m"),
        (7199, "2h00m"),
        (277_000, "3d05h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert units.duration_text(seconds) == text


def _draw(history: History, width: int, **kwargs: bool) -> list[str]:
    console = Console(file=io.StringIO(), width=width, _environ={})
    console.print(render(history, width, **kwargs))
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 200])
def test_live_view_shows_everything_and_fits(width: int) -> None:
    falling = [StepRow(step, 5 - step / 20, step_time_s=1.27, mfu=0.41) for step in range(1, 41)]
    last = StepRow(41, 2.9, 3.05, step_time_s=1.27, grad_norm=1.3, lr=3e-4)
    lines = _draw(_history(EIGHT_GPUS, [*falling, last]), width)
    plain = "\n".join(lines)
    assert all(len(line) <= width for line in lines)
    assert len(lines) < 12
    for part in (
        "8.03G parameters · pp 2 x dp_shard 4 · NVIDIA H100",
        "step 41/2000",
        "2% eta 41m",
        "loss 2.900",
        "val 3.050",
        "█▇",
        "412k tok/s (51.5k/GPU)",
        "1.27 s/step",
        "mfu 41%",
        "grad norm 1.30",
        "lr 3.0e-04",
    ):
        assert part in plain, part


def test_live_view_before_the_first_step_and_with_random_data() -> None:
    assert any("waiting for step 1" in line for line in _draw(History(EIGHT_GPUS), 80))
    plain = "\n".join(_draw(_history(EIGHT_GPUS, [FULL]), 80, loss_means_nothing=True))
    assert "loss -" in plain and "2.312" not in plain
    assert "62/80 GiB" in plain


@pytest.mark.parametrize("peak, said", [(None, True), (9.89e14, False)])
def test_a_gpu_whose_peak_is_not_known_has_an_unknown_mfu_and_a_cpu_none(peak: float | None, said: bool) -> None:
    facts = dataclasses.replace(EIGHT_GPUS, device_name="NVIDIA X1", precision="bf16", peak_flops=peak)
    row = dataclasses.replace(FULL, mfu=None if said else 0.41)
    stream = io.StringIO()
    PlainLog(stream, 10).open_attempt(History(facts))
    assert ("MFU unknown: no peak is on record for NVIDIA X1 in bf16" in stream.getvalue()) == said
    assert ("mfu unknown" in "\n".join(_draw(_history(facts, [row]), 80))) == said
    assert "mfu" not in "\n".join(_draw(_history(ONE_CPU, [row]), 80)) or not said


def test_nothing_remains_at_the_last_step() -> None:
    history = _history(dataclasses.replace(ONE_CPU, max_steps=2), [StepRow(1, step_time_s=1.0)])
    assert history.remaining_s() == 1.0
    history.add(StepRow(2, step_time_s=1.0))
    assert history.remaining_s() is None and "eta" not in "\n".join(_draw(history, 80))


@pytest.mark.parametrize("colours", ["truecolor", "standard"])
def test_colours_of_the_view_are_the_terminals_own(colours: str) -> None:
    """Of the sixteen colours a terminal's theme makes each readable on its ground; others are not known to be."""
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=True, color_system=colours, _environ={"TERM": "xterm"})
    console.print(render(_history(EIGHT_GPUS, [FULL]), 80))
    assert "\x1b[" in stream.getvalue() and not re.search(r"\x1b\[[0-9;]*[34]8;", stream.getvalue())


def test_lines_pass_above_the_live_view_unchanged_and_without_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=True, _environ={"NO_COLOR": "1", "TERM": "xterm"})
    with LiveView(console) as view:
        view.open_attempt(_history(ONE_CPU, [StepRow(1, loss=2.0)]))
        view.tick()
        view.line("UserWarning: [/bold] strange [markup]")
        view.tick()
    assert "UserWarning: [/bold] strange [markup]" in stream.getvalue()
    assert "\x1b[3" not in stream.getvalue()  # no colour code


def test_a_terminal_made_narrower_is_cleared_of_the_broken_lines() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=100, force_terminal=True, _environ={"TERM": "xterm"})
    with LiveView(console) as view:
        view.open_attempt(_history(EIGHT_GPUS, [FULL]))
        view.line("shown")  # draws, and the view below it
        view.open_attempt(_history(EIGHT_GPUS, [FULL]))
        view._drawn_at = 0.0
        view.tick()
        num_lines = len(_draw(_history(EIGHT_GPUS, [FULL]), 100))
        console.width = 60  # each line of 100 now takes two rows
        before = len(stream.getvalue())
        view.line("a warning")
        cleared = stream.getvalue()[before:].partition("a warning")[0]
    assert cleared.startswith("\x1b[2K\x1b[1A" * (2 * num_lines - 1) + f"\x1b[2K\x1b[{num_lines - 1}B")


def test_sparkline_is_scaled_from_lowest_to_highest_and_no_wider_than_asked() -> None:
    assert sparkline([3.0, 2.0, 1.0], 10) == "█▄▁" or sparkline([3.0, 2.0, 1.0], 10) == "█▅▁"
    assert len(sparkline([float(i % 7) for i in range(1000)], 40)) == 40
    assert sparkline([1.0, 1.0], 10) == "▁▁"
    assert sparkline([float("nan"), 1.0], 10) == "▁" and sparkline([], 10) == ""


def test_tail_follows_growth_torn_lines_cuts_and_replacement(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LineTail(path)
    assert tail.poll() == []
    path.write_text("one\ntw")
    assert tail.poll() == ["one"]
    with open(path, "a") as file:
        file.write("o\n")
    assert tail.poll() == ["two"]
    path.write_text("new\n")  # cut in place
    assert tail.poll() == ["new"]
    (tmp_path / "other").write_text("replaced, longer than before\n")
    (tmp_path / "other").rename(path)
    assert tail.poll() == ["replaced, longer than before"]
    with open(path, "a") as file:
        file.write("end without newline")
    assert tail.poll() == [] and tail.poll(torn=True) == ["end without newline"]


@pytest.mark.parametrize(
    "resumed, told",
    [
        ("step_00000002", "going on from checkpoint step_00000002"),
        (None, "no valid checkpoint to go on from: starting again at step 0"),
    ],
)
def test_feed_shows_this_attempts_rows_only_and_every_line_of_rank_0(
    tmp_path: Path, resumed: str | None, told: str
) -> None:
    folder = attempt_dir(tmp_path, 2)
    folder.mkdir(parents=True)
    rows = [{"step": step, "loss": 1.0} for step in (1, 2, 3, 4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = "[rank 0] a warning\n[rank 1] another's\n[rank 0] [rank 1] quoted\n[rank 0] last words"
    (folder / "node_0.log").write_text(said)
    facts = {name: getattr(EIGHT_GPUS, name) for name in EIGHT_GPUS.__slots__}
    facts.update(first_step=3, resumed_from=resumed)
    (folder / "attempt.json").write_text(json.dumps(facts))
    stream, messages = io.StringIO(), SimpleQueue()
    messages.put("a message")
    with PlainLog(stream, 1) as log, Feed(tmp_path, 2, log, messages) as feed:
        pass
    shown = stream.getvalue().splitlines()
    assert {"a warning", "[rank 1] quoted", "last words", "a message", told} <= set(shown)
    assert not any("another's" in line for line in shown)
    assert [line.split()[1] for line in shown if line.startswith("step ")] == ["3/2000", "4/2000"]
    assert feed.current_step() == 5


@pytest.mark.parametrize(
    "cause, code, command",
    [
        (Cause.DONE, 0, "hp-train resume {dir} trainer.max_steps=80"),
        (Cause.PREEMPTED, 75, "hp-train resume {dir}"),
    ],
)
def test_summary(tmp_path: Path, cause: Cause, code: int, command: str) -> None:
    folder = attempt_dir(tmp_path, 1)
    folder.mkdir(parents=True)
    (folder / "attempt.json").write_text(json.dumps({n: getattr(EIGHT_GPUS, n) for n in EIGHT_GPUS.__slots__}))
    rows = [
        {"step": 1, "loss": 5.5, "step_time_s": 9.0},
        {"step": 2, "loss": 4.5, "val_loss": 4.75, "step_time_s": 1.27},
        {"step": 3, "loss": 4.0, "val_loss": None, "step_time_s": 1.27},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = TrainerConfig()
    config.trainer.max_steps = 40
    lines = summarize(tmp_path, config, Outcome(1, cause, code, 3))
    assert str(tmp_path) in lines[0] and "step 3" in lines[0]
    assert lines[1].strip() == "loss 5.500 (step 1) to 4.000 (step 3), validation loss 4.750 (step 2)"
    assert lines[2].strip() == "412k tok/s (51.5k/GPU)"
    assert lines[-1].strip() == f"go on with: {command.format(dir=tmp_path)}"


@pytest.mark.parametrize(
    "typed, cause, words",
    [
        (["trainer.max_steps=9", "pp=zbv"], Cause.STOPPED, "trainer.max_steps=9 pp=zbv"),
        (["trainer.max_steps=9", "pp=zbv"], Cause.DONE, "pp=zbv trainer.max_steps=18"),
        (["model.name=a b"], Cause.STOPPED, "'model.name=a b'"),
        (["recipe=x", "trainer.max_steps=9", "trainer.resume=auto"], Cause.STOPPED, "trainer.max_steps=9"),
        ([], Cause.STOPPED, ""),
    ],
)
def test_the_command_that_goes_on_repeats_what_was_changed(
    tmp_path: Path, typed: list[str], cause: Cause, words: str
) -> None:
    config = TrainerConfig()
    config.trainer.max_steps = 9
    (tmp_path / "capsule.attempt_2.json").write_text(json.dumps({"overrides": typed}))
    (tmp_path / "capsule.attempt_4.json").write_text(json.dumps({"overrides": ["trainer.max_steps=99"]}))
    command = continue_command(tmp_path, config, Outcome(3, cause, 0, 9))  # 3 is a restart of the launcher of 2
    assert command == f"hp-train resume {tmp_path} {words}".rstrip()
    assert continue_command(tmp_path, config, Outcome(1, Cause.STOPPED, 0, 9)) == f"hp-train resume {tmp_path}"
