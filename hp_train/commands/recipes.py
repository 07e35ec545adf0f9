"""`hp-train recipes`: each recipe with its size, the processes it needs, and one line. No torch."""

from __future__ import annotations

import argparse

from hp_train.config.rules_mesh import known_mesh
from hp_train.config.schema import TrainerConfig
from hp_train.config.search_path import RECIPE_GROUP, description_of, is_recipe, search_path
from hp_train.errors import ConfigError
from hp_train.models.shapes import num_parameters


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--config-dir", metavar="DIR", help="a folder with recipes of your own")


def run(args: argparse.Namespace) -> int:
    """Print the table of recipes."""
    path = search_path(args.config_dir)
    rows = [("recipe", "parameters", "processes", "")]
    for name, file in path.options_of(RECIPE_GROUP).items():
        if is_recipe(file):
            rows.append((name, *_describe(name, args.config_dir), description_of(file)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print(f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip())
    return 0


def _describe(name: str, config_dir: str | None) -> tuple[str, str]:
    from hp_train.config.compose import examine

    try:
        config = examine([f"recipe={name}"], config_dir).config
    except ConfigError:
        return "broken", "-"  # choosing it says what is wrong
    return f"{num_parameters(config.model):,}", _processes(config)


def _processes(config: TrainerConfig) -> str:
    mesh = known_mesh(config)
    return "all GPUs" if mesh is None else str(mesh.world_size)
