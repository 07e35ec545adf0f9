"""The argument parser of a verb, as the command, its help and completion need it. No torch."""

from __future__ import annotations

import argparse
import importlib
from types import ModuleType
from typing import NoReturn

from hp_train.commands.arguments import add_config_dir
from hp_train.errors import ConfigError
from hp_train.verbs import VERBS


class VerbParser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line; its subparsers are of this class too."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with the complaint and the usage."""
        usage = " ".join(self.format_usage().removeprefix("usage: ").split())
        verb = self.prog.removeprefix("hp-train").strip()
        raise ConfigError(f"{verb + ': ' if verb else ''}{message}; usage: {usage}")

    def refuse_empty(self, args: argparse.Namespace) -> None:
        """Raise ConfigError for an empty path: it would stand for the current folder, which nobody named."""
        for action in self._actions:
            if not action.option_strings and getattr(args, action.dest, None) == "":
                raise ConfigError(f"{action.metavar} is empty; usage: {' '.join(self.format_usage().split()[1:])}")


def command_module(verb: str) -> ModuleType:
    """Return the module of a verb, imported now."""
    return importlib.import_module(f"hp_train.commands.{verb}")


def parser_of(verb: str) -> VerbParser:
    """Return the parser of any verb but train, whose arguments are Hydra's."""
    module = command_module(verb)
    about = (module.__doc__ or VERBS[verb]).partition("\n\n")[0]
    parser = VerbParser(prog=f"hp-train {verb}", description=about)
    module.add_arguments(parser)
    return parser


def train_parser() -> VerbParser:
    """Return the parser of `hp-train [train]`: Hydra's options, those left out that replace our config or unpickle."""
    parser = VerbParser(prog="hp-train", add_help=False, allow_abbrev=False, usage="hp-train --help")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--help", "-h", action="store_true", help="verbs, options and groups")
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"), help="print the config instead of training")
    parser.add_argument("--resolve", action="store_true", help="with --cfg: the values of interpolations")
    parser.add_argument("--package", "-p", metavar="GROUP", help="with --cfg: one group of the config")
    parser.add_argument("--multirun", "-m", action="store_true", help="a run for each combination of key=a,b")
    add_config_dir(parser, "-cd")
    parser.add_argument(
        "--info", "-i", choices=("config", "defaults", "defaults-tree", "searchpath"), help="how the config comes about"
    )
    return parser
