"""Whatever happens to a checkpoint's files is seen, named and passed over; nothing in them is ever executed."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
from pathlib import Path

import pytest

from hp_train.checkpoint.layout import is_committed, newest_committed
from hp_train.checkpoint.load import find_checkpoint, load_checkpoint
from hp_train.checkpoint.save import save_checkpoint
from hp_train.checkpoint.storage import SavePolicy
from hp_train.errors import CheckpointError, ConfigError
from tests.checkpoint.whole_runs import save_steps, sign_again, tiny_state

FILES = (
    "COMMITTED",
    "manifest.json",
    "metadata.json",
    "progress.json",
    "model-rank_00000.safetensors",
    "optimizer-rank_00000.safetensors",
    "rng-rank_00000.safetensors",
)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Two good checkpoints, of steps 1 and 2."""
    save_steps(tmp_path, 1, 2)
    return tmp_path


def test_files_are_those_tested(checkpoints: Path) -> None:
    assert sorted(path.name for path in (checkpoints / "step_00000002").iterdir()) == sorted(FILES)


@pytest.mark.parametrize("name", FILES)
def test_every_bit_flip_is_found(checkpoints: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    path = checkpoints / "step_00000002" / name
    content = path.read_bytes()
    for offset in range(0, len(content), 1 + len(content) // 200):
        damaged = bytearray(content)
        damaged[offset] ^= 1 << (offset % 8)
        path.write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = find_checkpoint(checkpoints)
        assert found == checkpoints / "step_00000001", f"flip at byte {offset} of {name} was not seen"
        assert "step_00000002" in caplog.text
    path.write_bytes(content)
    assert find_checkpoint(checkpoints) == checkpoints / "step_00000002"


@pytest.mark.parametrize("name", FILES)
def test_every_truncation_is_found_without_reading_contents(checkpoints: Path, name: str) -> None:
    path = checkpoints / "step_00000002" / name
    content = path.read_bytes()
    lengths = {0, 1, len(content) // 2, len(content) - 1}
    for damaged in [content[:length] for length in lengths] + [content + b"\0"]:
        path.write_bytes(damaged)
        assert newest_committed(checkpoints) == find_checkpoint(checkpoints) == checkpoints / "step_00000001"
    path.unlink()
    assert newest_committed(checkpoints) == find_checkpoint(checkpoints) == checkpoints / "step_00000001"


def test_a_checkpoint_under_another_steps_name_is_refused(checkpoints: Path) -> None:
    (checkpoints / "step_00000002").rename(checkpoints / "step_00000009")
    assert find_checkpoint(checkpoints) == checkpoints / "step_00000001"


def test_none_is_found_where_none_holds(checkpoints: Path) -> None:
    for folder in checkpoints.glob("step_*"):
        (folder / "COMMITTED").unlink()
    assert find_checkpoint(checkpoints) is None
    assert find_checkpoint(checkpoints / "missing") is None


class Bomb:
    """Unpickling this leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.path,))


def test_planted_pickles_do_not_run(checkpoints: Path, tmp_path: Path) -> None:
    folder, fuse = checkpoints / "step_00000002", tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(fuse))
    (folder / ".metadata").write_bytes(bomb)  # where DCP's own reader would look
    (folder / "__0_0.distcp").write_bytes(bomb)
    assert find_checkpoint(checkpoints) == folder
    load_checkpoint(folder, tiny_state(5))
    for name in ("metadata.json", "progress.json", "model-rank_00000.safetensors"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(bomb)
        sign_again(folder)
        with pytest.raises(CheckpointError):
            load_checkpoint(folder, tiny_state(5))
        (folder / name).write_bytes(content)
        sign_again(folder)
    load_checkpoint(folder, tiny_state(5))
    assert not fuse.exists()
    pickle.loads(bomb)
    assert fuse.exists(), "the bomb was a dud"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("file", "../step_00000001/model-rank_00000.safetensors"),
        ("file", "/etc/passwd"),
        ("file", "absent.safetensors"),
        ("offsets", [-1, 0]),
        ("offsets", [1, 0]),
        ("offsets", [0]),
        ("sizes", [4, 3]),
        ("sizes", ["5", 3]),
        ("sizes", [True, 15]),
        ("key", "model.norm.weight"),
        ("key", "unheard of"),
        ("sizes", None),
    ],
)
def test_metadata_with_valid_checksums_is_still_distrusted(checkpoints: Path, field: str, value: object) -> None:
    folder = checkpoints / "step_00000002"
    metadata = json.loads((folder / "metadata.json").read_bytes())
    metadata["tensors"]["model.lm_head.weight"]["chunks"][0][field] = value
    (folder / "metadata.json").write_text(json.dumps(metadata))
    sign_again(folder)
    with pytest.raises(CheckpointError, match="step"):
        load_checkpoint(folder, tiny_state(5))


def test_a_bytes_entry_in_the_metadata_is_refused(checkpoints: Path) -> None:
    folder = checkpoints / "step_00000002"
    metadata = json.loads((folder / "metadata.json").read_bytes())
    metadata["tensors"]["model.lm_head.weight"] = {"bytes": "gASVAAAA"}
    (folder / "metadata.json").write_text(json.dumps(metadata))
    sign_again(folder)
    with pytest.raises(CheckpointError, match="makes no sense"):
        load_checkpoint(folder, tiny_state(5))


@pytest.mark.parametrize("content", ["[]", "{}", '{"format":1,"step":2,"files":{"../x":{"bytes":1,"sha256":""}}}', "{"])
def test_a_strange_manifest_is_refused(checkpoints: Path, content: str) -> None:
    import hashlib

    folder = checkpoints / "step_00000002"
    (folder / "manifest.json").write_text(content)
    (folder / "COMMITTED").write_text(hashlib.sha256(content.encode()).hexdigest() + "\n")
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(folder, tiny_state(5))
    assert find_checkpoint(checkpoints) == checkpoints / "step_00000001"


def _without_head(state):
    del state.parameters["lm_head.weight"]


def _with_more(state):
    state.parameters["model.layers.0.weight"] = state.parameters["model.norm.weight"].clone()


def _reshaped(state):
    state.parameters["model.norm.weight"].data = state.parameters["model.norm.weight"].data.new_zeros(4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_head, r"holds more than this run has: model.lm_head.weight"),
        (_with_more, r"lacks model.model.layers.0.weight"),
        (_reshaped, r"model.model.norm.weight is float32 \[3\] in it and float32 \[4\] here"),
    ],
)
def test_a_run_of_another_model_is_refused_before_anything_changes(checkpoints: Path, change, message: str) -> None:
    state = tiny_state(5)
    change(state)
    before = {name: tensor.detach().clone() for name, tensor in state.parameters.items()}
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(checkpoints / "step_00000002", state)
    assert all((tensor == before[name]).all() for name, tensor in state.parameters.items())


def test_a_damaged_checkpoint_is_replaced_when_its_step_is_saved_again(checkpoints: Path) -> None:
    folder = checkpoints / "step_00000002"
    (folder / "progress.json").write_text("{}")
    assert find_checkpoint(checkpoints) == checkpoints / "step_00000001"
    save_steps(checkpoints, 2)
    assert find_checkpoint(checkpoints) == folder
    assert sorted(path.name for path in checkpoints.glob("step_*")) == ["step_00000001", "step_00000002"]


def test_too_little_space_is_refused_before_writing(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(checkpoints)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"step 3 was not written .* bytes are needed and 100 free"):
        save_checkpoint(checkpoints, 3, tiny_state(3), SavePolicy(1))
    assert sorted(path.name for path in checkpoints.glob("step_*")) == ["step_00000001", "step_00000002"]
    assert is_committed(checkpoints / "step_00000002")
