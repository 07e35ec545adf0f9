"""Where a run goes, what stands against it, and who holds it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hp_train.checkpoint.fence import newest_attempt
from hp_train.checkpoint.size import DiskNeed
from hp_train.config.schema import TrainerConfig
from hp_train.errors import ConfigError, SupersededError
from hp_train.launch import owner as owners
from hp_train.launch import run_dir as runs
from hp_train.launch.outcome import Cause, Outcome, read_outcome, read_outcomes, write_outcome
from hp_train.launch.owner import STALE_AFTER_S, Owner, living_owner, own, process_start
from hp_train.launch.start import machine_faults, resume_run


def _config(**trainer: object) -> TrainerConfig:
    config = TrainerConfig()
    for key, value in trainer.items():
        setattr(config.trainer, key, value)
    return config


def test_place_of_a_run_by_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HP_TRAIN_RUNS", raising=False)
    stamp = r"\d{8}-\d{6}-[0-9a-f]{4}"

    def place(config: TrainerConfig, recipe: str = "llama") -> str:
        return str(runs.choose_run_dir(config, recipe).relative_to(tmp_path))

    assert re.fullmatch(rf"runs/llama/{stamp}", place(_config()))
    assert re.fullmatch(rf"runs/run/{stamp}", place(_config(), recipe=""))
    monkeypatch.setenv("HP_TRAIN_RUNS", str(tmp_path / "env"))
    assert re.fullmatch(rf"env/mine/{stamp}", place(_config(run_name="mine")))
    assert re.fullmatch(rf"key/llama/{stamp}", place(_config(runs_root="key")))
    assert place(_config(run_dir="here", runs_root="key")) == "here"


def test_faults_of_a_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("")
    (tmp_path / "empty").mkdir()
    held = runs.create_run_dir(_config(run_dir=str(tmp_path / "held")), "")
    (held / "config.yaml").write_text("{}")

    def fault(path: str, need: int = 0) -> list[str]:
        return runs.check_run_dir(_config(run_dir=str(tmp_path / path)), DiskNeed(need, 1))

    assert fault("new/deep") == fault("empty") == []
    below = f"{tmp_path}/file/below"
    assert fault("file/below") == [f"trainer.run_dir={below} cannot be made: {tmp_path}/file is not a folder"]
    assert "is not empty and holds no run" in fault("other")[0]
    assert f"holds a run already; go on with it by `hp-train resume {held}` or trainer.resume=auto" in fault("held")[0]
    spaced = tmp_path / "two words"
    held.rename(spaced)
    assert f"go on with it by `hp-train resume '{spaced}'`" in fault("two words")[0]
    spaced.rename(held)
    assert re.search(r"has [\d,.]+ GB free, one checkpoint needs 1,000,000.0 TB", fault("new", 10**18)[0])
    assert runs.check_run_dir(_config(run_name="../up"))[0].startswith("trainer.run_name=../up must be the name")
    assert "does not exist" in runs.check_resume_dir(tmp_path / "nowhere")[0]
    assert "there is no config.yaml" in runs.check_resume_dir(tmp_path / "other")[0]
    assert runs.check_resume_dir(held) == []


def test_folder_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere: chmod would prove nothing
    assert runs.check_run_dir(_config(runs_root=str(tmp_path))) == [
        f"trainer.runs_root={tmp_path} is not writable ({tmp_path})"
    ]


def test_folder_on_no_disk_is_not_writable_whatever_the_size() -> None:
    for need in (0, 1, 10**9):
        assert runs.check_run_dir(_config(run_dir="/proc/foo"), DiskNeed(need, 4)) == [
            "trainer.run_dir=/proc/foo is not writable (/proc stores no files)"
        ]


def test_small_sizes_are_told_in_their_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=999)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    [fault] = runs.check_run_dir(_config(runs_root=str(tmp_path)), DiskNeed(1_500_000, 4))
    assert "has 999 bytes free, one checkpoint needs 1.5 MB" in fault


def test_room_is_needed_for_all_checkpoints_less_those_that_are_there(tmp_path: Path, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=300 * 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    config = _config(runs_root=str(tmp_path))
    [fault] = runs.check_run_dir(config, DiskNeed(96 * 10**9, 4))
    assert "has too little room: checkpoint 96 GB x 4 = 384 GB, 300 GB free; free some" in fault
    assert runs.check_run_dir(config, DiskNeed(96 * 10**9, 4, bytes_there=96 * 10**9)) == []
    assert DiskNeed(96 * 10**9, 4).describe(2_100 * 10**9) == "checkpoint 96 GB x 4 = 384 GB, 2.1 TB free"


def test_folder_taken_meanwhile_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    runs.create_run_dir(_config(run_dir=str(tmp_path / "run")), "")  # empty: made by a scheduler, say
    (tmp_path / "run/config.yaml").write_text("{}")
    with pytest.raises(ConfigError, match="holds a run already"):
        runs.create_run_dir(_config(run_dir=str(tmp_path / "run")), "")


def test_a_folder_is_held_while_its_launcher_lives_and_no_longer(tmp_path: Path) -> None:
    script = "import sys; from pathlib import Path; from hp_train.launch.owner import own\n"
    script += "with own(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        assert living_owner(tmp_path).pid == holder.pid
        with pytest.raises(ConfigError, match=f"in use by process {holder.pid} on "), own(tmp_path):
            pass
        assert "is in use by process" in runs.check_run_dir(_config(run_dir=str(tmp_path)))[0]
        holder.kill()
        holder.wait()
        assert (tmp_path / "owner.json").exists() and living_owner(tmp_path) is None  # killed: the note stayed
    with own(tmp_path):
        assert living_owner(tmp_path).pid == os.getpid()
    assert not (tmp_path / "owner.json").exists()


def test_owners_are_told_apart_by_start_time_here_and_by_heartbeat_elsewhere() -> None:
    me = Owner.myself()
    assert me.lives()
    assert not dataclasses.replace(me, process_start=me.process_start - 1).lives()  # the pid was given away again
    far = dataclasses.replace(me, machine="elsewhere", host="node7")
    assert far.lives()
    assert not dataclasses.replace(far, heartbeat=time.time() - STALE_AFTER_S - 1).lives()
    assert process_start(2**22 + 1) is None  # above the kernel's largest pid


def test_the_same_job_takes_over_from_another_machine_at_once_and_nobody_else_does(monkeypatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "815")
    elsewhere = dataclasses.replace(Owner.myself(), machine="elsewhere")
    assert not elsewhere.lives() and dataclasses.replace(elsewhere, job_id="816").lives()
    assert Owner.myself().lives()  # on this machine the process itself tells
    assert "(job 815)" in elsewhere.describe()


def _rival(folder: Path, attempt: int) -> None:
    """As a launcher on another machine leaves its mark."""
    (folder / f"logs/attempt_{attempt}").mkdir(parents=True, exist_ok=True)
    rival = dataclasses.replace(Owner.myself(attempt), machine="elsewhere", host="node7")
    (folder / "owner.json").write_text(json.dumps(dataclasses.asdict(rival)))


def test_of_two_that_start_at_once_one_steps_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse, looks = owners._refuse_if_taken, []

    def look_too_early(run_dir: Path) -> None:
        looks.append(run_dir)
        if len(looks) == 1:  # nobody is there yet; then the rival is quicker
            _rival(run_dir, 2)
            return
        refuse(run_dir)

    monkeypatch.setattr(owners, "_refuse_if_taken", look_too_early)
    with pytest.raises(ConfigError, match="is in use by process .* on node7"), own(tmp_path):
        pass
    assert newest_attempt(tmp_path) == 2, "the folder of the one that stepped back stayed"


def test_a_heartbeat_never_takes_a_folder_back(tmp_path: Path) -> None:
    with own(tmp_path) as ownership:
        ownership.beat()
        ownership.check()
        _rival(tmp_path, 2)
        ownership.beat()
        assert living_owner(tmp_path).host == "node7"
        for act in (ownership.check, ownership.next_attempt):
            with pytest.raises(SupersededError, match="attempt 2 has taken over"):
                act()
    assert living_owner(tmp_path).host == "node7", "the note of the newer attempt was taken away"


def test_attempts_count_on_from_the_highest(tmp_path: Path) -> None:
    assert newest_attempt(tmp_path) == 0
    for name in ("attempt_2", "attempt_10", "attempt_x"):
        (tmp_path / "logs" / name).mkdir(parents=True)
    assert newest_attempt(tmp_path) == 10
    with own(tmp_path) as ownership:
        assert (ownership.attempt, ownership.next_attempt()) == (11, 12)


def test_outcomes_are_kept_for_each_attempt_and_the_newest_speaks_for_the_run(tmp_path: Path) -> None:
    assert read_outcome(tmp_path) is None and read_outcomes(tmp_path) == ()
    late = Outcome(12, Cause.STOPPED, 75, 41, nodes=("node2", "node10"))
    early = Outcome(3, Cause.OUT_OF_MEMORY, 1, 7, rank=2, message="full")
    for outcome in (late, early):
        write_outcome(tmp_path, outcome)
    assert read_outcome(tmp_path) == late and read_outcome(tmp_path, 3) == early
    assert read_outcomes(tmp_path) == (early, late)
    assert read_outcome(tmp_path, 4) is None


def test_finished_run_says_so_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = _config(max_steps=10)
    write_outcome(tmp_path, Outcome(1, Cause.DONE, 0, 10))
    assert resume_run(tmp_path, config, overrides=[], argv=[]) == 0
    printed = capsys.readouterr().out
    assert "is finished: all 10 steps are taken" in printed
    assert f"hp-train resume {tmp_path} trainer.max_steps=20" in printed
    assert not (tmp_path / "owner.json").exists() and newest_attempt(tmp_path) == 1


def test_all_faults_of_the_machine_are_told_without_torch(tmp_path: Path) -> None:
    (tmp_path / "held/logs").mkdir(parents=True)
    script = f"""
import json, sys
from hp_train.config.schema import TrainerConfig
from hp_train.launch.start import machine_faults
config = TrainerConfig()
config.trainer.run_dir, config.trainer.device = {str(tmp_path / "held")!r}, "cuda"
config.fsdp.dp_shard_size = 4
print(json.dumps([machine_faults(config), "torch" in sys.modules]))
"""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    faults, loaded_torch = json.loads(done.stdout)
    assert len(faults) == 2 and not loaded_torch
    assert "holds a run already" in faults[0]
    assert faults[1].startswith("trainer.device=cuda but this machine shows no NVIDIA GPU")


def test_disk_must_hold_a_checkpoint(tmp_path: Path) -> None:
    config = _config(run_dir=str(tmp_path / "run"), device="cpu")
    config.model.dim, config.model.num_layers = 10**6, 10**4  # 1.7e17 parameters
    assert any("one checkpoint needs" in fault for fault in machine_faults(config))
