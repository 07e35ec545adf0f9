"""Imports run downward only, and the parts that need no torch do not load it. Read off the sources, then tried."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "hp_train"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if not {"configs", "recipes"} & set(path.parts))

FLOORS = [
    {"errors", "topology", "verbs", "registry", "new_folder"},
    {"config.schema", "config.fields", "config.numbers"},
    {"schedule", "models.shapes"},
    {"stage_split", "compile.pass_config", "training.progress", "training.run_context", "pipeline_plan"},
    {"models", "data", "checkpoint", "fully_shard", "pipeline_parallel", "compile"},
    {"parallel", "config", "plugins", "pretrained", "generation"},
    {"training", "planning"},
    {"launch"},
    {"reports"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
"""From the ground up; a name covers what is below it, the longest name counts."""

TORCHLESS = [
    "hp_train.cli", "hp_train.commands.overview", "hp_train.commands.train", "hp_train.commands.resume",
    "hp_train.commands.recipes", "hp_train.commands.data", "hp_train.commands.schedule", "hp_train.config.compose",
    "hp_train.config.validate", "hp_train.config.schema", "hp_train.config.help_text", "hp_train.stage_split",
    "hp_train.topology", "hp_train.schedule", "hp_train.models.shapes", "hp_train.compile.pass_config",
    "hp_train.data.index", "hp_train.launch.start", "hp_train.launch.devices", "hp_train.pipeline_plan",
    "hp_train.training.run_context", "hp_train.errors",
]  # fmt: skip


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def floor_of(name: str) -> int:
    """The floor of a module, by the longest entry of FLOORS that covers it; config's parts stand beside the rules."""
    candidates = [
        (len(entry), floor)
        for floor, entries in enumerate(FLOORS)
        for entry in entries
        if name == entry or name.startswith(entry + ".")
    ]
    assert candidates, f"hp_train.{name} stands on no floor; add it to FLOORS"
    return max(candidates)[1]


def imports_of(path: Path) -> set[str]:
    """Names of our modules that a file imports anywhere, inside functions and for types too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                submodule = PACKAGE.parent / Path(*node.module.split("."), f"{alias.name}.py")
                found.add(f"{node.module}.{alias.name}" if submodule.exists() else node.module)
    return {name.removeprefix("hp_train.") for name in found if name.startswith("hp_train.")}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_run_downward(path: Path) -> None:
    name = name_of(path)
    if not name:
        return
    upward = [imported for imported in imports_of(path) if floor_of(imported) > floor_of(name)]
    assert upward == []


@pytest.mark.parametrize(
    ("part", "others"),
    [
        ("models", ("compile.", "fully_shard.", "pipeline_parallel.", "checkpoint.", "data.", "parallel.")),
        ("fully_shard", ("models.", "pipeline_parallel.", "checkpoint.", "data.")),
        ("pipeline_parallel", ("models.", "fully_shard.", "checkpoint.", "data.")),
        ("schedule", ("config.", "models.", "data.", "compile.")),
    ],
)
def test_parts_of_one_floor_that_must_not_know_each_other(part: str, others: tuple[str, ...]) -> None:
    ground = ("models.shapes",)
    found = {
        name_of(path): [name for name in imports_of(path) if name.startswith(others) and name not in ground]
        for path in MODULES
        if name_of(path).startswith(f"{part}.")
    }
    assert found and not any(found.values()), found


def test_no_torch_where_none_is_needed() -> None:
    code = "import sys, importlib\n" + "".join(
        f"importlib.import_module({name!r}); assert 'torch' not in sys.modules, {name!r}\n" for name in TORCHLESS
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_modules_that_say_no_torch_import_none() -> None:
    """A module whose docstring promises `No torch.` is tried, beside those that the design names."""
    promised = [
        f"hp_train.{name_of(path)}"
        for path in MODULES
        if (ast.get_docstring(ast.parse(path.read_text())) or "").rstrip().endswith("No torch.")
    ]
    assert len(promised) > 10
    code = "import sys, importlib\n" + "".join(
        f"importlib.import_module({name!r}); assert 'torch' not in sys.modules, {name!r}\n" for name in promised
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_workers_never_import_hydra() -> None:
    code = "import sys, hp_train.launch.worker, hp_train.training.trainer\nassert 'hydra' not in sys.modules\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
