"""Run directories that are taken, cannot be made, or hold no run to go on with."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

from hp_train.launch.owner import Owner
from tests.bad_inputs.cases import Case, case, check_is_refused, each_of
from tests.commands.run_folders import saved_config


def a_run_whose_config_is(text: str) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        a_run(folder)
        (folder / "run" / "config.yaml").write_text(text)

    return prepare


def a_run(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text(saved_config("{max_steps: 3}"))
    (folder / "run" / "overrides.yaml").write_text("recipe: ''\noverrides: []\n")


def in_use(**owner: object) -> Callable[[Path], None]:
    """A run whose launcher is this process, with changes."""

    def prepare(folder: Path) -> None:
        a_run(folder)
        held = dataclasses.asdict(Owner.myself()) | owner
        (folder / "run" / "owner.json").write_text(json.dumps(held))

    return prepare


ELSEWHERE = {"machine": "another boot", "host": "node7", "pid": 4711}


def a_broken_run(folder: Path) -> None:
    a_run(folder)
    (folder / "run" / "config.yaml").write_text("trainer: {max_steps: [3\n")


def a_file(folder: Path) -> None:
    (folder / "run").write_text("no folder\n")


def a_full_folder(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "thesis.tex").write_text("precious\n")


MACHINE = [
    case(
        "holds a run",
        "trainer.run_dir=run",
        ("trainer.run_dir=run holds a run already", "hp-train resume"),
        prepare=a_run,
    ),
    case("holds something", "trainer.run_dir=run", ("trainer.run_dir=run is not empty",), prepare=a_full_folder),
    case("is a file", "trainer.run_dir=run", ("trainer.run_dir=run", "is not a folder"), prepare=a_file),
    case("not writable", "trainer.run_dir=/proc/run", ("trainer.run_dir=/proc/run",)),
    case("run name", "trainer.run_name=../../x", ("trainer.run_name=../../x",)),
    case("long run name", f"trainer.run_name={'x' * 256}", ("trainer.run_name=xx", "too long", "255 bytes")),
    case("long run folder", f"trainer.run_dir={'x' * 256}/y", ("trainer.run_dir=xx", "cannot be made", "255 bytes")),
    case("long path", f"resume {'x' * 256}", ("xx", "longer than a file's name or path may be")),
    case("long name of a recipe", f"new {'x' * 256}", ("NAME=xx", "too long")),
    case("recipe called null", "new null", ("NAME=null", "no recipe")),
    case("disk", "model=llama3_405b data=random trainer.device=cpu", ("one checkpoint needs 4.9 TB",)),
    case("in use here", "trainer.run_dir=run", ("trainer.run_dir=run is in use by process",), prepare=in_use()),
    case(
        "in use elsewhere",
        "trainer.run_dir=run",
        ("in use by process 4711 on node7",),
        prepare=in_use(**ELSEWHERE, heartbeat=time.time() + 3000),
    ),
    case(
        "left by a launcher that died",
        "trainer.run_dir=run",
        ("holds a run already",),
        prepare=in_use(**ELSEWHERE, heartbeat=time.time() - 61),
    ),
    case("resume of a run in use", "resume run", ("is in use by process",), prepare=in_use()),
    case("missing run", "resume nowhere", ("nowhere does not exist",)),
    case("no run", "resume empty", ("empty holds no run",), prepare=lambda folder: (folder / "empty").mkdir()),
    case("resume with a typo", "resume run trainer.max_stepz=5", ("unknown key trainer.max_stepz",), prepare=a_run),
    case(
        "resume with a bad value",
        "resume run trainer.max_steps=0",
        ("trainer.max_steps=0 is out of bounds",),
        prepare=a_run,
    ),
    case(
        "resume against a rule",
        "resume run model.num_heads=3 model.num_kv_heads=3",
        ("model.num_heads=3 does not divide",),
        prepare=a_run,
    ),
    case(
        "resume in another folder",
        "resume run trainer.run_dir=other trainer.run_name=x",
        ("trainer.run_dir=other has no effect", "leave it out"),
        ("trainer.run_name=x has no effect", "leave it out"),
        prepare=a_run,
    ),
    case("resume with a bad option", "resume run fsdp=dpp", ("fsdp=dpp", "ddp"), prepare=a_run),
    case("resume of a broken config", "resume run", ("run/config.yaml cannot be used",), prepare=a_broken_run),
    *(
        case(f"resume of {what}", "resume run", ("run/config.yaml cannot be used", *words), prepare=prepare)
        for what, words, prepare in (
            ("an empty config", ("holds no config",), a_run_whose_config_is("")),
            ("a list for a config", ("holds no config",), a_run_whose_config_is("[trainer]\n")),
            ("a text for a config", (), a_run_whose_config_is("trainer\n")),
            ("a config without groups", ("lacks accelerator, fsdp",), a_run_whose_config_is("trainer: {}\n")),
        )
    ),
]


@each_of(*MACHINE)
def test_is_refused_in_one_line_each(bad: Case, tmp_path: Path) -> None:
    check_is_refused(bad, tmp_path)
