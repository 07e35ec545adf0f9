"""The verbs of `hp-train`, each with its line for the help. Ground floor: imports nothing, and so starts at once.

A verb `NAME` is the module `hp_train.commands.NAME` with `add_arguments(parser)` and `run(args) -> int`.
"""

from __future__ import annotations

VERB_GROUPS = {
    "Train": {
        "train": "compose a config and train (the verb may be left out)",
        "resume": "go on with a run: resume RUN_DIR [key=value ...] (RUN_DIR: a path, last, or the end of an id)",
        "rerun": "start a new run from an old one's config: rerun RUN_DIR [key=value ...]",
        "submit": "train in a SLURM job: submit recipe=NAME launcher.nodes=N [key=value ...] [--dry-run]",
    },
    "Look": {
        "status": "state, step, time left and goodput of a run or SLURM job: status [RUN_DIR|JOB]",
        "watch": "the live view of any run, from its files: watch RUN_DIR",
        "logs": "what launcher and ranks printed: logs RUN_DIR [--rank N|--failed] [-f]",
        "cancel": "end a run or its SLURM job for good: cancel RUN_DIR|JOB",
        "runs": "list the runs with their state, step, loss and age",
        "compare": "what differs in two configs, and where the losses first differ: compare RUN RUN",
        "report": "write one web page on a run that opens without a network: report RUN_DIR",
        "doctor": "try what training needs on this machine; --slurm: what the cluster offers",
    },
    "Prepare": {
        "recipes": "list the recipes with their size and the processes they need",
        "new": "write a recipe of your own: new NAME --from RECIPE",
        "explain": "where a value comes from: explain recipe=NAME [key=value ...] KEY",
        "schedule": "list, show, draw and prove pipeline schedules",
        "data": "prepare text for training: data prepare INPUT... --out DIR",
        "help": "one group of settings, one key, or one verb: help fsdp",
        "completion": "the script that completes by the tab key: completion bash|zsh|fish",
    },
    "Use": {
        "sample": "let a run's model go on with a text: sample RUN_DIR --prompt TEXT",
        "checkpoints": "list, check and thin out a run's checkpoints: checkpoints RUN_DIR [--verify] [--prune]",
        "export": "write a run's weights as a Hugging Face directory: export RUN_DIR --to DIR",
    },
}
"""Title -> verb -> one line."""

VERBS = {verb: line for group in VERB_GROUPS.values() for verb, line in group.items()}
"""Verb -> one line."""

WITH_ARGV = ("resume", "rerun", "submit")
"""Verbs whose `run` takes the command line as well, to record it in the run that they start."""
