"""What `hp-train doctor` makes of what it finds on a machine, and how it ends."""

from __future__ import annotations

import argparse
import resource
from collections import namedtuple
from pathlib import Path

import pytest

from hp_train.commands import doctor
from hp_train.launch import machine_checks
from hp_train.launch.machine_checks import Check, Verdict

OK, WARNING, FAILED = Verdict
GIB = 2**30


@pytest.mark.parametrize(
    ("found", "verdict"),
    [((3, 10, 9), FAILED), ((3, 11, 0), OK), ((3, 13, 5), OK), ((3, 14, 0), FAILED)],
)
def test_python(found: tuple[int, ...], verdict: Verdict) -> None:
    assert machine_checks.check_python(found).verdict is verdict


@pytest.mark.parametrize(
    ("found", "verdict"),
    [(None, FAILED), ("2.10.1", FAILED), ("2.11.0+cu128", OK), ("2.14.0a0+git1", OK), ("3.0.0", FAILED)],
)
def test_torch(found: str | None, verdict: Verdict) -> None:
    check = machine_checks.check_torch(found)
    assert check.verdict is verdict and bool(check.way_out) == (verdict is FAILED)


@pytest.mark.parametrize(
    ("limits", "verdict", "way_out"),
    [
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), OK, ""),
        ((4096, 4096), OK, ""),
        ((1024, resource.RLIM_INFINITY), WARNING, "ulimit -n 65536"),
        ((1024, 2048), WARNING, "ulimit -n 2048"),
        ((128, 128), FAILED, "raise nofile in /etc/security/limits.conf"),
    ],
)
def test_open_files(limits: tuple[int, int], verdict: Verdict, way_out: str) -> None:
    check = machine_checks.check_open_files(limits)
    assert (check.verdict, check.way_out) == (verdict, way_out)


def test_shared_memory_matters_where_there_are_several_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    for free, num_gpus, verdict in ((GIB, 8, OK), (GIB // 16, 0, WARNING), (GIB // 16, 8, FAILED)):
        monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda _, free=free: usage(GIB, 0, free))
        assert machine_checks.check_shared_memory(tmp_path, num_gpus).verdict is verdict
    monkeypatch.undo()
    assert machine_checks.check_shared_memory(tmp_path / "none", 8).verdict is WARNING


def test_runs_need_a_folder_with_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    (tmp_path / "file").touch()
    assert "is not a folder" in machine_checks.check_free_space(tmp_path / "file" / "runs").found
    for free, verdict in ((30e9, OK), (3e9, WARNING), (3e8, FAILED)):
        monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda _, free=free: usage(1e12, 0, free))
        assert machine_checks.check_free_space(tmp_path / "not" / "yet").verdict is verdict


def test_names_without_an_address_do_on_one_machine() -> None:
    assert machine_checks.check_host_name("localhost").verdict is OK
    check = machine_checks.check_host_name("no-such-host.invalid")
    assert check.verdict is WARNING and "/etc/hosts" in check.line()


@pytest.mark.parametrize(
    ("verdicts", "code", "last"),
    [
        ((OK, OK), 0, "ready to train"),
        ((OK, WARNING), 0, "ready to train, 1 warning"),
        ((FAILED, OK, FAILED), 1, "2 of 3 checks failed"),
    ],
)
def test_doctor_fails_where_a_check_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, verdicts: tuple[Verdict, ...], code: int, last: str
) -> None:
    found = [Check("thing", verdict, "is so", "" if verdict is OK else "mend it") for verdict in verdicts]
    monkeypatch.setattr(doctor, "check_machine", lambda: iter(found))
    assert doctor.run(argparse.Namespace(slurm=False)) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines == [*(check.line() for check in found), last]
    told = ["; way out: mend it" in line for line in lines[:-1]]
    assert told == [verdict is not OK for verdict in verdicts]
