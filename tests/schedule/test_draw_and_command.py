"""Pictures and `hp-train schedule`: what they show, what they refuse, how they exit."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import pytest

from hp_train.commands import schedule as command
from hp_train.errors import ScheduleError
from hp_train.schedule import (
    SCHEDULES,
    Costs,
    MetaStep,
    MetaStepType,
    Timeline,
    build_schedule,
    draw,
    draw_text,
    load_schedule,
    lower,
    save_schedule,
    simulate,
)

T = MetaStepType


def _run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


def _timeline(name: str = "1f1b") -> Timeline:
    return simulate(build_schedule(name, 4, 8, None), Costs(1, 1, 1))


def test_svg_holds_the_caption_ranks_and_every_micro_batch_number(tmp_path: Path) -> None:
    draw(_timeline(), tmp_path / "x.svg")
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "x.svg").read_text())
    assert "1f1b: 4 ranks, time 33, bubble 27.3 %, peak activations 4 (4 3 2 1)" in texts
    assert {"rank 0", "rank 3", "forward", "backward"} <= set(texts)
    assert sum(text == "7" for text in texts) == 2 * 4  # forward and backward of micro-batch 7 on each rank


def test_pictures_are_the_same_each_time(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        draw(_timeline("dualpipe_v"), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_png_shows_the_four_kinds_in_their_colours(tmp_path: Path) -> None:
    from matplotlib.image import imread

    draw(_timeline("dualpipe_v"), tmp_path / "x.PNG")
    pixels = {
        tuple(pixel) for pixel in (255 * imread(tmp_path / "x.PNG")[::3, ::3, :3]).round().reshape(-1, 3).tolist()
    }
    for colour in ("3d6fb6", "3f8f5b", "2a9d9a", "d98b2b"):
        assert tuple(bytes.fromhex(colour)) in pixels


def test_measured_events_draw_like_planned_ones(tmp_path: Path) -> None:
    step = MetaStep(0, T.FWD, 0)
    events = [
        (1, MetaStep(0, T.FWD, 1), 102.0, 103.0),
        (0, step, 100.0, 101.0),
        (0, MetaStep(0, T.BWD_RECV, 0), 101.0, 105.0),
        (1, MetaStep(0, T.BWD, 1), 103.0, 105.0),
        (0, MetaStep(0, T.BWD, 0), 105.0, 107.0),
    ]
    timeline = Timeline.from_spans(events)
    assert (timeline.total_s, timeline.busy_s, timeline.bubble_s) == (7.0, (3.0, 3.0), (4.0, 4.0))
    assert timeline.local_bubble_s == (4.0, 0.0)
    assert draw_text(timeline, 80).splitlines()[1:] == ["0 F0........B0--", "1 ....F0B0--...."]
    assert "2 ranks, time 7 s, bubble" in draw_text(timeline)
    draw(timeline, tmp_path / "measured.svg")
    picture = (tmp_path / "measured.svg").read_text()
    assert "waiting, moving" in picture and ">7 s</text>" in picture


@pytest.mark.parametrize("path", ["x.pdf", "x", "none/x.png"])
def test_pictures_that_can_not_be_written_are_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="x"):
        draw(_timeline(), tmp_path / path)


def test_an_empty_timeline_is_no_picture(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="nothing to draw"):
        draw(Timeline.from_spans([]), tmp_path / "x.png")
    assert draw_text(Timeline.from_spans([])).startswith("measured: 0 ranks")


@pytest.mark.parametrize("name", ["zbv", "dualpipe_v"])
def test_the_legend_takes_no_room_from_the_boxes(name: str, tmp_path: Path) -> None:
    draw(simulate(build_schedule(name, 2, 4, 2), Costs(1, 1, 1)), tmp_path / "x.svg")
    picture = (tmp_path / "x.svg").read_text()
    width = float(re.search(r'viewBox="0 0 ([\d.]+)', picture)[1])
    axis = [
        float(x) for x in re.search(r'<g id="patch_2">\s*<path d="M ([\d.]+) [\d.]+ *\n?L ([\d.]+)', picture).groups()
    ]
    assert axis[1] - axis[0] > 0.85 * width
    assert "weight gradient, later stage" in picture


@pytest.mark.parametrize("costs", [Costs(1e300, 1, 1), Costs(1e-320, 0, 0)])
def test_times_beyond_any_axis_are_refused(costs: Costs, tmp_path: Path) -> None:
    timeline = simulate(build_schedule("gpipe", 2, 2), costs)
    for call in (lambda: draw(timeline, tmp_path / "x.svg"), lambda: draw_text(timeline)):
        with pytest.raises(ScheduleError, match="too little or too much to draw"):
            call()


def test_a_timeline_of_transfers_alone_is_text_too() -> None:
    sends = [(0, MetaStep(0, T.FWD_SEND, 0), 1.0, 2.0)]
    assert draw_text(Timeline.from_spans(sends)).startswith("measured: 1 ranks, time 1 s")


def test_text_shows_each_rank_step_by_step() -> None:
    text = draw_text(simulate(build_schedule("1f1b", 2, 2), Costs(1, 1, 1)), 80)
    assert text.splitlines()[1:] == ["0 F0F1....B0--..B1--", "1 ..F0B0--F1B1--...."]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("width", [1, 20, 77])
def test_text_keeps_to_its_width_and_its_markup_is_sound(name: str, width: int) -> None:
    from rich.text import Text

    timeline = _timeline(name)
    rows = draw_text(timeline, width).splitlines()[1:]
    assert len(rows) == 4 and all(len(row) <= max(width, 3) for row in rows)
    assert Text.from_markup(draw_text(timeline, width, markup=True)).plain == draw_text(timeline, width)


def test_list_names_every_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("list") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(SCHEDULES)


@pytest.mark.parametrize("name", ["zbv", "Interleaved1F1B"])
def test_verify_proves_built_in_schedules_under_every_transport(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("verify", name, "--pp", "4", "--microbatches", "16") == 0
    assert capsys.readouterr().out.count("proven under") == 4


def test_verify_refuses_a_deadlock_with_its_cycle_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my.csv"
    path.write_text("0F0,0RECV_B0,0B0,0SEND_F0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    assert _run("verify", str(path), "--transport", "plain") == 2
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert out.startswith(
        f"{path}: refused under plain: deadlock: rank 0 step 1 0RECV_B0 waits for rank 1 step 3 1SEND_B0, which"
    )


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "deadlock: rank 0 step 1 0B0 waits for rank 1 step 3 1B0"),
        ("0F0,0B0,0F1,0B1\n1B0,1F1,1B1\n", "rank 1 step 0 1B0 needs the forward of stage 1, micro-batch 0"),
    ],
)
def test_verify_refuses_computes_that_can_not_run(
    rows: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my.csv"
    path.write_text(rows)
    assert _run("verify", str(path), "--transport", "batch") == 2
    assert capsys.readouterr().out.startswith(f"{path}: refused under batch: {says}")


def test_verify_says_how_many_more_violations_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my.csv"
    path.write_text("0F0,0F1,0B0,0B1,0SEND_F0\n1F0,1B0,1RECV_F0\n")
    assert _run("verify", str(path), "--transport", "batch") == 2
    assert re.search(r"refused under batch: .* \(and \d+ more\)\n$", capsys.readouterr().out)


def test_lower_writes_what_the_api_lowers(tmp_path: Path) -> None:
    out = tmp_path / "l.csv"
    assert (
        _run(
            "lower", "zbv", "--pp", "2", "--microbatches", "4", "--transport", "batch", "--fsdp", "2", "--out", str(out)
        )
        == 0
    )
    assert load_schedule(out) == lower(build_schedule("zbv", 2, 4, 2), "batch", fsdp=2)


def test_lower_to_where_nothing_can_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="nodir/x.csv: can't be written: No such file"):
        _run("lower", "gpipe", "--pp", "2", "--microbatches", "2", "--out", str(tmp_path / "nodir" / "x.csv"))


def test_show_and_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("show", "1f1b", "--pp", "2", "--microbatches", "2", "--costs", "1,1,1") == 0
    assert "1 ..F0B0--F1B1--...." in capsys.readouterr().out
    assert _run("draw", "1f1b", "--pp", "2", "--microbatches", "2", "--out", str(tmp_path / "x.svg")) == 0
    assert (tmp_path / "x.svg").stat().st_size > 1000


def test_a_file_covers_its_own_sizes_only(tmp_path: Path) -> None:
    path = str(tmp_path / "s.csv")
    save_schedule(build_schedule("gpipe", 2, 4), path)
    assert _run("verify", path, "--pp", "2", "--microbatches", "4", "--stages-per-rank", "1") == 0
    with pytest.raises(ScheduleError, match="written for 4 micro-batches, not 8"):
        _run("verify", path, "--microbatches", "8")
    with pytest.raises(ScheduleError, match="written for 1 stage a rank, not 2"):
        _run("verify", path, "--stages-per-rank", "2")


def test_a_builder_of_ones_own_covers_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_schedules.py").write_text(
        "from hp_train.schedule import build_schedule\n"
        "def mine(pp_size, num_microbatches, stages_per_rank):\n"
        "    return build_schedule('gpipe', pp_size, num_microbatches)\n"
        "def wrong(pp_size, num_microbatches, stages_per_rank):\n"
        "    return 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert _run("verify", "my_schedules:mine", "--pp", "3", "--microbatches", "5") == 0
    for source, says in (
        ("my_schedules:none", "no function none"),
        ("my_schedules:wrong", "returned int"),
        ("no_such:x", "can't be imported"),
    ):
        with pytest.raises(ScheduleError, match=says):
            _run("verify", source, "--pp", "3", "--microbatches", "5")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ("num_stages=1", "rank_of_stage places 2 stages of 1"),
        ("rank_of_stage=(7, 7)", "stage 0 is placed on rank 7; there are 2 ranks"),
        ("num_stages=-3", "num_stages=-3 and num_microbatches=2 must be at least 1"),
        ("orders=(), num_stages=0, rank_of_stage=()", "num_stages=0"),
        ("num_microbatches=3", "3 micro-batches where 2 were asked for"),
    ],
)
@pytest.mark.parametrize("verb", ["verify", "lower", "show"])
def test_a_builder_whose_sizes_do_not_fit_is_refused(
    verb: str, changes: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unfit.py").write_text(
        "from dataclasses import replace\nfrom hp_train.schedule import build_schedule\n"
        f"def build(*_):\n    return replace(build_schedule('1f1b', 2, 2), {changes})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "unfit", raising=False)
    with pytest.raises(ScheduleError, match=f"unfit:build: returned a Schedule .*{re.escape(says)}"):
        _run(verb, "unfit:build", "--pp", "2", "--microbatches", "2")


def test_a_builder_that_fails_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_syntax.py").write_text("def mine(:\n")
    (tmp_path / "broken_import.py").write_text("1 / 0\n")
    (tmp_path / "broken_builders.py").write_text(
        "from hp_train.schedule import MetaStep, MetaStepType, Schedule, build_schedule\n"
        "def raises(*sizes):\n    raise KeyError('two\\nlines')\n"
        "def leaves(*sizes):\n    raise SystemExit(0)\n"
        "def arity(pp_size):\n    return None\n"
        "def refuses(*sizes):\n    return build_schedule('1f1b', 4, 3)\n"
        "def texts(*sizes):\n    return Schedule((('0F0', '0B0'),), 1, (0,), 1)\n"
        "def lists(*sizes):\n    return Schedule([[MetaStep(0, MetaStepType.FWD, 0)]], 1, (0,), 1)\n"
        "def counts(*sizes):\n    return Schedule(((),), '1', (0,), 1)\n"
        "def ranks(*sizes):\n    return Schedule(((),), 1, None, 1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for source, says in (
        ("broken_syntax:mine", "can't be imported: SyntaxError: .*line 1"),
        ("broken_import:mine", "can't be imported: ZeroDivisionError"),
        ("os:getcwd", r"getcwd\(2, 3, None\) raised TypeError"),
        ("broken_builders:raises", "raised KeyError"),
        ("broken_builders:leaves", "raised SystemExit"),
        ("broken_builders:arity", r"takes \(pp_size, num_microbatches, stages_per_rank\)"),
        ("broken_builders:refuses", "num_microbatches=3 is less"),
        ("broken_builders:texts", "rank 0 step 0 '0F0' is no MetaStep"),
        ("broken_builders:lists", "no tuple of tuples"),
        ("broken_builders:counts", "num_stages='1', no integer"),
        ("broken_builders:ranks", "rank_of_stage=None, no tuple"),
    ):
        with pytest.raises(ScheduleError, match=says) as refused:
            _run("verify", source, "--pp", "2", "--microbatches", "3")
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("verify", "1f1b", "--max-activations", "-1"), "--max-activations -1 must be at least 0"),
        (("show", "1f1b", "--width", "-5"), "--width -5 must be at least 1"),
        (("lower", "1f1b", "--swap", "1"), "--swap 1 must be at least 2"),
        (("lower", "1f1b", "--fsdp", "0"), "--fsdp 0 must be at least 1"),
        (("verify", "1f1b"), "needs a number of ranks"),
        (("verify", "1f1b", "--pp", "4", "--microbatches", "3"), "num_microbatches=3 is less than pp_size=4"),
        (("verify", "1f1b", "--pp", "4", "--microbatches", "4", "--transport", "x"), "transport 'x' is unknown"),
        (("show", "1f1b", "--pp", "4", "--microbatches", "4", "--costs", "1,x"), "--costs 1,x must be"),
        (("verify", "none.csv"), "none.csv: can't be read"),
    ],
)
def test_bad_requests_are_one_line(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        _run(*arguments)
