"""Every kind of bad input, given to the real command: exit 2, one line a fault, no traceback, no torch, soon."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hp_train.config.schema_tree import GROUPS
from hp_train.launch.owner import Owner
from tests.command import Finished, hp_train, slowness_of_this_machine

LIMIT_S = 0.7
TRIES = 3
RECIPE = "recipe=llama_fsdp_pp"
CPU = "trainer.device=cpu"


@dataclass(frozen=True)
class Case:
    """Arguments, the files that must be there, and for each line of stderr the words that it must hold."""

    name: str
    arguments: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    files: dict[str, str] = field(default_factory=dict)
    prepare: Callable[[Path], None] | None = None
    env: dict[str, str] = field(default_factory=dict)


def case(name: str, arguments: str | list[str], *lines: tuple[str, ...], **more: object) -> Case:
    words = tuple(arguments.split() if isinstance(arguments, str) else arguments)
    return Case(name, words, lines, **more)  # type: ignore[arg-type]


def together(name: str, *cases: Case) -> Case:
    """Several faults of one kind in one command, each with its line, in the order in which they are typed."""
    return case(name, [word for bad in cases for word in bad.arguments], *[line for bad in cases for line in bad.lines])


def own_recipe(text: str, name: str = "mine") -> dict[str, str]:
    return {f"recipes/{name}.yaml": f"# @package _global_\n{text}"}


KEYS = [
    together(
        "unknown keys",
        case("misspelt key", "trainer.max_stepz=5", ("unknown key trainer.max_stepz", "trainer.max_steps")),
        case("misspelt group of a key", "trainr.max_steps=5", ("unknown key trainr.max_steps", "trainer.max_steps")),
        case("key without its group", "max_steps=5", ("unknown key max_steps", "trainer.max_steps")),
        case("key like nothing", "trainer.xyzzy=5", ("unknown key trainer.xyzzy", "max_steps", "seq_len")),
        case("added key", "+foo=1", ("unknown key foo",)),
        case("added key in a group", "+trainer.foo=1", ("unknown key trainer.foo",)),
        case("forced key", "++model.widht=1", ("unknown key model.widht",)),
        case("key below a value", "trainer.max_steps.x=1", ("trainer.max_steps.x", "takes an integer")),
        case("item of a list", "optimizer.betas.0=0.5", ("optimizer.betas takes a list of numbers",)),
        case("Hydra's own", "hydra.launcher._target_=os.system", ("hydra.launcher._target_", "Hydra's own settings")),
        case("Hydra's callbacks", "+hydra.callbacks.x._target_=os.system", ("hydra.callbacks",)),
    ),
    case("a target in a group", "+model._target_=os.system", ("unknown key model._target_",)),
    case("another place for a group", "fsdp@model=ddp", ("leave out @model",)),
]
VALUES = [
    together(
        "wrong types",
        case("text for integer", "trainer.max_steps=ten", ("trainer.max_steps=ten is not an integer", "1 to 1e+09")),
        case("fraction for integer", "trainer.max_steps=1.5", ("trainer.max_steps=1.5 is not an integer",)),
        case("boolean for integer", "trainer.max_steps=true", ("trainer.max_steps=true is not an integer",)),
        case("list for integer", "trainer.max_steps=[1]", ("trainer.max_steps=[1] is not an integer",)),
        case("mapping for integer", "trainer.max_steps={a:1}", ("trainer.max_steps={a:1} is not an integer",)),
        case("null for integer", "trainer.max_steps=null", ("trainer.max_steps is empty", "an integer")),
        case("text for number", "optimizer.lr=fast", ("optimizer.lr=fast is not a number",)),
        case("text for list", "optimizer.betas=fast", ("optimizer.betas=fast is not a list of numbers",)),
        case("text in list", "pp.layer_split=[2,two]", ("pp.layer_split=[2,two] is not a list of integers",)),
    ),
    case("short list", "optimizer.betas=[0.9]", ("optimizer.betas=[0.9]", "give 2")),
    together(
        "truth",
        case("yes for true", "trainer.compile=yes", ("trainer.compile=yes is not true or false",)),
        case("1 for true", "trainer.compile=1", ("trainer.compile=1 is not true or false",)),
        case("on for true", "accelerator.loss_parallel=on", ("accelerator.loss_parallel=on is not true or false",)),
        case(
            "1 for true or auto", "fsdp.reshard_after_forward=1", ("fsdp.reshard_after_forward=1", "auto, true, false")
        ),
        case(
            "text for integer or auto",
            "launcher.nproc_per_node=all",
            ("launcher.nproc_per_node=all is not an integer or auto", "1 to 4096 or auto"),
        ),
    ),
    case("no such choice", "trainer.device=gpu", ("trainer.device=gpu", "auto, cpu, cuda")),
    case("no such precision", "trainer.precision=fp16", ("trainer.precision=fp16", "auto, fp32, bf16")),
    case("zero", "trainer.micro_batch_size=0", ("trainer.micro_batch_size=0 is out of bounds", "1 to 1e+09")),
    case("negative", "trainer.seed=-1", ("trainer.seed=-1 is out of bounds",)),
    case("nan", "optimizer.lr=nan", ("optimizer.lr=nan is out of bounds", "above 0 to 100")),
    case("infinite", "optimizer.weight_decay=inf", ("optimizer.weight_decay=inf is out of bounds",)),
    case("absurd", "model.dim=100000000000", ("model.dim=100000000000 is out of bounds", "1 to 1e+06")),
    case("absurd in a list", "optimizer.betas=[0.9,1.5]", ("optimizer.betas=[0.9,1.5] is out of bounds",)),
    case("-2 for all", "fsdp.dp_shard_size=-2", ("fsdp.dp_shard_size=-2 is out of bounds", "or -1")),
    together(
        "empty values",
        case("empty", "trainer.max_steps=", ("trainer.max_steps is empty",)),
        case("empty path", "trainer.run_dir=", ("trainer.run_dir is empty",)),
        case("blank text", ["trainer.run_name='  '"], ("trainer.run_name is empty",)),
        case("missing marker", ["trainer.max_steps='???'"], ("trainer.max_steps has no value",)),
    ),
    case("unknown interpolation", "trainer.seq_len=${trainer.sequence}", ("trainer.seq_len", "cannot be resolved")),
    case("unset variable", "trainer.seq_len=${oc.env:HP_NO_SUCH}", ("trainer.seq_len", "HP_NO_SUCH")),
    case("circular", "trainer.seq_len=${trainer.seq_len}", ("trainer.seq_len=${trainer.seq_len} cannot be resolved",)),
    case("unknown resolver", "trainer.seq_len=${nope:1}", ("trainer.seq_len", "nope")),
    case("interpolated number", "trainer.max_steps=${optimizer.lr}", ("resolves to 0.0003", "not an integer")),
    case("interpolated truth", "trainer.compile=${trainer.max_steps}", ("resolves to 1000", "not true or false")),
    case(
        "interpolated yes",
        "trainer.compile=${oc.env:FLAG}",
        ("resolves to yes", "not true or false"),
        env={"FLAG": "yes"},
    ),
    case(
        "interpolated out of bounds", "trainer.seq_len=${trainer.eval_every}", ("trainer.seq_len=0 is out of bounds",)
    ),
    together(
        "unreadable values",
        case("several values", "trainer.max_steps=1,2", ("trainer.max_steps=1,2 gives several values", "--multirun")),
        case("stray bracket", "pp.layer_split=2]", ("pp.layer_split=2] cannot be read",)),
        case("unbalanced", "optimizer.betas=[0.9", ("optimizer.betas=[0.9 cannot be read", "does not close")),
        case("entry without a value", "data.mix={mine}", ("data.mix={mine} cannot be read", "name: value")),
        case("quoted number", "trainer.log_every='5'", ("trainer.log_every='5' is not an integer",)),
        case(
            "reference that does not close",
            "trainer.run_name=a${",
            ("trainer.run_name=a${ cannot be read", "${GROUP.KEY}"),
        ),
        case("name that Hydra cannot read", "data.mix.ü=1", ("data.mix.ü=1: a name typed in data.mix", "unlike ü")),
        case("name that is a number", "data.sources={7:x}", ("data.sources={7:x}: a name typed", "unlike 7")),
    ),
]
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
RULES = [
    case(
        "mesh product",
        f"{RECIPE} {CPU} launcher.nproc_per_node=3",
        ("nproc_per_node=3", "accelerator.pp_size=2 x fsdp.dp_shard_size=2 = 4", "use 4"),
    ),
    case(
        "mesh multiple",
        f"{RECIPE} {CPU} fsdp.dp_shard_size=-1 launcher.nproc_per_node=3",
        ("nproc_per_node=3 is not a multiple", "2"),
    ),
    case(
        "shards in ddp",
        "fsdp=ddp fsdp.dp_shard_size=2 trainer.device=cpu",
        ("fsdp.dp_shard_size=2 must be 1", "fsdp.dp_replicate_size"),
    ),
    case(
        "all shards in ddp", "fsdp=ddp fsdp.dp_shard_size=-1 trainer.device=cpu", ("fsdp.dp_shard_size=-1 must be 1",)
    ),
    case(
        "replicas in fsdp",
        "fsdp=fsdp fsdp.dp_replicate_size=2 trainer.device=cpu",
        ("fsdp.dp_replicate_size=2 must be 1", "fsdp=hsdp"),
    ),
    case(
        "tensor parallel", "accelerator.tp_size=2 trainer.device=cpu", ("accelerator.tp_size=2 is not supported yet",)
    ),
    case(
        "context parallel", "accelerator.cp_size=2 trainer.device=cpu", ("accelerator.cp_size=2 is not supported yet",)
    ),
    case("expert parallel", "accelerator.ep_size=2", ("accelerator.ep_size=2 is not supported yet",)),
    case("expert shards", "fsdp.edp_shard_size=2", ("fsdp.edp_shard_size=2 is not supported yet",)),
    case("several machines", "launcher.nodes=2", ("launcher.nodes=2", "launcher=local")),
    case(
        "batch",
        f"{RECIPE} {CPU} trainer.global_batch_size=18 trainer.micro_batch_size=2",
        ("trainer.global_batch_size=18", "trainer.micro_batch_size=2 = 4", "1, 3 or 9"),
    ),
    case(
        "batch and all shards",
        f"{RECIPE} {CPU} fsdp.dp_shard_size=-1 launcher.nproc_per_node=6",
        ("trainer.global_batch_size=16", "3 data-parallel ranks"),
    ),
    case(
        "micro-batch of the pipeline",
        f"{RECIPE} {CPU} trainer.micro_batch_size=2 pp.microbatch_size=4",
        ("pp.microbatch_size=4", "trainer.micro_batch_size=2"),
    ),
    case(
        "few micro-batches",
        f"{RECIPE} {CPU} trainer.global_batch_size=4 trainer.micro_batch_size=2",
        ("pp.schedule=1f1b", "trainer.global_batch_size=4", "accelerator.pp_size=2", "gpipe"),
    ),
    case(
        "few layers", f"{RECIPE} {CPU} model.num_layers=1", ("model.num_layers=1 is less than the 2 pipeline stages",)
    ),
    case("empty split", f"{RECIPE} {CPU} pp.layer_split=[]", ("pp.layer_split=[] has 0 entries", "give 2")),
    case(
        "fewer layers than stages",
        f"{RECIPE} {CPU} model.num_layers=2 accelerator.pp_size=4 pp.schedule=gpipe",
        ("model.num_layers=2 is less than the 4 pipeline stages", "accelerator.pp_size of at most 2", "at least 4"),
    ),
    case("swap without a gap", f"{RECIPE} {CPU} pp.swap_min_gap=1", ("pp.swap_min_gap=1 is out of", "2 to 1e+09")),
    case("short split", f"{RECIPE} {CPU} pp.layer_split=[4]", ("pp.layer_split=[4] has 1 entries", "give 2")),
    case("split of too few", f"{RECIPE} {CPU} pp.layer_split=[2,1]", ("covers 3 layers", "model.num_layers=4")),
    case("stages", f"{RECIPE} {CPU} pp.stages_per_rank=2", ("stages_per_rank=2", "1f1b")),
    case(
        "heads",
        "model.dim=128 model.num_heads=3 model.num_kv_heads=3",
        ("model.num_heads=3 does not divide model.dim=128", "1, 2, 4"),
    ),
    case("odd heads", "model.dim=12 model.num_heads=4", ("3 features a head",)),
    case("kv heads", "model.num_kv_heads=3", ("model.num_kv_heads=3 does not divide model.num_heads=4", "1, 2 or 4")),
    case("sequence", "trainer.seq_len=4096", ("trainer.seq_len=4096 is longer than model.max_seq_len=2048",)),
    case("vocabulary", "model.vocab_size=100", ("model.vocab_size=100", "128")),
    case(
        "sequence and data",
        "trainer.seq_len=5000000 model.max_seq_len=5000000",
        ("trainer.seq_len=5000000 is longer than the data",),
    ),
    case("no data", "recipe=smollm2_135m trainer.device=cpu", ("data.path is not set", "data prepare", "data=random")),
    case("missing data", "data=tokens data.path=nowhere", ("nowhere",)),
    case("empty data", "data=tokens data.path=empty", ("empty",), prepare=lambda folder: (folder / "empty").mkdir()),
    case("tokenizer", "data.tokenizer=bpe.json", ("data.tokenizer=bpe.json",)),
    case("W&B", "metrics.wandb=true", ("metrics.wandb=true needs the package wandb", "hp-train[wandb]")),
    case("profiler", "metrics.profile_steps=[0]", ("metrics.profile_steps=[0] is out of bounds",)),
    case(
        "rope scaling",
        "model.rope_scaling={low_freq_factor:4,high_freq_factor:1}",
        ("model.rope_scaling.high_freq_factor=1",),
    ),
]


def saved_config(trainer: str) -> str:
    """The text of a run's config.yaml: every group, defaults in all but one."""
    return "".join(f"{group}: {trainer if group == 'trainer' else '{}'}\n" for group in GROUPS)


def a_run_whose_config_is(text: str) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        a_run(folder)
        (folder / "run" / "config.yaml").write_text(text)

    return prepare


def a_run(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text(saved_config("{max_steps: 3}"))
    (folder / "run" / "overrides.yaml").write_text("recipe: ''\noverrides: []\n")


def in_use(**owner: object) -> Callable[[Path], None]:
    """A run whose launcher is this process, with changes."""

    def prepare(folder: Path) -> None:
        a_run(folder)
        held = dataclasses.asdict(Owner.myself()) | owner
        (folder / "run" / "owner.json").write_text(json.dumps(held))

    return prepare


ELSEWHERE = {"machine": "another boot", "host": "node7", "pid": 4711}


def a_broken_run(folder: Path) -> None:
    a_run(folder)
    (folder / "run" / "config.yaml").write_text("trainer: {max_steps: [3\n")


def a_file(folder: Path) -> None:
    (folder / "run").write_text("no folder\n")


def a_full_folder(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "thesis.tex").write_text("precious\n")


MACHINE = [
    case(
        "holds a run",
        "trainer.run_dir=run",
        ("trainer.run_dir=run holds a run already", "hp-train resume"),
        prepare=a_run,
    ),
    case("holds something", "trainer.run_dir=run", ("trainer.run_dir=run is not empty",), prepare=a_full_folder),
    case("is a file", "trainer.run_dir=run", ("trainer.run_dir=run", "is not a folder"), prepare=a_file),
    case("not writable", "trainer.run_dir=/proc/run", ("trainer.run_dir=/proc/run",)),
    case("run name", "trainer.run_name=../../x", ("trainer.run_name=../../x",)),
    case("long run name", f"trainer.run_name={'x' * 256}", ("trainer.run_name=xx", "too long", "255 bytes")),
    case("long run folder", f"trainer.run_dir={'x' * 256}/y", ("trainer.run_dir=xx", "cannot be made", "255 bytes")),
    case("long path", f"resume {'x' * 256}", ("xx", "longer than a file's name or path may be")),
    case("long name of a recipe", f"new {'x' * 256}", ("NAME=xx", "too long")),
    case("recipe called null", "new null", ("NAME=null", "no recipe")),
    case("disk", "model=llama3_405b data=random trainer.device=cpu", ("one checkpoint needs 4.9 TB",)),
    case("in use here", "trainer.run_dir=run", ("trainer.run_dir=run is in use by process",), prepare=in_use()),
    case(
        "in use elsewhere",
        "trainer.run_dir=run",
        ("in use by process 4711 on node7",),
        prepare=in_use(**ELSEWHERE, heartbeat=time.time() + 3000),
    ),
    case(
        "left by a launcher that died",
        "trainer.run_dir=run",
        ("holds a run already",),
        prepare=in_use(**ELSEWHERE, heartbeat=time.time() - 61),
    ),
    case("resume of a run in use", "resume run", ("is in use by process",), prepare=in_use()),
    case("missing run", "resume nowhere", ("nowhere does not exist",)),
    case("no run", "resume empty", ("empty holds no run",), prepare=lambda folder: (folder / "empty").mkdir()),
    case("resume with a typo", "resume run trainer.max_stepz=5", ("unknown key trainer.max_stepz",), prepare=a_run),
    case(
        "resume with a bad value",
        "resume run trainer.max_steps=0",
        ("trainer.max_steps=0 is out of bounds",),
        prepare=a_run,
    ),
    case(
        "resume against a rule",
        "resume run model.num_heads=3 model.num_kv_heads=3",
        ("model.num_heads=3 does not divide",),
        prepare=a_run,
    ),
    case(
        "resume in another folder",
        "resume run trainer.run_dir=other trainer.run_name=x",
        ("trainer.run_dir=other has no effect", "leave it out"),
        ("trainer.run_name=x has no effect", "leave it out"),
        prepare=a_run,
    ),
    case("resume with a bad option", "resume run fsdp=dpp", ("fsdp=dpp", "ddp"), prepare=a_run),
    case("resume of a broken config", "resume run", ("run/config.yaml cannot be used",), prepare=a_broken_run),
    *(
        case(f"resume of {what}", "resume run", ("run/config.yaml cannot be used", *words), prepare=prepare)
        for what, words, prepare in (
            ("an empty config", ("holds no config",), a_run_whose_config_is("")),
            ("a list for a config", ("holds no config",), a_run_whose_config_is("[trainer]\n")),
            ("a text for a config", (), a_run_whose_config_is("trainer\n")),
            ("a config without groups", ("lacks accelerator, fsdp",), a_run_whose_config_is("trainer: {}\n")),
        )
    ),
]
AT_ONCE = [
    case(
        "all at once",
        f"{RECIPE} {CPU} trainer.max_stepz=5 optimizer.lr=fast trainer.seed=-1 fsdp.dp_mode=x model.num_heads=5 "
        "pp.layer_split=[4] metrics.wandb=true +x=1 ~pp trainer.run_dir=/proc/run",
        ("unknown key trainer.max_stepz",),
        ("optimizer.lr=fast",),
        ("unknown key x",),
        ("~pp",),
        ("trainer.seed=-1",),
        ("fsdp.dp_mode=x",),
        ("model.num_heads=5",),
        ("model.num_kv_heads=4",),
        ("metrics.wandb=true",),
    ),
    case(
        "rules and machine at once",
        f"{RECIPE} {CPU} trainer.global_batch_size=6 model.num_kv_heads=3 trainer.run_dir=/proc/run "
        "launcher.nproc_per_node=5",
        ("launcher.nproc_per_node=5",),
        ("trainer.global_batch_size=6",),
        ("model.num_kv_heads=3",),
        ("trainer.run_dir=/proc/run",),
    ),
]
CASES = [*KEYS, *VALUES, *CHOICES, *WORDS, *FILES, *RULES, *MACHINE, *AT_ONCE]


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("bad", CASES, ids=lambda bad: bad.name)
def test_is_refused_in_one_line_each(bad: Case, tmp_path: Path) -> None:
    for name, text in bad.files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if bad.prepare is not None:
        bad.prepare(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    finished = refused_in_time(bad, tmp_path)
    assert finished.code == 2, finished
    assert "Traceback" not in finished.stderr and "torch was imported" not in finished.stderr, finished.stderr
    assert finished.stdout == ""
    assert len(finished.lines) == len(bad.lines), finished.stderr
    for line, words in zip(finished.lines, bad.lines, strict=True):
        assert line.startswith("hp-train: ")
        assert all(word in line for word in words), (line, words)
    left = [path for path in sorted(tmp_path.rglob("*")) if path not in before and ".poison" not in str(path)]
    assert left == [], "a refused run leaves nothing behind"


def refused_in_time(bad: Case, cwd: Path) -> Finished:
    """Run the command; the fastest of a few tries must be in time, on a busy machine in proportion to its slowness."""
    times = []
    for _ in range(TRIES):
        finished = hp_train(*bad.arguments, cwd=cwd, env=bad.env)
        times.append(finished.wall_s)
        if finished.wall_s < LIMIT_S or finished.code != 2:
            return finished
        times[-1] /= max(1.0, slowness_of_this_machine())
        if times[-1] < LIMIT_S:
            return finished
    raise AssertionError(f"{bad.arguments} took {min(times):.2f} s, in proportion; the limit is {LIMIT_S} s")
