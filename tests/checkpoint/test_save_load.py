"""One process: what is saved comes back bit for bit, crashes at any moment lose nothing, old checkpoints go."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from hp_train.checkpoint import layout, storage
from hp_train.checkpoint.inspection import slowest_save_s
from hp_train.checkpoint.layout import FileRecord, encode_json, is_committed, newest_committed, read_manifest
from hp_train.checkpoint.load import find_checkpoint, load_checkpoint
from hp_train.checkpoint.metadata_json import decode_metadata
from hp_train.checkpoint.retention import prune
from hp_train.checkpoint.safetensors_file import DTYPE_CODES
from hp_train.checkpoint.save import save_checkpoint, write_shards
from hp_train.checkpoint.state import CheckpointState
from hp_train.checkpoint.storage import SavePolicy
from hp_train.checkpoint.tensor_shard import shard_of
from hp_train.new_folder import sync
from tests.checkpoint.whole_runs import assert_same_bits, save_steps, tensors_of, tiny_state

PROGRESS = {"step": 7, "tokens_seen": 2**40 + 1, "lr": 0.1 + 0.2, "nested": {"list": [1, None, "ü"]}}


@pytest.mark.parametrize("steps_before_load", [0, 3], ids=["fresh optimizer", "used optimizer"])
def test_everything_comes_back_bit_for_bit(tmp_path: Path, steps_before_load: int) -> None:
    saved = tiny_state(1, steps=2, progress=PROGRESS)
    folder = save_checkpoint(tmp_path, 7, saved, SavePolicy(1))
    loaded = tiny_state(2, steps=steps_before_load)
    assert load_checkpoint(folder, loaded) == PROGRESS
    assert_same_bits(tensors_of(saved), tensors_of(loaded))


def test_loading_into_a_fresh_optimizer_trains_on_as_if_never_stopped(tmp_path: Path) -> None:
    straight, resumed = tiny_state(1, steps=2), tiny_state(2, steps=0)
    load_checkpoint(save_checkpoint(tmp_path, 2, straight, SavePolicy(1)), resumed)
    for state in (straight, resumed):
        for number, parameter in enumerate(state.parameters.values()):
            parameter.grad = torch.full_like(parameter, 0.1 * number)
        state.optimizer.step()
    assert_same_bits(tensors_of(straight), tensors_of(resumed))


def test_sgd_has_no_state_to_save(tmp_path: Path) -> None:
    def state(seed: int) -> CheckpointState:
        parameters = tiny_state(seed).parameters
        return CheckpointState(parameters, torch.optim.SGD(parameters.values(), lr=1.0))

    saved, loaded = state(1), state(2)
    folder = save_checkpoint(tmp_path, 1, saved, SavePolicy(1))
    load_checkpoint(folder, loaded)
    assert_same_bits(tensors_of(saved), tensors_of(loaded))
    assert not list(folder.glob("optimizer*"))


def test_a_manifest_tells_how_long_its_files_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all of it went into one file: times of files say when each was done, not when it was begun."""
    real = storage.write_safetensors

    def slow(path: Path, entries: list) -> FileRecord:
        time.sleep(0.3 if path.name.startswith("model") else 0.0)
        return real(path, entries)

    monkeypatch.setattr(storage, "write_safetensors", slow)
    assert slowest_save_s(tmp_path) == 0.0
    save_steps(tmp_path, 1)
    took_s = slowest_save_s(tmp_path)
    assert 0.3 <= took_s < 10
    monkeypatch.undo()
    save_steps(tmp_path, 2)
    assert slowest_save_s(tmp_path) == took_s
    assert read_manifest(tmp_path / "step_00000002").write_s < 0.3


def test_the_folder_of_all_checkpoints_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new name lasts once the folder that holds it is synced: of the checkpoint, and of `checkpoints` itself."""
    synced: list[Path] = []
    monkeypatch.setattr(storage, "sync", lambda path: (synced.append(path), sync(path)))
    save_steps(tmp_path / "checkpoints", 1)
    assert synced[0] == tmp_path and synced[-1] == tmp_path / "checkpoints"
    synced.clear()
    save_steps(tmp_path / "checkpoints", 2)
    assert tmp_path not in synced


def test_a_tied_weight_is_stored_once_and_read_into_both_copies(tmp_path: Path) -> None:
    aliases = {"lm_head.weight": "model.embed_tokens.weight"}
    saved, loaded = (tiny_state(seed, steps=2) for seed in (1, 2))
    folder = save_checkpoint(tmp_path, 1, CheckpointState(saved.parameters, saved.optimizer, aliases), SavePolicy(1))
    names = json.loads((folder / "metadata.json").read_bytes())["tensors"]
    assert not [name for name in names if "lm_head" in name]
    load_checkpoint(folder, CheckpointState(loaded.parameters, loaded.optimizer, aliases))
    before, after = tensors_of(saved), tensors_of(loaded)
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name.replace("lm_head.weight", "model.embed_tokens.weight")]), name


def test_one_parameter_under_two_names_is_stored_once(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3, 2))
    parameters = {"model.embed_tokens.weight": weight, "lm_head.weight": weight}
    state = CheckpointState(parameters, torch.optim.AdamW([weight]), {"lm_head.weight": "model.embed_tokens.weight"})
    folder = save_checkpoint(tmp_path, 1, state, SavePolicy(1))
    with torch.no_grad():
        weight.zero_()
    load_checkpoint(folder, state)
    assert torch.equal(weight, torch.ones(3, 2))


def test_every_dtype_and_shape_is_a_plain_safetensors_file(tmp_path: Path) -> None:
    tensors = {}
    for dtype in DTYPE_CODES:
        for shape in [(), (1,), (0,), (0, 5), (3, 5, 2)]:
            raw = torch.arange(1, 1 + max(1, torch.Size(shape).numel()) * 8, dtype=torch.uint8)
            raw = raw.remainder(2) if dtype is torch.bool else raw
            tensor = raw.view(dtype)[: torch.Size(shape).numel()].reshape(shape)
            tensors[f"model.{dtype}.{len(shape)}.{sum(shape)}"] = tensor
    tensors["model.transposed"] = torch.arange(6.0).reshape(2, 3).T
    shards = {name: shard_of(tensor) for name, tensor in tensors.items()}
    folder = write_shards(tmp_path, 1, shards, encode_json({}), SavePolicy(1), group=None)
    with safe_open(folder / "model-rank_00000.safetensors", framework="pt") as file:
        assert_same_bits({name: file.get_tensor(name) for name in file.keys()}, tensors)
    manifest = read_manifest(folder)
    metadata, locations = decode_metadata(json.loads((folder / "metadata.json").read_bytes()), manifest)
    assert metadata.state_dict_metadata.keys() == tensors.keys()
    assert len(locations) == len(tensors)


def test_progress_that_json_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        save_checkpoint(tmp_path, 1, tiny_state(1, progress={"rng": torch.zeros(1)}), SavePolicy(1))
    assert not list(tmp_path.iterdir())


class PowerCut(BaseException):
    """The process is gone."""


@pytest.mark.parametrize("step", [2, 3], ids=["same step again", "next step"])
def test_a_crash_at_any_moment_of_a_save_leaves_a_whole_checkpoint(
    tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    real = {"rename": Path.rename, "replace": Path.replace, "rmdir": os.rmdir, "fsync": os.fsync, "unlink": os.unlink}

    def failing(name: str, fatal_call: int):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls > fatal_call:  # and everything after: nothing is tidied up by a dead process
                raise PowerCut
            return real[name](*args, **kwargs)

        return call

    save_steps(tmp_path / "before", 1, 2)
    new = tiny_state(9, progress={"step": step, "new": True})
    outcomes = set()
    for fatal_call in range(1000):
        checkpoints, calls = tmp_path / f"cut_{fatal_call}", 0
        shutil.copytree(tmp_path / "before", checkpoints)
        with monkeypatch.context() as patch:
            for owner, name in [(Path, "rename"), (Path, "replace"), (os, "rmdir"), (os, "fsync"), (os, "unlink")]:
                patch.setattr(owner, name, failing(name, fatal_call))
            try:
                save_checkpoint(checkpoints, step, new, SavePolicy(1))
                finished = True
            except PowerCut:
                finished = False
            except BaseException as error:
                assert "PowerCut" in repr(error), error  # DCP carries it to all ranks inside its own exception
                finished = False
        found = find_checkpoint(checkpoints)
        assert found is not None, f"nothing left after a crash at call {fatal_call}"
        loaded = tiny_state(8)
        progress = load_checkpoint(found, loaded)
        assert progress.get("new") or progress["step"] == 2, f"the newest was lost by a crash at call {fatal_call}"
        expected = new if progress.get("new") else tiny_state(progress["step"])
        assert_same_bits(tensors_of(loaded), tensors_of(expected))
        outcomes.add(progress.get("new", False))
        if finished:
            assert progress.get("new") and len(list(checkpoints.glob("step_*"))) == 1
            break
        if fatal_call % 4 == 0:
            save_steps(checkpoints, 4, keep_last=1)  # the next save tidies up
            assert [path.name for path in checkpoints.glob("step_*")] == ["step_00000004"]
    assert finished and outcomes == {True, False}
    assert fatal_call > 15, "the crash points were not reached"


def test_the_oldest_go_and_the_newest_stay(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, 30, 40, keep_last=2)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_00000030", "step_00000040"]
    assert newest_committed(tmp_path) == tmp_path / "step_00000040"


def test_leftovers_and_passed_over_checkpoints_go_with_the_next_save(tmp_path: Path) -> None:
    folders = save_steps(tmp_path, 10, 20, 30)
    (folders[1] / "COMMITTED").unlink()
    (folders[2] / "progress.json").write_text("{}")
    (tmp_path / "step_00000035.attempt_2.saving").mkdir()
    (tmp_path / "step_00000005.deleting").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step_00000002.bak").mkdir()
    save_steps(tmp_path, 15, keep_last=2)  # resumed from step 10
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["latest", "notes.txt", "step_00000002.bak", "step_00000010", "step_00000015"]


def test_nothing_is_deleted_when_the_new_checkpoint_is_not_there(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    prune(tmp_path, saved_step=30, keep_last=1)
    assert len(list(tmp_path.glob("step_*"))) == 2


def test_what_cannot_be_deleted_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, 10)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("hp_train.checkpoint.retention.delete_folder", refuse)
    save_steps(tmp_path, 20, keep_last=1)
    assert is_committed(tmp_path / "step_00000020") and is_committed(tmp_path / "step_00000010")
    assert "step_00000010 could not be deleted" in caplog.text


def test_a_file_is_synced_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(layout.os, "fsync", lambda fd: (events.append("sync"), fsync(fd))[1])
    monkeypatch.setattr(Path, "replace", lambda self, to: (events.append("name"), replace(self, to))[1])
    layout.write_durably(tmp_path / "x", b"content")
    assert events == ["sync", "name"] and (tmp_path / "x").read_bytes() == b"content"
