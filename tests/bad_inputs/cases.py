"""What a case of bad input is, and what must come of it when it is given to the real command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.command import Finished, hp_train, slowness_of_this_machine

LIMIT_S = 0.7
TRIES = 3
RECIPE = "recipe=llama_fsdp_pp"
CPU = "trainer.device=cpu"


@dataclass(frozen=True)
class Case:
    """Arguments, the files that must be there, and for each line of stderr the words that it must hold."""

    name: str
    arguments: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    files: dict[str, str] = field(default_factory=dict)
    prepare: Callable[[Path], None] | None = None
    env: dict[str, str] = field(default_factory=dict)


def case(name: str, arguments: str | list[str], *lines: tuple[str, ...], **more: object) -> Case:
    words = tuple(arguments.split() if isinstance(arguments, str) else arguments)
    return Case(name, words, lines, **more)  # type: ignore[arg-type]


def together(name: str, *cases: Case) -> Case:
    """Several faults of one kind in one command, each with its line, in the order in which they are typed."""
    return case(name, [word for bad in cases for word in bad.arguments], *[line for bad in cases for line in bad.lines])


def each_of(*cases: Case) -> pytest.MarkDecorator:
    """Run a test for each case, under its name, which must be its own."""
    assert len({case.name for case in cases}) == len(cases)
    return pytest.mark.parametrize("bad", cases, ids=lambda bad: bad.name)


def check_is_refused(bad: Case, tmp_path: Path) -> None:
    """Type the command: exit 2, a line for each fault with its words, nothing else printed, nothing left behind."""
    for name, text in bad.files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if bad.prepare is not None:
        bad.prepare(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    finished = refused_in_time(bad, tmp_path)
    assert finished.code == 2, finished
    assert "Traceback" not in finished.stderr and "torch was imported" not in finished.stderr, finished.stderr
    assert finished.stdout == "", finished
    assert len(finished.lines) == len(bad.lines), finished.stderr
    for line, words in zip(finished.lines, bad.lines, strict=True):
        assert line.startswith("hp-train: ")
        assert all(word in line for word in words), (line, words)
    left = [path for path in sorted(tmp_path.rglob("*")) if path not in before and ".poison" not in str(path)]
    assert left == [], "a refused run leaves nothing behind"


def refused_in_time(bad: Case, cwd: Path) -> Finished:
    """Run the command; the fastest of a few tries must be in time, on a busy machine in proportion to its slowness."""
    times = []
    for _ in range(TRIES):
        finished = hp_train(*bad.arguments, cwd=cwd, env=bad.env)
        times.append(finished.wall_s)
        if finished.wall_s < LIMIT_S or finished.code != 2:
            return finished
        times[-1] /= max(1.0, slowness_of_this_machine())
        if times[-1] < LIMIT_S:
            return finished
    raise AssertionError(f"{bad.arguments} took {min(times):.2f} s, in proportion; the limit is {LIMIT_S} s")
