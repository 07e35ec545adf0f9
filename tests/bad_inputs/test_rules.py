"""Settings that do not go together; then faults of every kind at once."""

from __future__ import annotations

from pathlib import Path

from tests.bad_inputs.cases import CPU, RECIPE, Case, case, check_is_refused, each_of

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


@each_of(*RULES, *AT_ONCE)
def test_is_refused_in_one_line_each(bad: Case, tmp_path: Path) -> None:
    check_is_refused(bad, tmp_path)
