"""A launcher process for tests: makes a run directory under argv[1] and launches the fake worker, as the command would.

python fake_launch.py ROOT PLAN_JSON [key=value ...]     (max_steps, max_restarts, nproc, timeout)
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from hp_train.config.schema import TrainerConfig
from hp_train.errors import ConfigError
from hp_train.launch import local, start


def main() -> int:
    root, plan, *settings = sys.argv[1:]
    chosen = {"max_steps": 1000, "max_restarts": 0, "nproc": 2, "timeout": 600}
    chosen.update((key, int(value)) for key, value in (setting.split("=") for setting in settings))
    config = TrainerConfig()
    config.trainer.device = "cpu"
    config.trainer.max_steps = chosen["max_steps"]
    config.trainer.run_dir = root
    config.launcher.max_restarts = chosen["max_restarts"]
    config.launcher.failure_timeout = chosen["timeout"]
    config.fsdp.dp_shard_size = chosen["nproc"]
    Path(root).mkdir(parents=True, exist_ok=True)
    real_launch = local.launch

    def launch(spec, *arguments):  # the one thing that differs from the command: which worker is started
        (spec.run_dir / "fake.json").write_text(json.dumps(json.loads(plan)))
        worker = (str(Path(__file__).with_name("fake_worker.py")),)
        return real_launch(dataclasses.replace(spec, worker=worker), *arguments)

    local.launch = launch
    try:
        return start.start_run(config, recipe="fake", overrides=[], argv=sys.argv)
    except ConfigError as error:
        print(*(f"hp-train: {line}" for line in error.messages), sep="\n", file=sys.stderr)
        return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(main())
