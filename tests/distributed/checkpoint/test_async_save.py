"""Saving in the background while ranks train: what is written is the state at the call, and errors reach every rank."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hp_train.checkpoint import storage
from hp_train.checkpoint.asynchronous import AsyncSaver
from hp_train.checkpoint.load import find_checkpoint, load_checkpoint
from hp_train.checkpoint.save import save_checkpoint
from hp_train.checkpoint.state import CheckpointState
from hp_train.checkpoint.storage import SavePolicy
from hp_train.errors import CheckpointError
from tests.checkpoint.whole_runs import assert_same_bits
from tests.distributed.ranks import run_ranks


def _sharded_state() -> CheckpointState:
    model = torch.nn.Linear(5, 3)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = CheckpointState(dict(model.named_parameters()), optimizer, {}, {"step": 1})
    _train(state)
    return state


def _train(state: CheckpointState) -> None:
    for parameter in state.parameters.values():
        parameter.grad = torch.full_like(parameter, 0.5)
    state.optimizer.step()


def _local(state: CheckpointState) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, parameter in state.parameters.items():
        values = {"model": parameter.detach(), **state.optimizer.state[parameter]}
        for key, value in values.items():
            tensors[f"{name} {key}"] = (value.to_local() if isinstance(value, DTensor) else value).clone()
    return tensors


def train_while_saving(rank: int, world_size: int, root: Path) -> None:
    state = _sharded_state()
    saver = AsyncSaver(root, SavePolicy(2))
    released, real = threading.Event(), storage.write_safetensors

    def held_back(path, entries):
        assert released.wait(60)
        return real(path, entries)

    storage.write_safetensors = held_back
    at_save = _local(state)
    assert saver.save(1, state) == root / "step_00000001"
    for number in range(20):  # collectives of training while those of the save are under way
        _train(state)
        total = torch.tensor([float(number)])
        dist.all_reduce(total)
        assert total.item() == world_size * number
    assert find_checkpoint(root) is None, "nothing is complete while a rank has not written"
    released.set()
    saver.wait()
    assert find_checkpoint(root) == root / "step_00000001"
    trained = _local(state)
    load_checkpoint(root / "step_00000001", state)
    assert_same_bits(_local(state), at_save)
    assert not torch.equal(trained["weight model"], at_save["weight model"])

    buffers = {name: buffer.data_ptr() for name, buffer in saver._buffers.items()}
    for step in (2, 3):
        saver.save(step, state)  # waits for the one before
    saver.wait()
    assert {name: buffer.data_ptr() for name, buffer in saver._buffers.items()} == buffers
    assert sorted(path.name for path in root.glob("step_*")) == ["step_00000002", "step_00000003"]

    _fail_in_the_background(rank, saver, state, root)


def _fail_in_the_background(rank: int, saver: AsyncSaver, state: CheckpointState, root: Path) -> None:
    def full(path, entries):
        raise OSError(28, "No space left on device", str(path))

    before = storage.write_safetensors
    for surface in (saver.wait, lambda: saver.save(5, state)):
        storage.write_safetensors = full if rank == 1 else before
        saver.save(4, state)
        with pytest.raises(CheckpointError, match=r"step 4 was not written \(rank 1: .*No space left on device"):
            surface()
        storage.write_safetensors = before
        saver.wait()  # raised once
        assert find_checkpoint(root) == root / "step_00000003"
    saver.save(6, state)
    saver.wait()
    assert find_checkpoint(root) == root / "step_00000006"


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    run_ranks(2, train_while_saving, tmp_path)


def test_one_process_without_a_group_saves_in_the_background(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    state = CheckpointState({"w": weight}, torch.optim.AdamW([weight]), {}, {"step": 1})
    saver = AsyncSaver(tmp_path, SavePolicy(1))
    saver.save(1, state)
    with torch.no_grad():
        weight.zero_()
    saver.wait()
    assert load_checkpoint(tmp_path / "step_00000001", state) == {"step": 1}
    assert torch.equal(weight, torch.ones(4))


@pytest.mark.gpu
def test_cuda_state_is_staged_in_pinned_memory_and_written_as_it_was(tmp_path: Path) -> None:
    def state(value: float) -> CheckpointState:
        weight = torch.nn.Parameter(torch.full((1024, 1024), value, device="cuda"))
        return CheckpointState({"w": weight}, torch.optim.AdamW([weight], fused=True), {}, {"step": 1})

    saved, loaded, saver = state(1.0), state(3.0), AsyncSaver(tmp_path, SavePolicy(2))
    saver.save(1, saved)
    with torch.no_grad():
        saved.parameters["w"].fill_(2.0)
    saver.wait()
    assert saver._buffers["model.w"].is_pinned() and saver._buffers["optimizer.w.step"].is_pinned()
    load_checkpoint(tmp_path / "step_00000001", loaded)
    assert (loaded.parameters["w"] == 1.0).all()
    save_checkpoint(tmp_path, 2, saved, SavePolicy(2))
    load_checkpoint(tmp_path / "step_00000002", loaded)
    assert (loaded.parameters["w"] == 2.0).all()
