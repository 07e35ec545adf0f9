"""What a person may type for RUN_DIR: a path, `last`, the end of an id; what is said when it fits none or several."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hp_train.errors import ConfigError
from hp_train.launch.find_run import find_run, list_runs, started_at

IDS = ("llama_pp/20261130-100000-aaaa", "llama_pp/20261130-110000-bbaa", "llama_fsdp/20261130-090000-cccc", "mine")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of four runs, the first the oldest; beside them a folder that is none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HP_TRAIN_RUNS", raising=False)
    for order, name in enumerate(IDS):
        logs = tmp_path / "runs" / name / "logs"
        logs.mkdir(parents=True)
        config = logs.parent / "config.yaml"
        config.touch()
        for path in (config, logs):
            os.utime(path, (1000.0 + order, 1000.0 + order))
    (tmp_path / "runs" / "llama_pp" / "scratch").mkdir()
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("last", "mine"),
        ("runs/llama_pp/20261130-100000-aaaa", IDS[0]),
        ("-aaaa", IDS[0]),
        ("20261130-090000-cccc", IDS[2]),
        ("llama_pp/20261130-110000-bbaa", IDS[1]),
        ("llama_pp/20261130-110000-bbaa/", IDS[1]),
        ("mine", "mine"),
        ("cccc", IDS[2]),
    ],
)
def test_a_run_is_found(root: Path, typed: str, found: str) -> None:
    assert find_run(typed) == root / found


def test_last_is_the_run_resumed_last_and_follows_the_variable(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / IDS[1] / "logs" / "attempt_2").mkdir()  # what resuming does
    assert find_run("last") == root / IDS[1]
    monkeypatch.setenv("HP_TRAIN_RUNS", str(root / "llama_fsdp"))
    monkeypatch.chdir(root / "llama_pp")
    assert find_run("last") == root / IDS[2]
    assert sorted(list_runs(root)) == sorted(root / name for name in IDS)


def test_a_folder_named_last_that_holds_a_run_is_that_run(root: Path) -> None:
    (root.parent / "last").mkdir()
    assert find_run("last") == root / "mine", "a folder without a run is none"
    (root.parent / "last" / "config.yaml").touch()
    assert find_run("last") == root.parent / "last"


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("aa", ("aa fits 2 runs", IDS[0], IDS[1], "more of the id")),
        ("ccdc", ("ends in ccdc", f"did you mean {IDS[2]}?")),
        ("20261130-090000-ccdc", ("does not exist", f"did you mean {IDS[2]}?")),
        ("runs/llama_pp", ("holds no run", "no config.yaml", "in it: 20261130-110000-bbaa, 20261130-100000-aaaa")),
        ("zzzzzz", ("does not exist", "4 runs", "a path, last, or the end")),
        (" ", ("empty",)),
    ],
)
def test_what_fits_no_run_or_several_is_told(root: Path, typed: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as raised:
        find_run(typed)
    [message] = raised.value.messages
    assert all(word in message for word in words), message


def test_no_runs_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HP_TRAIN_RUNS", raising=False)
    with pytest.raises(ConfigError, match="last: there is no run in"):
        find_run("last")
    assert started_at(tmp_path / "gone") == 0.0
