"""Rows are whole and in order, whatever the disk does in between."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from hp_train.training.row_file import RowFile


def test_rows_that_a_full_disk_refuses_are_written_when_there_is_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows"
    rows = RowFile(path)
    rows.append("one")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6, hard))  # two bytes of the next row fit
    try:
        rows.append("two")
        rows.append("three")
        rows.sync()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "one\n", "a torn row stayed"
    warned = capsys.readouterr().err
    assert warned.count("WARNING") == 1 and "rows are kept in memory" in warned
    rows.append("four")
    rows.close()
    assert path.read_text() == "one\ntwo\nthree\nfour\n"
