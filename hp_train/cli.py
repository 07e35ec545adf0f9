"""The command `hp-train`: takes the verb off the arguments, calls one function, prints what went wrong, exits.

Verbs with a config (train, which may be left out) go through Hydra's entry; the others through argparse. Modules are
imported where they are needed: a verb pays for its own imports only.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys

from hp_train.commands.verb_parser import command_module, parser_of, train_parser
from hp_train.errors import ConfigError, ExitCode, HpTrainError
from hp_train.plugins import load_all, take_options
from hp_train.verbs import VERBS, WITH_ARGV


def main() -> int:
    """Entry of the console script; returns the exit code."""
    argv = list(sys.argv)
    if sys.stdout is None:  # closed by the caller: nobody wants to read
        sys.stdout = open(os.devnull, "w")
    try:
        code = _dispatch(argv[1:], argv)
        sys.stdout.flush()
        return code
    except HpTrainError as error:
        messages = error.messages if isinstance(error, ConfigError) else str(error).splitlines()
        for message in messages:
            print(f"hp-train: {' '.join(message.split())}", file=sys.stderr)
        return int(error.exit_code)
    except BrokenPipeError:  # `hp-train --cfg job | head`: who read the output has enough
        _drop_output()
        return int(ExitCode.DONE)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            print(f"hp-train: {error.filename}: longer than a file's name or path may be", file=sys.stderr)
        elif not _can_write_output():
            print(f"hp-train: the output can't be written: {error.strerror}", file=sys.stderr)
        else:
            raise
        return int(ExitCode.USER_ERROR)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)


def _can_write_output() -> bool:
    """Whether standard output takes another line; if not, it is let go of, or exiting would fail on it again."""
    try:
        print(flush=True)
    except OSError:
        _drop_output()
        return False
    return True


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: list[str], argv: list[str]) -> int:
    arguments, plugins = take_options(arguments)
    load_all(plugins)  # before anything reads the schema, which plugins add to
    if not arguments:
        return command_module("overview").run()
    first = arguments[0]
    if {"=", "."} & set(first) or first.startswith(("-", "~", "+")):
        return _train(arguments, argv)
    if first not in VERBS:
        from hp_train.commands.respell import wrong_verb

        raise ConfigError(wrong_verb(arguments))
    if first == "train":
        return _train(arguments[1:], argv)
    parser = parser_of(first)
    # Overrides may stand before and after options; a verb that has verbs of its own cannot take them so.
    parse = parser.parse_intermixed_args if first in WITH_ARGV else parser.parse_args
    args = parse(arguments[1:])
    parser.refuse_empty(args)
    command = command_module(first)
    return command.run(args, argv) if first in WITH_ARGV else command.run(args)


def _train(arguments: list[str], argv: list[str]) -> int:
    options = _parse_options(arguments)
    if options.version:
        from importlib.metadata import version  # slow to import

        print(f"hp-train {version('hp-train')}")
        return 0
    if options.help:
        from hp_train.config.help_text import overview
        from hp_train.config.search_path import search_path

        print(overview(search_path(options.config_dir)))
        return 0
    from hp_train.config import compose
    from hp_train.config.override_check import check_request
    from hp_train.config.search_path import search_path

    path = search_path(options.config_dir)
    request = check_request(options.overrides, path, multirun=options.multirun)
    flags = _flags_for_hydra(options)
    prints_only = bool(flags) and flags != ["--multirun"]
    jobs = compose.run_hydra(flags, request, strict=prints_only)
    return 0 if prints_only else command_module("train").run(jobs, argv)


def _parse_options(arguments: list[str]) -> argparse.Namespace:
    """Parse Hydra's options, of which those that would replace our config or unpickle a file are not offered."""
    parser = train_parser()
    options, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        known = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
        from hp_train.commands.respell import unknown_option

        raise ConfigError(unknown_option(unknown, arguments, known))
    if options.package is not None and not options.cfg:
        raise ConfigError(f"--package {options.package} goes with --cfg job")
    if options.resolve and not options.cfg:
        raise ConfigError("--resolve goes with --cfg job")
    if options.package is not None:
        from hp_train.config.schema_tree import SECTIONS

        if options.package not in (*SECTIONS, "_global_"):
            raise ConfigError(f"--package {options.package} is no group; use {', '.join(SECTIONS)}")
    return options


def _flags_for_hydra(options: argparse.Namespace) -> list[str]:
    flags = ["--cfg", options.cfg] if options.cfg else []
    flags += ["--resolve"] if options.resolve else []
    flags += ["--package", options.package] if options.package else []
    flags += ["--info", options.info] if options.info else []
    flags += ["--multirun"] if options.multirun else []
    return flags
