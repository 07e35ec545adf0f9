"""Steps and their text: round trips, refusals that name the place, torch's own files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_train.errors import ConfigError, ScheduleError
from hp_train.schedule import (
    SCHEDULES,
    TRANSPORTS,
    MetaStep,
    MetaStepType,
    build_schedule,
    load_schedule,
    lower,
    save_schedule,
    schedule_hash,
)
from hp_train.schedule.steps import COMPOSITE_TYPES, FSDP_TYPES, MAX_INDEX, P2P_TYPES
from hp_train.schedule.text import parse_schedule

T = MetaStepType
indices = st.integers(0, 10**6)


def _single(kind: MetaStepType) -> st.SearchStrategy[MetaStep]:
    micro = st.none() if kind in FSDP_TYPES else indices
    return st.builds(MetaStep, micro, st.just(kind), indices)


_p2p = st.lists(st.sampled_from(sorted(P2P_TYPES, key=str)).flatmap(_single), min_size=1, max_size=4, unique=True)
_boundary = st.none() | _p2p.map(tuple)
_backward = st.sampled_from([T.BWD, T.BWD_INPUT]).flatmap(_single)


def _step(kind: MetaStepType) -> st.SearchStrategy[MetaStep]:
    if kind is T.BATCH_SEND_RECV:
        return _p2p.map(lambda members: MetaStep(None, kind, None, tuple(members)))
    if kind in COMPOSITE_TYPES:
        pairs = st.tuples(_single(T.FWD), _backward).filter(
            lambda pair: (pair[0].stage_index, pair[0].micro_index) != (pair[1].stage_index, pair[1].micro_index)
        )
        ordered = pairs if kind is T.OVERLAP_F_B else pairs.map(lambda pair: pair[::-1])
        return st.builds(MetaStep, st.none(), st.just(kind), st.none(), ordered, _boundary)
    if kind is T.FWD:
        return st.builds(MetaStep, indices, st.just(kind), indices, st.none(), _boundary)
    return _single(kind)


@pytest.mark.parametrize("kind", MetaStepType)
def test_text_round_trips(kind: MetaStepType) -> None:
    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(_step(kind))
    def check(step: MetaStep) -> None:
        assert MetaStep.from_str(str(step)) == step
        assert hash(MetaStep.from_str(str(step))) == hash(step)
        assert step.type is kind

    check()


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("2F0", MetaStep(0, T.FWD, 2)),
        ("999999999F999999999", MetaStep(MAX_INDEX, T.FWD, MAX_INDEX)),
        (" 3SEND_F1 ", MetaStep(1, T.FWD_SEND, 3)),
        ("1UNSHARD", MetaStep(None, T.FSDP_UNSHARD, 1)),
        ("(0F3;3B1)OVERLAP_F_B", MetaStep(None, T.OVERLAP_F_B, None, (MetaStep(3, T.FWD, 0), MetaStep(1, T.BWD, 3)))),
        ("0F1+(0SEND_F1)", MetaStep(1, T.FWD, 0, None, (MetaStep(1, T.FWD_SEND, 0),))),
    ],
)
def test_text_reads_as_documented(text: str, step: MetaStep) -> None:
    assert MetaStep.from_str(text) == step


@pytest.mark.parametrize(
    "text",
    ["", "1F0garbage", "F0", "1F", "-1F0", "1F-1", "1X0", "1f0", "01F0", "1F00", "1UNSHARD3", "1 F0", "()OVERLAP_F_B",
     "(0F0)OVERLAP_F_B", "(0B0;1F0)OVERLAP_F_B", "(0F0;0B0)OVERLAP_F_B", "(0F0;1B0)BATCH_SEND_RECV", "0F0+()",
     "(0SEND_F0;0SEND_F0)BATCH_SEND_RECV", "0B0+(0SEND_F0)", "(0F0;1B1)", "1F0,", "٣F0", "1F99999999999999999999",
     "((0F0;1B1)OVERLAP_F_B;1B0)OVERLAP_F_B", "0SEND_F", "1BATCH_SEND_RECV0", "1000000000F0", None, 1, b"1F0"],
)  # fmt: skip
def test_what_is_no_step_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError):
        MetaStep.from_str(text)


@pytest.mark.parametrize(
    "arguments",
    [(0, T.FWD, None), (None, T.FWD, 0), (10**9, T.FWD, 0), (0, T.FWD, 10**9),
     (-1, T.FWD, 0), (True, T.FWD, 0), (0.0, T.FWD, 0), (0, "F", 0),
     (3, T.FSDP_UNSHARD, 0), (0, T.FWD, 0, (MetaStep(0, T.BWD, 0),)), (0, T.OVERLAP_F_B, 0),
     (None, T.OVERLAP_F_B, None, None), (None, T.BATCH_SEND_RECV, None, ()),
     (0, T.BWD, 0, None, (MetaStep(0, T.FWD_SEND, 0),)),
     (0, T.FWD, 0, None, (MetaStep(0, T.BWD, 0),)), (0, T.FWD, 0, None, ())],
)  # fmt: skip
def test_impossible_steps_are_refused_at_construction(arguments: tuple) -> None:
    with pytest.raises(ScheduleError) as caught:
        MetaStep(*arguments)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, ConfigError)


def test_a_step_can_not_be_changed() -> None:
    with pytest.raises(AttributeError):
        MetaStep(0, T.FWD, 0).stage_index = 1


@pytest.mark.parametrize("name", SCHEDULES)
def test_saved_schedules_load_equal(name: str, tmp_path: Path) -> None:
    for transport in TRANSPORTS:
        stages = SCHEDULES[name].stages_per_rank
        schedule = lower(build_schedule(name, 3, 7, stages), transport, fsdp=2, swap=2, data=True)
        save_schedule(schedule, tmp_path / "s.csv")
        assert load_schedule(tmp_path / "s.csv") == schedule


def test_blank_cells_are_bubbles() -> None:
    schedule = parse_schedule("0F0,, ,0B0\n,1F0,1B0,\n\n", "x")
    assert [list(map(str, order)) for order in schedule.orders] == [["0F0", "0B0"], ["1F0", "1B0"]]
    assert (schedule.num_stages, schedule.rank_of_stage, schedule.num_microbatches) == (2, (0, 1), 1)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("0F0,0B0\n1F0,1B0x\n", "my.csv: row 2 column 2: '1B0x' is no step"),
        ("0F0,0Z0\n", "row 1 column 2: '0Z0' is no step: unknown type 'Z'"),
        ("0F0,0B0,0F0\n", "row 1 column 3: '0F0' repeats 0F0, which stands at row 1 column 1"),
        ("0F0,0B0\n0F1,0B1\n", "stage 0 stands on rank 0 and on rank 1"),
        ("0F0,0B0\n2F0,2B0\n", "stage 1 has no step"),
        ("0F0,0B0,0F2,0B2\n", "micro-batch 1 has no step"),
        ("", "holds no step"),
        ("0UNSHARD\n", "holds no forward"),
        ("0F0,0F1+(0SEND_F0),0SEND_F0\n", "row 1 column 3: '0SEND_F0' repeats"),
        ('"0F0', "is no CSV"),
    ],
)
def test_bad_files_name_row_column_and_text(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "my.csv"
    path.write_text(content)
    with pytest.raises(ScheduleError) as caught:
        load_schedule(path)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_can_not_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x9f")
    for path in (tmp_path / "none.csv", tmp_path, tmp_path / "binary.csv"):
        with pytest.raises(ScheduleError, match=path.name):
            load_schedule(path)
    for no_path in (None, 1, b"x.csv", "x\0.csv"):
        with pytest.raises(ScheduleError, match="is no path of a schedule file"):
            load_schedule(no_path)


def test_the_hash_tells_apart_what_ranks_would_do() -> None:
    schedules = [lower(build_schedule(name, 2, 4), "plain") for name in ("gpipe", "1f1b")]
    hashes = {schedule_hash(schedule, transport) for schedule in schedules for transport in ("plain", "multi_stream")}
    assert len(hashes) == 4 and all(len(digest) == 64 for digest in hashes)
    assert schedule_hash(schedules[0], "plain") == schedule_hash(lower(build_schedule("GPipe", 2, 4), "plain"), "plain")


def test_the_package_and_its_command_import_no_torch_and_no_plotting() -> None:
    code = (
        "import sys, hp_train.schedule, hp_train.commands.schedule\n"
        "assert not {'torch', 'matplotlib', 'rich', 'numpy', 'hydra'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_reading_the_registry_loads_nothing_else_and_names_are_functions_whatever_was_imported_first() -> None:
    code = (
        "import sys, hp_train.schedule.registry\n"
        "ours = {name for name in sys.modules if name.startswith('hp_train.')}\n"
        "names = ('errors', 'registry', 'schedule', 'schedule.registry')\n"
        "assert ours == {f'hp_train.{name}' for name in names}, ours\n"
        "from hp_train.schedule.verify import Verification\n"
        "from hp_train.schedule.draw import caption\n"
        "from hp_train.schedule import *\n"
        "assert all(map(callable, (verify, simulate, draw, lower, build_schedule, load_schedule)))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
