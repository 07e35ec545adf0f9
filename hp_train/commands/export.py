"""`hp-train export RUN_DIR --to DIR`: a run's weights as a Hugging Face directory. No torch until all is checked."""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path

from hp_train.commands.arguments import add_run_dir, whole_number
from hp_train.errors import ConfigError, ExitCode
from hp_train.launch.find_run import find_run

DTYPES = ("fp32", "bf16", "fp16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run_dir(parser)
    parser.add_argument("--to", required=True, metavar="DIR", help="folder to make; must not exist yet")
    parser.add_argument(
        "--dtype", default="fp32", metavar="|".join(DTYPES), help="of the weights (fp32, as they were trained)"
    )
    parser.add_argument("--step", metavar="N", help="the checkpoint of this step (the newest)")
    parser.add_argument("--tokenizer", metavar="byte|FILE.json", help="in place of the tokenizer of the run's data")


def run(args: argparse.Namespace) -> int:
    """Check, write, and say what was written. Raises ConfigError."""
    faults, step = [], None
    if args.dtype not in DTYPES:
        faults.append(f"--dtype {args.dtype} is not a choice; use {', '.join(DTYPES)}")
    if not Path(args.to).name:
        faults.append(
            f"--to {args.to} is not the name of a new folder" if args.to else "--to is empty; name a new folder"
        )
    if args.step is not None:
        step, fault = whole_number("--step", args.step, 1)
        faults += fault
    if faults:
        raise ConfigError(*faults)
    run_dir, to = find_run(args.run_dir), Path(args.to).expanduser().absolute()
    started = time.monotonic()
    from hp_train.pretrained.run_config import newest_config
    from hp_train.pretrained.run_tokenizer import tokenizer_of_run

    config = newest_config(run_dir)
    tokenizer = tokenizer_of_run(config, args.tokenizer)
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise ConfigError(f"--to {args.to} exists already; choose another folder or remove it")
    from hp_train.pretrained import export  # torch is loaded here, when nothing is left to refuse
    from hp_train.pretrained.stored_weights import StoredWeights

    with StoredWeights(run_dir, config.model, step) as weights:
        done = export.export(weights, config.model, tokenizer, to, export.DTYPES[args.dtype])
    files = "1 file" if done.num_files == 1 else f"{done.num_files} files"
    print(
        f"{to}: step {done.step}, {done.num_parameters:,} parameters as {args.dtype}, "
        f"{done.num_bytes / 1e6:,.1f} MB in {files}, {time.monotonic() - started:.1f} s"
    )
    if tokenizer.name is None:
        print(f"without a tokenizer: data={config.data.name} has no text; name one with --tokenizer")
    print(f"train on from it: hp-train model.pretrained={shlex.quote(str(to))} data=tokens data.path=...")
    return ExitCode.DONE
