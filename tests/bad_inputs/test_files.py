"""Recipes and options of a person's own that cannot be used."""

from __future__ import annotations

from pathlib import Path

from tests.bad_inputs.cases import Case, case, check_is_refused, each_of


def own_recipe(text: str, name: str = "mine") -> dict[str, str]:
    return {f"recipes/{name}.yaml": f"# @package _global_\n{text}"}


FILES = [
    case(
        "not YAML", "recipe=mine", ("recipes/mine.yaml:3: not YAML",), files=own_recipe("trainer:\n  max_steps: 1: 2\n")
    ),
    case("tab", "recipe=mine", ("recipes/mine.yaml:3: not YAML",), files=own_recipe("trainer:\n\tmax_steps: 1\n")),
    case(
        "twice",
        "recipe=mine",
        ("recipes/mine.yaml:4: not YAML", "duplicate"),
        files=own_recipe("trainer:\n  seed: 1\n  seed: 2\n"),
    ),
    case("not a mapping", "recipe=mine", ("recipes/mine.yaml:1: not a mapping",), files=own_recipe("- a\n")),
    case(
        "another header",
        "recipe=mine",
        ("recipes/mine.yaml: `# @package trainer` has no effect in a recipe", "`# @package _global_`"),
        files={"recipes/mine.yaml": "# @package trainer\nseed: 1\n"},
    ),
    case("empty file", "recipe=mine", ("recipes/mine.yaml is empty",), files={"recipes/mine.yaml": ""}),
    case(
        "keys",
        "recipe=mine",
        ("recipes/mine.yaml:3: unknown key trainer.max_stepz", "trainer.max_steps"),
        ("recipes/mine.yaml:4: trainer.seed=x is not an integer",),
        ("recipes/mine.yaml:5: trainer.compile=yes is not true or false",),
        ("recipes/mine.yaml:6: trainer.seq_len is empty",),
        ("recipes/mine.yaml:7: unknown key hydra",),
        ("recipes/mine.yaml:8: optimizer is a group and cannot be null",),
        files=own_recipe(
            "trainer:\n  max_stepz: 5\n  seed: x\n  compile: yes\n  seq_len:\n"
            "hydra: {callbacks: {x: {_target_: os.system}}}\noptimizer:\n"
        ),
    ),
    case(
        "group of a recipe",
        "recipe=mine",
        ("recipes/mine.yaml:3: override /fspd", "did you mean fsdp"),
        files=own_recipe("defaults:\n  - override /fspd: ddp\n"),
    ),
    case(
        "option of a recipe",
        "recipe=mine",
        ("recipes/mine.yaml:3: fsdp=dpp", "did you mean ddp"),
        files=own_recipe("defaults:\n  - override /fsdp: dpp\n"),
    ),
    case(
        "base of a recipe",
        "recipe=mine",
        ("recipes/mine.yaml:3: recipe=llama_sngle", "llama_single"),
        files=own_recipe("defaults:\n  - llama_sngle\n"),
    ),
    case(
        "defaults of a recipe",
        "recipe=mine",
        ("recipes/mine.yaml:2: defaults is not a list",),
        files=own_recipe("defaults: x\n"),
    ),
    case(
        "entry of defaults",
        "recipe=mine",
        ("recipes/mine.yaml:3:", "override /GROUP: OPTION"),
        files=own_recipe("defaults:\n  - fsdp: ddp\n"),
    ),
    case(
        "Hydra in defaults",
        "recipe=mine",
        ("recipes/mine.yaml:3: override /hydra/launcher",),
        files=own_recipe("defaults:\n  - override /hydra/launcher: x\n"),
    ),
    case(
        "recipe on itself", "recipe=mine", ("recipe mine builds on itself",), files=own_recipe("defaults:\n  - mine\n")
    ),
    case(
        "interpolation of a recipe",
        "recipe=mine",
        ("trainer.seed", "cannot be resolved"),
        files=own_recipe("trainer:\n  seed: ${nope}\n"),
    ),
    case(
        "own option",
        "model=mine",
        ("recipes/model/mine.yaml:2: unknown key model.width",),
        files={"recipes/model/mine.yaml": "dim: 64\nwidth: 3\n"},
    ),
    case(
        "package of an option",
        "model=mine",
        ("recipes/model/mine.yaml", "@package"),
        files={"recipes/model/mine.yaml": "# @package hydra\ndim: 64\n"},
    ),
]


@each_of(*FILES)
def test_is_refused_in_one_line_each(bad: Case, tmp_path: Path) -> None:
    check_is_refused(bad, tmp_path)
