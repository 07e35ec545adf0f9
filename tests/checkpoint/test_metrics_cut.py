"""metrics.jsonl keeps one row a step across attempts; what is taken out goes to the attempt that wrote it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hp_train.checkpoint import metrics_cut
from hp_train.checkpoint.metrics_cut import cut_metrics, fill_val_loss, lacks_val_loss


def row(step: int, attempt: int = 1) -> str:
    return json.dumps({"step": step, "loss": 1 / step, "by": attempt}) + "\n"


def begin_attempt(run_dir: Path, attempt: int, first_step: int) -> None:
    folder = run_dir / "logs" / f"attempt_{attempt}"
    folder.mkdir(parents=True)
    (folder / "attempt.json").write_text(json.dumps({"first_step": first_step}))


def read(run_dir: Path, name: str = "metrics.jsonl") -> str:
    return (run_dir / name).read_text()


@pytest.mark.parametrize(
    "torn", ["", row(6)[:-1], row(6)[:9], "\0" * 40, "\0\n", '{"loss": 1}\n', "[]\n", '{"step": true}\n', "é\n"]
)
def test_rows_beyond_the_checkpoint_and_a_torn_line_are_moved(tmp_path: Path, torn: str) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(map(row, range(1, 6))) + torn)
    begin_attempt(tmp_path, 1, first_step=1)
    assert cut_metrics(tmp_path, 3, attempt=2) == 2 + bool(torn)
    assert read(tmp_path) == "".join(map(row, range(1, 4)))
    moved = read(tmp_path, "metrics.attempt_1.jsonl")
    assert moved == row(4) + row(5) + (torn if torn.endswith("\n") or not torn else torn + "\n")


def test_a_torn_row_of_a_kept_step_goes_too(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(row(1) + row(2)[:-1])
    assert cut_metrics(tmp_path, 2, attempt=2) == 1
    assert read(tmp_path) == row(1)


def test_nothing_to_cut_changes_no_row_but_shuts_an_older_attempt_out(tmp_path: Path) -> None:
    assert cut_metrics(tmp_path, 0, attempt=1) == 0
    path = tmp_path / "metrics.jsonl"
    path.write_text(row(1) + row(2))
    with path.open("a") as older:
        assert cut_metrics(tmp_path, 2, attempt=2) == 0
        older.write(row(3))
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert read(tmp_path) == row(1) + row(2)


def test_a_validation_loss_left_out_is_put_into_its_row(tmp_path: Path) -> None:
    assert not lacks_val_loss(tmp_path, 2)
    (tmp_path / "metrics.jsonl").write_text(row(1) + row(2))
    assert lacks_val_loss(tmp_path, 2) and not lacks_val_loss(tmp_path, 3)
    fill_val_loss(tmp_path, 2, 1.5)
    assert not lacks_val_loss(tmp_path, 2)
    assert [json.loads(line).get("val_loss") for line in read(tmp_path).splitlines()] == [None, 1.5]


def test_without_a_checkpoint_every_row_goes(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(row(1) + row(2))
    assert cut_metrics(tmp_path, 0, attempt=2) == 2
    assert read(tmp_path) == "" and read(tmp_path, "metrics.attempt_1.jsonl") == row(1) + row(2)


def test_rows_go_to_the_attempt_that_wrote_them(tmp_path: Path) -> None:
    """Attempt 1 took steps 1-9; 2 resumed at 6 and took 6-8; 3 died before its first step; 4 falls back to step 3."""
    begin_attempt(tmp_path, 1, first_step=1)
    begin_attempt(tmp_path, 2, first_step=6)
    (tmp_path / "metrics.attempt_1.jsonl").write_text("".join(map(row, range(6, 10))))
    rows = [row(step, 1) for step in range(1, 6)] + [row(step, 2) for step in range(6, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(rows) + "torn")
    assert cut_metrics(tmp_path, 3, attempt=4) == 6
    assert read(tmp_path) == "".join(rows[:3])
    assert read(tmp_path, "metrics.attempt_1.jsonl") == "".join(map(row, range(6, 10))) + rows[3] + rows[4]
    assert read(tmp_path, "metrics.attempt_2.jsonl") == "".join(rows[5:]) + "torn\n"


@pytest.mark.parametrize("fatal_call", [0, 1, 2])
def test_a_crash_in_between_loses_no_row_and_repeats_none(
    tmp_path: Path, fatal_call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_attempt(tmp_path, 1, first_step=1)
    begin_attempt(tmp_path, 2, first_step=4)
    rows = [row(step, 1 if step < 4 else 2) for step in range(1, 7)]
    (tmp_path / "metrics.jsonl").write_text("".join(rows))
    real, calls = metrics_cut.write_durably, 0

    def crash(path: Path, content: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls > fatal_call:
            raise KeyboardInterrupt
        real(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(metrics_cut, "write_durably", crash)
        with pytest.raises(KeyboardInterrupt):
            cut_metrics(tmp_path, 2, attempt=3)
    cut_metrics(tmp_path, 2, attempt=3)
    assert read(tmp_path) == "".join(rows[:2])
    assert read(tmp_path, "metrics.attempt_1.jsonl") == rows[2]
    assert read(tmp_path, "metrics.attempt_2.jsonl") == "".join(rows[3:])
