"""`hp-train doctor`: try what training needs on this machine, a line each with the way out; exit 1 if something fails.

No torch in this process; two processes of its own add up a number, as the workers of a run do. `--slurm` looks at the
cluster instead and drafts a launcher option for it.
"""

from __future__ import annotations

import argparse

from hp_train.errors import ExitCode
from hp_train.launch.machine_checks import Verdict, check_machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--slurm", action="store_true", help="what this SLURM cluster offers, and a launcher option for it"
    )


def run(args: argparse.Namespace) -> int:
    """Print each check as it is done; return 1 if one failed."""
    if args.slurm:
        from hp_train.launch.slurm_site import doctor

        lines, is_well = doctor()
        print(*lines, sep="\n")
        return int(ExitCode.DONE if is_well else ExitCode.FAILED)
    verdicts = []
    for check in check_machine():
        print(check.line(), flush=True)
        verdicts.append(check.verdict)
    failed, warned = verdicts.count(Verdict.FAILED), verdicts.count(Verdict.WARNING)
    if failed:
        print(f"{failed} of {len(verdicts)} checks failed")
        return int(ExitCode.FAILED)
    print("ready to train" + (f", {warned} warning{'s' if warned > 1 else ''}" if warned else ""))
    return int(ExitCode.DONE)
