"""Keys that are not there, and values that are not of their kind."""

from __future__ import annotations

from pathlib import Path

from tests.bad_inputs.cases import Case, case, check_is_refused, each_of, together

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


@each_of(*KEYS, *VALUES)
def test_is_refused_in_one_line_each(bad: Case, tmp_path: Path) -> None:
    check_is_refused(bad, tmp_path)
