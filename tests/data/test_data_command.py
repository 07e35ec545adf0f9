"""`hp-train data prepare` as typed: what it prints, and how it refuses."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from hp_train import cli
from hp_train.commands import data
from hp_train.config.schema import DataSection
from hp_train.data.index import describe_source
from hp_train.data.source import open_data


def typed(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["hp-train", "data", *map(str, words)])
    return cli.main()


def test_it_says_what_was_written_and_how_to_train_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("play.txt").write_text("one\n%\ntwo\n%\n%\nthree and a bit more\n")
    words = ["prepare", "play.txt", "--tokenizer", "byte", "--separator", "%", "--out", "my tokens", "--workers", "1"]
    assert typed(monkeypatch, *words) == 0
    out, err = capsys.readouterr()
    first, second = out.splitlines()
    assert first.startswith(
        "my tokens: 3 documents (1 without text left out), 32 tokens as uint16, vocabulary 259 (byte), "
    )
    assert second.endswith("data=tokens data.path='my tokens' model.vocab_size=259")
    assert err == ""
    config = DataSection(name="tokens", path="my tokens", document_boundaries="pad")
    assert describe_source(config).longest_document == 22
    assert bytes(open_data(config, 3, 0, "train", 259).batch([0]).tokens[0].astype("uint8"))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["prepare", "a.txt", "--tokenizer", "byte"], "required: --out"),
        (["prepare", "a.txt", "--out", "o"], "required: --tokenizer"),
        (["prepare", "--tokenizer", "byte", "--out", "o"], "required: INPUT"),
        ([], "required: prepare"),
        (["prepar"], "invalid choice: 'prepar'"),
        (
            ["prepare", "a.txt", "--tokenizer", "byte", "--out", "o", "--workers", "0"],
            "--workers 0 is not a number of processes",
        ),
        (
            ["prepare", "a.txt", "--tokenizer", "byte", "--out", "o", "--workers", "two"],
            "--workers two is not a number of",
        ),
        (
            ["prepare", "a.txt", "--tokenizer", "byte", "--out", "o", "--separator", ""],
            "--separator must be the text of one line",
        ),
        (
            ["prepare", "a.txt", "--tokenizer", "byte", "--out", "o", "--eos-token", "x", "--no-eos"],
            "--eos-token x has no effect",
        ),
        (["prepare", "a.txt", "--tokenizer", "byte", "--out", "/"], "--out / is not the name of a new folder"),
        (
            ["prepare", "a.txt", "--tokenizer", "no.json", "--out", "o"],
            "--tokenizer no.json cannot be read (No such file",
        ),
        (["prepare", "gone.txt", "--tokenizer", "byte", "--out", "o"], "gone.txt does not exist"),
        (
            ["prepare", "a.txt", "--tokenizer", "byte", "--out", "a.txt/o"],
            "--out a.txt/o cannot be made: a.txt is not a folder",
        ),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    words: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text")
    assert typed(monkeypatch, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hp-train: ") and complaint in line
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize(
    ("words", "complaints"),
    [
        (
            "prepare gone.txt lost.txt --tokenizer no.json --out a.txt --workers 0",
            ["--workers 0", "--tokenizer no.json cannot", "gone.txt does not", "lost.txt does not", "--out a.txt"],
        ),
        ("prepare @ --tokenizer @ --out @", ["--out is empty", "--tokenizer is empty", "an INPUT is empty"]),
        ("prepare a.txt gone.txt --tokenizer byte --out a.txt", ["gone.txt does not", "--out a.txt exists already"]),
    ],
)
def test_all_mistakes_are_told_at_once(
    words: str,
    complaints: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text")
    assert typed(monkeypatch, *("" if word == "@" else word for word in words.split())) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(complaints)
    assert all(said in line for said, line in zip(complaints, lines, strict=True)), lines


def test_without_a_terminal_a_line_comes_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data, "PLAIN_REPORT_EVERY_S", 0.0)
    (tmp_path / "a.txt").write_text("x" * 2_500_000)
    assert typed(monkeypatch, "prepare", tmp_path / "a.txt", "--tokenizer", "byte", "--out", tmp_path / "o") == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[-1] == "read 2 of 2 MB (100%), 1 documents, 2,500,001 tokens"


def test_on_a_terminal_a_bar_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "a.txt").write_text("x" * 2_500_000)
    assert typed(monkeypatch, "prepare", tmp_path / "a.txt", "--tokenizer", "byte", "--out", tmp_path / "o") == 0
    assert "2,500,001 tokens" in terminal.getvalue() and "\x1b[" in terminal.getvalue()
