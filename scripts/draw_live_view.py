"""Draw the live view of a run as it stood after a given step, as an SVG: the README's picture.

python scripts/draw_live_view.py RUN_DIR STEP OUT.svg
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from rich.console import Console

from hp_train.launch.history import History, parse_row, read_facts
from hp_train.launch.view import render


def main() -> None:
    """Read the rows of attempt 1 up to the step and render them 100 columns wide."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("step", type=int)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    history = History(facts=read_facts(arguments.run_dir / "logs" / "attempt_1"))
    for line in (arguments.run_dir / "metrics.jsonl").read_text().splitlines()[: arguments.step]:
        history.add(parse_row(line))
    console = Console(record=True, width=100, force_terminal=True, color_system="truecolor", file=io.StringIO())
    console.print(render(history, 100))
    arguments.out.write_text(console.export_svg(title="hp-train recipe=llama_fsdp_pp"), encoding="utf-8")


if __name__ == "__main__":
    main()
