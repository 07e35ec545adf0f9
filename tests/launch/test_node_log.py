"""What the ranks of a node print ends in one file, line by line, whatever they print and whatever the disk does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hp_train.launch import node_log as module
from hp_train.launch.node_log import NodeLog


def _print_as(log: NodeLog, rank: int, text: str, *, stderr: str = "") -> None:
    """Print as torch's agent has a worker print: it opens the path it is given, once for each stream."""
    code = "import sys; sys.stdout.write(sys.stdin.read()); sys.stdout.flush(); sys.stderr.write(sys.argv[1])"
    path = log.pipe_for(rank)
    with open(path, "w") as out, open(path, "w") as err:
        subprocess.run([sys.executable, "-c", code, stderr], input=text, text=True, stdout=out, stderr=err, check=True)
    log.release()


def test_whole_lines_behind_their_ranks_and_torn_ones_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "node_0.log"
    with NodeLog(path) as log:
        _print_as(log, 8, "one\ntwo\nhalf", stderr=" a line\n\nrest é")
        assert log.last_words(8) == "one\ntwo\nhalf a line\n\nrest é"
        assert log.last_words(9) == ""
        assert path.read_text() == "[rank 8] one\n[rank 8] two\n[rank 8] half a line\n[rank 8] \n"
        _print_as(log, 9, "x" * 200_000)  # no end of a line in sight, and more than a pipe holds
    lines = path.read_text().splitlines()
    assert [line for line in lines if line.startswith("[rank 8] ")][4:] == ["[rank 8] rest é"]
    assert "".join(line.removeprefix("[rank 9] ") for line in lines if line.startswith("[rank 9] ")) == "x" * 200_000


def test_a_silent_node_makes_no_file(tmp_path: Path) -> None:
    with NodeLog(tmp_path / "node_0.log") as log:
        _print_as(log, 0, "")
    assert not list(tmp_path.iterdir())


def test_a_disk_without_room_holds_up_no_rank_and_what_is_lost_is_counted(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "_MOST_KEPT", 1000)
    path = tmp_path / "away" / "node_0.log"
    with NodeLog(path) as log:
        _print_as(log, 0, "".join(f"line {number}\n" for number in range(50_000)))  # 0.5 MB
        assert log.last_words(0).splitlines()[-1] == "line 49999"
        path.parent.mkdir()
        _print_as(log, 1, "back\n")
    first, *kept = path.read_text().splitlines()
    lost = int(first.removeprefix("[launcher] ").removesuffix(" bytes could not be written here"))
    whole = sum(len(f"[rank 0] line {number}\n") for number in range(50_000))
    assert lost + sum(len(line) + 1 for line in kept[:-1]) == whole
    assert kept[-2:] == ["[rank 0] line 49999", "[rank 1] back"]


@pytest.mark.parametrize("names", [["node_10.log", "node_2.log", "node_x.log", "agent_1.log"]])
def test_logs_are_found_in_the_order_of_the_nodes(tmp_path: Path, names: list[str]) -> None:
    folder = tmp_path / "logs/attempt_3"
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).touch()
    assert [path.name for path in module.node_logs(tmp_path, 3)] == ["node_2.log", "node_10.log"]
