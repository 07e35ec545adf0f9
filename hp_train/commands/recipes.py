"""`hp-train recipes`: each recipe with its size, the processes it needs, and one line. No torch."""

from __future__ import annotations

import argparse

from hp_train.commands.arguments import add_config_dir
from hp_train.config.rules_mesh import known_mesh
from hp_train.config.schema import TrainerConfig
from hp_train.config.search_path import RECIPE_GROUP, SearchPath, description_of, search_path, ships, shown
from hp_train.errors import ConfigError
from hp_train.models.shapes import num_parameters

_NOT_OURS = ("data.",)  # data that is brought along is not there yet, which is no fault of a recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_config_dir(parser)


def run(args: argparse.Namespace) -> int:
    """Print the table of recipes; of a broken one, in which file it is and why."""
    path = search_path(args.config_dir)
    rows = [("recipe", "parameters", "processes", "")]
    rows.extend(_row(name, path) for name in path.options_of(RECIPE_GROUP))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print(f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip())
    return 0


def _row(name: str, path: SearchPath) -> tuple[str, str, str, str]:
    from hp_train.config.compose import compose_request
    from hp_train.config.override_check import check_request
    from hp_train.config.validate import check_config

    file = path.options_of(RECIPE_GROUP)[name]
    try:
        request = check_request([f"{RECIPE_GROUP}={name}"], path)
        config = compose_request(request).config
        faults = [fault.message for fault in [*request.all_faults, *check_config(config, _NOT_OURS)]]
    except ConfigError as error:
        faults = list(error.messages)
    if faults:
        place = "" if shown(file) in faults[0] else f"{shown(file)}: "
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        return name, "broken", "-", f"{place}{faults[0]}{more}"
    where = "" if ships(file) else f" ({shown(file)})"
    return name, f"{num_parameters(config.model):,}", _processes(config), f"{description_of(file)}{where}".strip()


def _processes(config: TrainerConfig) -> str:
    mesh = known_mesh(config)
    return "all GPUs" if mesh is None else str(mesh.world_size)
