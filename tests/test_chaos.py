"""The short form of scripts/chaos.py; see there for what is disturbed and what must hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "scripts/chaos.py"


def test_a_disturbed_run_ends_as_the_undisturbed_one(tmp_path: Path) -> None:
    words = [sys.executable, str(SCRIPT), "--rounds", "1", "--kinds", "save", "--processes", "1", "--folder"]
    done = subprocess.run([*words, str(tmp_path)], check=False, capture_output=True, text=True, timeout=300)
    logs = "\n".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    assert "bitwise the undisturbed run's" in done.stdout
