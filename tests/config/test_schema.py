"""The schema says what it means: every field has a docstring with the words of its own type, default and bounds."""

from __future__ import annotations

import pytest

from hp_train.config.help_text import field_documents
from hp_train.config.numbers import spell
from hp_train.config.schema import TrainerConfig
from hp_train.config.schema_tree import GROUPS, LEAVES, SECTIONS, Leaf, misfit
from hp_train.config.validate import check_config
from hp_train.schedule.residency import MIN_SWAP_GAP

NAMES = {
    "trainer": "max_steps,global_batch_size,micro_batch_size,seq_len,seed,device,precision,compile,deterministic,"
    "max_grad_norm,loss_chunk_tokens,log_every,eval_every,eval_batches,run_dir,run_name,runs_root",
    "accelerator": "pp_size,tp_size,cp_size,ep_size,sequence_parallel,loss_parallel",
    "fsdp": "dp_mode,dp_shard_size,dp_replicate_size,edp_shard_size,reshard_after_forward,implementation",
    "pp": "schedule,microbatch_size,stages_per_rank,layer_split,p2p_transport",
    "model": "name,vocab_size,dim,num_layers,num_heads,num_kv_heads,ffn_dim,norm_eps,rope_theta,tie_embeddings,"
    "max_seq_len",
    "model.rope_scaling": "factor,low_freq_factor,high_freq_factor,original_max_position_embeddings",
    "data": "name,path,val_path,tokenizer,document_boundaries,mix,sources",
    "optimizer": "name,lr,betas,eps,weight_decay",
    "lr_scheduler": "name,warmup_steps,total_steps,min_lr_ratio",
    "activation_checkpoint": "mode,every",
    "checkpoint": "every,every_minutes,keep_last,async_save",
    "metrics": "tensorboard,wandb,profile_steps",
    "launcher": "name,nproc_per_node,nodes,max_restarts,account,partition,qos,constraint,exclude,array,dependency,"
    "modules,env,extra_lines,time,cpus_per_node,gpu_request,signal_lead,max_requeues,continue_by,snapshot",
    "launcher.container": "runtime,image,mounts,python",
}
"""The names that users' recipes and command lines rely on: none of them may go."""


def test_names_that_people_rely_on() -> None:
    expected = {f"{section}.{name}" for section, names in NAMES.items() for name in names.split(",")}
    assert expected <= set(LEAVES)
    assert set(SECTIONS) == set(NAMES)
    assert " ".join(GROUPS) == (
        "trainer accelerator fsdp pp model data optimizer lr_scheduler activation_checkpoint checkpoint metrics "
        "launcher"
    )


@pytest.mark.parametrize("leaf", LEAVES.values(), ids=LEAVES)
def test_docstring_says_default_and_bounds(leaf: Leaf) -> None:
    text = field_documents()[leaf.key]
    default = "[" + ", ".join(map(spell, leaf.default)) + "]" if isinstance(leaf.default, list) else spell(leaf.default)
    assert f"; default {default}" in text
    if leaf.bounds.describe():
        assert text.endswith(f"; {leaf.bounds.describe()}.")


def test_a_swap_gap_is_bounded_as_the_schedule_needs_it() -> None:
    assert LEAVES["pp.swap_min_gap"].bounds.low == MIN_SWAP_GAP


def test_text_that_is_not_the_word_beside_the_numbers_is_no_number() -> None:
    leaf = LEAVES["launcher.nproc_per_node"]
    assert misfit(leaf, "abc") == "is not an integer or auto"
    assert misfit(leaf, "auto") is None and misfit(leaf, 4) is None


@pytest.mark.parametrize("leaf", LEAVES.values(), ids=LEAVES)
def test_default_is_valid(leaf: Leaf) -> None:
    assert misfit(leaf, leaf.default) is None
    items = leaf.default if isinstance(leaf.default, (list, dict)) else [leaf.default]  # mappings are empty
    assert all(leaf.bounds.contain(item) for item in items)


@pytest.mark.parametrize(
    "leaf", [leaf for leaf in LEAVES.values() if leaf.bounds.low is not None], ids=lambda leaf: leaf.key
)
def test_bounds_hold_at_both_ends(leaf: Leaf) -> None:
    low, high = leaf.bounds.low, leaf.bounds.high
    assert leaf.bounds.contain(low) is not leaf.bounds.low_open
    assert leaf.bounds.contain(high) is not leaf.bounds.high_open
    for beyond in (low - 1, high * 2, float("nan"), float("inf"), -float("inf"), True, "x"):
        assert not leaf.bounds.contain(beyond) or beyond in leaf.bounds.also


@pytest.mark.parametrize("leaf", LEAVES.values(), ids=LEAVES)
def test_a_value_of_another_type_is_one_fault(leaf: Leaf) -> None:
    config = TrainerConfig()
    owner = config
    for name in leaf.section.split("."):
        if getattr(owner, name) is None:
            setattr(owner, name, SECTIONS[leaf.section]())
        owner = getattr(owner, name)
    owner = config
    for name in leaf.section.split("."):
        owner = getattr(owner, name)
    setattr(owner, leaf.key.rpartition(".")[2], {"a": 1})
    messages = [fault.message for fault in check_config(config)]
    assert len(messages) == 1 and messages[0].startswith(leaf.key), messages


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_that_is_null_is_one_fault(group: str) -> None:
    config = TrainerConfig()
    setattr(config, group, None)
    messages = [fault.message for fault in check_config(config)]
    assert messages == [f"{group} is a group and cannot be null"]
