"""`hp-train checkpoints` lists what there is, finds what is damaged, and deletes only what is of no use."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pytest

from hp_train.checkpoint import inspection, layout
from hp_train.checkpoint.layout import StepFolder
from hp_train.commands import checkpoints as command
from hp_train.errors import ConfigError
from hp_train.launch.owner import own
from tests.checkpoint.whole_runs import save_steps


def run(run_dir: Path, *, verify: bool = False, prune: bool = False) -> int:
    return command.run(argparse.Namespace(run_dir=str(run_dir), verify=verify, prune=prune))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Steps 10 to 50; 50 has a flipped bit, 40 is cut short, 45 was never finished."""
    (tmp_path / "config.yaml").write_text("checkpoint: {keep_last: 1, keep_every: 20}\n")
    folder = tmp_path / "checkpoints"
    save_steps(folder, 10, 20, 30, 40, 50)
    flipped = folder / "step_00000050/model-rank_00000.safetensors"
    content = bytearray(flipped.read_bytes())
    content[-1] ^= 1
    flipped.write_bytes(content)
    cut = folder / "step_00000040/optimizer-rank_00000.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    (folder / "step_00000045.attempt_3.saving").mkdir()
    return tmp_path


def test_a_listing_sees_sizes_and_a_verified_one_every_bit(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(run_dir) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["50", "45", "40", "30", "20", "10"]
    assert "complete; resume goes on from here" in lines[0]
    assert "unfinished: step_00000045.attempt_3.saving" in lines[1]
    assert "damaged: optimizer-rank_00000.safetensors has" in lines[2]
    assert run(run_dir, verify=True) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "damaged: model-rank_00000.safetensors does not match its checksum" in lines[0]
    assert "every checksum holds; resume goes on from here" in lines[3]


def test_a_folder_that_the_run_takes_away_meanwhile_is_left_out(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def thinned_out(folder: Path) -> list[StepFolder]:
        found = layout.step_folders(folder)
        shutil.rmtree(found[-1].path)
        return found

    monkeypatch.setattr(inspection, "step_folders", thinned_out)
    run(run_dir)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["50", "45", "40", "30", "20"]


def test_pruning_keeps_what_holds_and_what_is_asked_for(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with own(run_dir):  # this very process may; another may not
        owner = json.loads((run_dir / "owner.json").read_text())
    (run_dir / "owner.json").write_text(json.dumps(owner))
    with pytest.raises(ConfigError, match="is in use by process"):
        run(run_dir, prune=True)
    (run_dir / "owner.json").unlink()
    assert run(run_dir, prune=True) == 0
    left = sorted(path.name for path in (run_dir / "checkpoints").glob("step_*"))
    assert left == ["step_00000020", "step_00000030"]  # the newest that holds, and a multiple of 20
    assert (run_dir / "checkpoints/latest").read_text() == "step_00000030\n"
    told = capsys.readouterr().out
    assert "deleted step_00000010: beyond the last 1" in told and "deleted step_00000050: damaged" in told
    assert run(run_dir, verify=True) == 0


def test_where_nothing_holds_nothing_is_deleted(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (run_dir / "checkpoints").glob("step_*"):
        (folder / "COMMITTED").unlink(missing_ok=True)
    before = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert run(run_dir, prune=True) == 1
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == before
    assert "nothing is deleted" in capsys.readouterr().out


def test_keep_every_survives_the_saves_of_a_run(tmp_path: Path) -> None:
    from hp_train.checkpoint.retention import prune

    save_steps(tmp_path, 10, 20, 30, 40)
    prune(tmp_path, saved_step=40, keep_last=1, keep_every=20)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_00000020", "step_00000040"]
    assert (tmp_path / "latest").read_text() == "step_00000040\n"
