"""Names that no option has, and words that are no argument, verb or option."""

from __future__ import annotations

from pathlib import Path

from tests.bad_inputs.cases import RECIPE, Case, case, check_is_refused, each_of, together

CHOICES = [
    case("recipe", "recipe=llama_fspd_pp", ("recipe=llama_fspd_pp", "did you mean llama_fsdp_pp", "llama_single")),
    case("empty recipe", "recipe=", ("recipe is empty",)),
    case("recipe above its folder", "recipe=../config", ("recipe=../config is a path",)),
    case("recipe of the root", "recipe=/etc/passwd", ("recipe=/etc/passwd is a path",)),
    case("option", "fsdp=dpp", ("fsdp=dpp", "did you mean ddp", "ddp, fsdp, hsdp")),
    case("model", "model=llama3_7b", ("model=llama3_7b", "did you mean llama3_70b")),
    case("pipeline option", "pp=2f2b", ("pp=2f2b", "1f1b")),
    case("schedule", f"{RECIPE} pp.schedule=1f1c", ("pp.schedule=1f1c is no schedule", "did you mean 1f1b", "gpipe")),
    case("schedule file", f"{RECIPE} pp.schedule=file:x.csv", ("pp.schedule=file:x.csv: can't be read",)),
    case("schedule file without a path", f"{RECIPE} pp.schedule=file:", ("pp.schedule=file: is no", "or file:PATH")),
    case("mode", "fsdp.dp_mode=zero3", ("fsdp.dp_mode=zero3", "fsdp, ddp, hsdp")),
    together(
        "groups",
        case("deleted group", "~trainer", ("~trainer", "cannot be deleted")),
        case("deleted option", "~fsdp", ("~fsdp", "cannot be deleted")),
        case("deleted key", "~trainer.max_steps", ("~trainer.max_steps", "give trainer.max_steps a value")),
        case("deleted entry", "~data.mix.mine", ("~data.mix.mine", "give data.mix whole")),
        case("group null", "trainer=null", ("trainer=null", "cannot be null")),
        case("option null", "fsdp=null", ("fsdp=null", "cannot be null", "ddp, fsdp, hsdp")),
        case("group as mapping", "trainer={max_steps:1}", ("trainer={max_steps:1} is not the name of an option",)),
        case("two options", "fsdp=[ddp,hsdp]", ("fsdp=[ddp,hsdp] is not the name of an option",)),
    ),
]
WORDS = [
    case("verb", "trian recipe=llama_single", ("trian is no verb", "did you mean train", "resume, rerun")),
    case("no equals sign", "trainer.max_steps=5 recipe", ("argument recipe is not key=value",)),
    case("no key", "trainer.max_steps=5 =5", ("=5 has no key",)),
    case("empty verb", [""], ("'' is no verb", "use train")),
    case("resume of an empty path", ["resume", ""], ("RUN_DIR is empty", "hp-train resume")),
    case("incomplete resume", "resume", ("resume", "required", "RUN_DIR")),
    case("resume of a setting", "resume trainer.max_steps=5", ("resume needs a run directory",)),
    case("incomplete data", "data", ("data", "required", "prepare")),
    case("unknown data verb", "data prepair", ("prepair", "prepare")),
    case("incomplete schedule", "schedule", ("schedule", "required")),
    case("option of the command", "--confg job", ("unknown option --confg", "--cfg")),
    case("value of an option", "--cfg jobs", ("--cfg", "jobs")),
    case("unpickling", "--experimental-rerun x.pickle", ("unknown option --experimental-rerun",)),
    case("folder of configs", "--config-dir nowhere", ("--config-dir=nowhere is not a folder",)),
    case(
        "folder in the environment",
        "trainer.max_steps=5",
        ("$HP_TRAIN_CONFIG_DIR=nowhere",),
        env={"HP_TRAIN_CONFIG_DIR": "nowhere"},
    ),
    case("resolve what", "--resolve", ("--resolve goes with --cfg",)),
    case("no equals sign first", "trainer.max_steps 5", ("argument trainer.max_steps",), ("argument 5",)),
    case("group to print", "--cfg job --package trainr", ("trainr is no group",)),
]


@each_of(*CHOICES, *WORDS)
def test_is_refused_in_one_line_each(bad: Case, tmp_path: Path) -> None:
    check_is_refused(bad, tmp_path)
