"""A plugin that an installed package brings by an entry point, found by the real command and by its workers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tests.command import hp_train

EXTENSION = """
import os

from hp_train import registry

with open(os.environ["IMPORTED_BY"], "a") as file:
    print(os.environ.get("RANK", "launcher"), file=file)
registry.register_pp_schedule("installed", build="some_package.orders:build")
"""
ORDERS = """
from hp_train.schedule import build_schedule


def build(own, pp_size, num_microbatches, stages_per_rank):
    return build_schedule("gpipe", pp_size, num_microbatches)
"""
PACKAGE = {
    "some_package/__init__.py": "",
    "some_package/ext.py": EXTENSION,
    "some_package/orders.py": ORDERS,
    "some_package-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: some-package\nVersion: 1.0\n",
    "some_package-1.0.dist-info/entry_points.txt": "[hp_train.plugins]\nsome_package = some_package.ext\n",
}
RUN = [
    "recipe=llama_pp", "pp.schedule=installed", "trainer.run_dir=run", "trainer.max_steps=2", "trainer.eval_every=0",
    "trainer.device=cpu", "checkpoint.every=0",
]  # fmt: skip


def test_the_plugin_of_an_installed_package_is_found_by_launcher_and_workers(tmp_path: Path) -> None:
    installed, imported_by = tmp_path / "site packages", tmp_path / "imported_by"
    for name, text in PACKAGE.items():
        (installed / name).parent.mkdir(parents=True, exist_ok=True)
        (installed / name).write_text(text)
    without = hp_train(*RUN, cwd=tmp_path)
    assert without.code == 2 and "pp.schedule=installed is no schedule" in without.stderr
    done = hp_train(
        *RUN, cwd=tmp_path, torch=True, env={"PYTHONPATH": str(installed), "IMPORTED_BY": str(imported_by)}
    )
    assert done.code == 0, done.stderr
    assert set(imported_by.read_text().split()) == {"launcher", "0", "1"}
    extension = installed / "some_package/ext.py"
    assert json.loads((tmp_path / "run/capsule.json").read_text())["plugins"] == [
        {
            "name": "some_package.ext",
            "file": str(extension),
            "sha256": hashlib.sha256(extension.read_bytes()).hexdigest(),
            "folder": str(installed),
        }
    ]
    assert json.loads((tmp_path / "run/pass_config.json").read_text())["pp_schedule"] == "installed"
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2
