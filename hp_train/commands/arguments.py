"""Arguments that several verbs take, named and told alike. No torch."""

from __future__ import annotations

import argparse


def add_run_dir(parser: argparse.ArgumentParser, what: str = "the run") -> None:
    """Declare RUN_DIR, to be looked up by `find_run`."""
    help_line = f"{what}: its directory, last, or the end of its id"
    parser.add_argument("run_dir", metavar="RUN_DIR", help=help_line)


def add_overrides(parser: argparse.ArgumentParser, what: str) -> None:
    """Declare any number of key=value."""
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=what)


def add_config_dir(parser: argparse.ArgumentParser, *more_names: str) -> None:
    """Declare --config-dir, to be given to `search_path`."""
    help_line = "a folder with recipes and options of your own"
    parser.add_argument("--config-dir", *more_names, metavar="DIR", help=help_line)


def whole_number(option: str, text: str, low: int) -> tuple[int | None, list[str]]:
    """Return the whole number that an option was given, or what is wrong with it."""
    if text.isascii() and text.isdigit() and int(text) >= low:
        return int(text), []
    return None, [f"{option} {text} is not a whole number of at least {low}"]
