"""How many processes a run takes, on which device; on machines that exist only as folders and values."""

from __future__ import annotations

from pathlib import Path

import pytest

from hp_train.config.schema import TrainerConfig
from hp_train.errors import ConfigError
from hp_train.launch import devices as planning
from hp_train.launch import nvidia
from hp_train.launch.devices import mesh_sizes, plan_processes
from hp_train.launch.nvidia import Devices, visible_devices
from hp_train.topology import MeshSizes

NONE, EIGHT = Devices(0, ()), Devices(8, tuple("01234567"))


def _config(device: str = "auto", *, pp: int = 1, shard: int = 1, nproc: int | str = "auto", big: bool = False):
    config = TrainerConfig()
    config.trainer.device, config.accelerator.pp_size = device, pp
    config.fsdp.dp_shard_size, config.launcher.nproc_per_node = shard, nproc
    if big:
        config.model.dim, config.model.ffn_dim, config.model.num_layers = 4096, 14336, 32
    return config


@pytest.fixture
def usable_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "torch_obstacle", lambda num_devices: None)


@pytest.mark.usefixtures("usable_torch")
@pytest.mark.parametrize(
    "config, devices, device, sizes, line",
    [
        (_config(pp=2, shard=2), EIGHT, "cuda", MeshSizes(pp=2, dp_shard=2), "using 4 of 8 GPUs (0-3)"),
        (_config(pp=2, shard=-1), EIGHT, "cuda", MeshSizes(pp=2, dp_shard=4), "using 8 of 8 GPUs (0-7)"),
        (_config(shard=-1, nproc=2), EIGHT, "cuda", MeshSizes(dp_shard=2), "using 2 of 8 GPUs (0-1)"),
        (_config(shard=2), Devices(8, ("5", "2")), "cuda", MeshSizes(dp_shard=2), "using 2 of 8 GPUs (5, 2)"),
        (_config(), Devices(1, ("0",)), "cuda", MeshSizes(), "using 1 of 1 GPU (0)"),
        (_config("cpu", pp=2, shard=2), EIGHT, "cpu", MeshSizes(pp=2, dp_shard=2), "using the CPU, 4 processes"),
        (_config(pp=2, shard=2), NONE, "cpu", MeshSizes(pp=2, dp_shard=2), "using the CPU, 4 processes"),
        (_config(pp=2, shard=-1), NONE, "cpu", MeshSizes(pp=2), "using the CPU, 2 processes"),
        (_config("cpu", shard=-1, nproc=4), NONE, "cpu", MeshSizes(dp_shard=4), "using the CPU, 4 processes"),
        (_config(pp=2, shard=2), Devices(1, ("0",)), "cpu", MeshSizes(pp=2, dp_shard=2), "using the CPU, 4 processes"),
    ],
)
def test_plans(config, devices, device, sizes, line) -> None:
    plan = plan_processes(config, devices)
    assert plan.faults == ()
    assert (plan.device, plan.sizes) == (device, sizes)
    assert plan.lines[-1] == line


@pytest.mark.usefixtures("usable_torch")
def test_a_fall_back_to_the_cpu_says_why() -> None:
    plan = plan_processes(_config(pp=2, shard=2), Devices(1, ("0",)))
    assert "the mesh asks for 4 processes, one GPU each, and 1 of 1 are visible; the model is small" in plan.lines[0]
    hidden = plan_processes(_config(), Devices(8, ()))
    assert hidden.lines[0] == "no NVIDIA GPU (8 hidden by CUDA_VISIBLE_DEVICES)"


@pytest.mark.usefixtures("usable_torch")
@pytest.mark.parametrize(
    "config, devices, words",
    [
        (_config("cuda"), NONE, ("trainer.device=cuda", "no NVIDIA GPU", "trainer.device=auto or cpu")),
        (_config("cuda", shard=16), EIGHT, ("16 processes", "8 of 8 are visible", "trainer.device=cpu")),
        (_config(shard=16, big=True), EIGHT, ("16 processes", "product is at most 8")),
        (_config(big=True), NONE, ("not trained on a CPU unless asked", "trainer.device=cpu")),
        (_config(pp=3, shard=-1), EIGHT, ("groups of 3", "launcher.nproc_per_node=6")),
        (_config(pp=16, shard=-1, big=True), EIGHT, ("16 processes",)),
    ],
)
def test_refusals_name_numbers_and_ways_out(config, devices, words) -> None:
    (fault,) = plan_processes(config, devices).faults
    assert "\n" not in fault
    for word in words:
        assert word in fault


@pytest.mark.parametrize(
    "torch_build, driver_cuda, words",
    [
        (("2.13.0+cpu", None), (12, 4), ("built without CUDA", "CUDA 12.4", "2.13.0+cpu")),
        (("2.13.0", (13, 0)), (12, 4), ("too old", "CUDA 13.0", "CUDA 12")),
        (("2.13.0", (12, 8)), None, ("libcuda.so.1 does not load",)),
    ],
)
def test_gpus_that_torch_cannot_use_are_never_passed_over(monkeypatch, torch_build, driver_cuda, words) -> None:
    monkeypatch.setattr(nvidia, "_torch_build", lambda: torch_build)
    monkeypatch.setattr(nvidia, "_driver_cuda_version", lambda: driver_cuda)
    monkeypatch.setattr(nvidia, "_driver_version", lambda: "550.54.14")
    (fault,) = plan_processes(_config(), EIGHT).faults
    for word in (*words, "driver 550.54.14", "trainer.device=cpu"):
        assert word in fault


def test_a_newer_toolkit_of_the_same_major_version_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "_torch_build", lambda: ("2.13.0", (12, 8)))
    monkeypatch.setattr(nvidia, "_driver_cuda_version", lambda: (12, 4))
    assert nvidia.torch_obstacle(8) is None


def test_torch_version_is_read_from_its_text() -> None:
    import torch

    version, cuda = nvidia._torch_build()
    assert version == torch.__version__
    assert cuda == (None if torch.version.cuda is None else tuple(map(int, torch.version.cuda.split(".")[:2])))


@pytest.mark.parametrize(
    "chosen, names",
    [
        (None, ("0", "1", "2", "3")),
        ("", ()),
        ("-1", ()),
        ("2,0", ("2", "0")),
        ("0,1,9,2", ("0", "1")),
        ("1,1", ()),
        ("0,-1,2", ("0",)),
        (" 3 , 1", ("3", "1")),
        ("GPU-8f2,MIG-11", ("GPU-8f2", "MIG-11")),
        ("none", ()),
    ],
)
def test_cuda_visible_devices_as_the_driver_reads_it(tmp_path: Path, chosen: str | None, names: tuple) -> None:
    (tmp_path / "dev").mkdir()
    for node in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / node).touch()
    environ = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert visible_devices(tmp_path, environ) == Devices(4, names)


def test_devices_are_counted_in_proc_where_dev_has_none(tmp_path: Path) -> None:
    assert visible_devices(tmp_path, {}) == NONE
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    assert visible_devices(tmp_path, {}).total == 1


def test_mesh_must_come_to_the_processes_there_are() -> None:
    assert mesh_sizes(_config(pp=2, shard=-1), 8) == MeshSizes(pp=2, dp_shard=4)
    with pytest.raises(ConfigError, match="= 4 is not the 8 processes asked for"):
        mesh_sizes(_config(pp=2, shard=2), 8)
    with pytest.raises(ConfigError, match="= 3 does not divide the 8 processes asked for"):
        mesh_sizes(_config(pp=3, shard=-1), 8)
