"""`hp-train help [GROUP|KEY|VERB]`: what a group of settings, one key or one verb is for. No torch."""

from __future__ import annotations

import argparse

from hp_train.commands.arguments import add_config_dir
from hp_train.commands.verb_parser import parser_of
from hp_train.config.help_text import help_on, overview
from hp_train.config.schema_tree import SECTIONS
from hp_train.config.search_path import search_path
from hp_train.verbs import VERBS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "topic", nargs="?", metavar="GROUP|KEY|VERB", help="what to tell about; without it, an overview"
    )
    add_config_dir(parser)


def run(args: argparse.Namespace) -> int:
    """Print the help. Raises ConfigError if there is none on the topic."""
    path = search_path(args.config_dir)
    if args.topic is None:
        print(overview(path))
        return 0
    texts = [help_on(args.topic, path)] if args.topic in SECTIONS or args.topic not in VERBS else []
    if args.topic == "train":
        texts.append(f"hp-train train: {VERBS['train']}; hp-train --help tells its options")
    elif args.topic in VERBS:  # `data` is a group and a verb
        texts.append(parser_of(args.topic).format_help().rstrip())
    print("\n\n".join(texts))
    return 0
