"""Settings of a SLURM job: what is refused, in which words, and what has no effect."""

from __future__ import annotations

import pytest

from hp_train.config.rules_slurm import array_tasks
from hp_train.config.schema import ContainerSection, TrainerConfig
from hp_train.config.validate import faults, warnings


def _config(**launcher: object) -> TrainerConfig:
    config = TrainerConfig()
    config.launcher.name = "slurm"
    for name, value in launcher.items():
        section, _, key = name.rpartition("__")
        setattr(getattr(config, section) if section else config.launcher, key, value)
    return config


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"time": "12h", "array": "0-7:2,9%2", "env": ["A=b c", "B=\n"], "gpu_request": "gres:a100"},
        {"nodes": 2, "fsdp__dp_shard_size": 4},
        {"nodes": 2, "nproc_per_node": 2, "fsdp__dp_shard_size": -1},
        {"container": ContainerSection("pyxis", "nvcr.io#nvidia/pytorch", ["/data:/data:ro"])},
    ],
)
def test_sound_jobs(settings: dict) -> None:
    config = _config(**settings)
    config.trainer.global_batch_size = 8
    assert faults(config) == [] and warnings(config) == []


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"time": "90"}, ("launcher.time=90 has no unit", "90m")),
        ({"time": "1:30"}, ("launcher.time=1:30 is not a time",)),
        ({"time": "2m", "signal_lead": "2m"}, ("launcher.signal_lead=2m is not shorter than launcher.time=2m",)),
        ({"array": "0-"}, ("launcher.array=0- is no list of task numbers", "0-7%2")),
        ({"array": "5-3"}, ("launcher.array=5-3 names no task",)),
        ({"array": "0-999999999999"}, ("more than 10000 tasks",)),
        ({"trainer__run_name": "a\n#SBATCH --uid=0"}, ("trainer.run_name=", "line break")),
        ({"partition": "a\n#SBATCH --uid=0"}, ("launcher.partition=", "line break")),
        ({"extra_lines": ["ulimit -l\nrm -rf /"]}, ("launcher.extra_lines=", "line break")),
        ({"env": ["A B=c"]}, ("'A B=c' is not NAME=VALUE",)),
        ({"gpu_request": "8"}, ("launcher.gpu_request=8 is not gpus_per_node, gres",)),
        (
            {"container": ContainerSection("pyxis")},
            ("launcher.container.runtime=pyxis needs launcher.container.image",),
        ),
        ({"container": ContainerSection("apptainer", "a.sif", ["data"])}, ("'data' is not SOURCE or SOURCE:TARGET",)),
        ({"fsdp__dp_shard_size": -1}, ("needs launcher.nproc_per_node",)),
        ({"nodes": 3, "fsdp__dp_shard_size": 4}, ("launcher.nodes=3 does not divide the mesh of 4", "1, 2 or 4")),
        (
            {"nodes": 2, "nproc_per_node": 8, "fsdp__dp_shard_size": 8},
            ("launcher.nodes=2 x launcher.nproc_per_node=8 = 16 is not the mesh fsdp.dp_shard_size=8 = 8",),
        ),
        ({"name": "local", "nodes": 2}, ("launcher=slurm",)),
    ],
)
def test_refusals(settings: dict, words: tuple[str, ...]) -> None:
    (fault,) = faults(_config(**settings))
    assert all(word in fault for word in words), fault
    assert "\n" not in fault


@pytest.mark.parametrize(
    "settings, words",
    [
        (
            {"name": "local", "partition": "main"},
            "launcher.partition=main has no effect: launcher=local submits no job",
        ),
        ({"continue_by": "none", "max_requeues": 3}, "launcher.max_requeues=3 has no effect"),
        ({"container": ContainerSection(image="x.sif")}, "launcher.container.image=x.sif has no effect"),
    ],
)
def test_settings_without_effect_are_told(settings: dict, words: str) -> None:
    (warning,) = warnings(_config(**settings))
    assert warning.startswith(words)


def test_array_tasks_as_slurm_reads_them() -> None:
    assert array_tasks("0-4:2,7%2") == (0, 2, 4, 7)
