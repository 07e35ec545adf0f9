"""What bare `hp-train` prints: the verbs, five commands to start from, the recipes. No torch, no Hydra."""

from __future__ import annotations

from hp_train.config.help_text import USAGE
from hp_train.config.search_path import RECIPE_GROUP, description_of, is_recipe, search_path
from hp_train.verbs import VERBS

_COMMANDS = {
    "hp-train recipe=llama_fsdp_pp": "train a small Llama on Shakespeare, on whatever is here",
    "hp-train recipe=llama_fsdp_pp accelerator.pp_size=1 fsdp.dp_shard_size=2": "the same numbers on another mesh",
    "hp-train recipe=llama3_8b_fsdp data.path=DIR --cfg job": "see what would run",
    "hp-train resume RUN_DIR trainer.max_steps=1000": "go on from the last checkpoint",
    "hp-train --help": "every group, option and key",
}


def run() -> int:
    """Print the overview."""
    files = search_path().options_of(RECIPE_GROUP)
    recipes = {name: description_of(file) for name, file in files.items() if is_recipe(file)}
    print(f"Usage: {USAGE}")
    for title, table in (("Verbs", VERBS), ("To start with", _COMMANDS), ("Recipes (recipe=NAME)", recipes)):
        print(f"\n{title}:")
        width = max(map(len, table), default=0)
        for name, text in table.items():
            print(f"  {name:<{width}}  {text}")
    return 0
