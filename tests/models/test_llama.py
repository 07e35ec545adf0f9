"""The Llama against Hugging Face's, its pipeline stages against the whole, its precision against fp32 references."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hp_train.config.schema import ModelSection, RopeScalingSection
from hp_train.models.initial_weights import initialize
from hp_train.models.llama import Llama
from hp_train.models.rope import RotaryEmbedding, rotary_frequencies
from tests.distributed.ranks import run_ranks

SCALING = RopeScalingSection(factor=8.0, original_max_position_embeddings=32)  # all three bands in a small head
SMALL = ModelSection(vocab_size=97, dim=64, num_layers=2, num_heads=4, ffn_dim=112, max_seq_len=512)


def build(config: ModelSection, **part: object) -> Llama:
    model = Llama(config, **part)
    initialize(model, seed=3)
    with torch.no_grad():  # large weights, so that every part moves the logits
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.1)
    return model


def some_tokens(config: ModelSection, batch: int = 2, seq_len: int = 48) -> Tensor:
    return torch.randint(0, config.vocab_size, (batch, seq_len), generator=torch.Generator().manual_seed(5))


def hugging_face(config: ModelSection, model: Llama) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        rope.update(
            rope_type="llama3",
            factor=scaling.factor,
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
            original_max_position_embeddings=scaling.original_max_position_embeddings,
        )
    reference = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads or config.num_heads,
            rms_norm_eps=config.norm_eps,
            max_position_embeddings=config.max_seq_len,
            rope_parameters=rope,
            tie_word_embeddings=config.tie_embeddings,
        )
    )
    reference.load_state_dict(model.state_dict())  # strict: the names are equal
    return reference.eval()


@pytest.mark.parametrize("scaling", [None, SCALING], ids=["rope", "rope-scaled"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        replace(SMALL, num_kv_heads=2, dim=96, num_layers=3),
        replace(SMALL, num_heads=8, num_kv_heads=1, norm_eps=1e-6, rope_theta=5e5),
    ],
    ids=["mha", "gqa", "mqa"],
)
@torch.no_grad()
def test_logits_are_those_of_hugging_face(config: ModelSection, tied: bool, scaling: RopeScalingSection) -> None:
    model = build(replace(config, tie_embeddings=tied, rope_scaling=scaling))
    reference = hugging_face(model.config, model)
    tokens = some_tokens(config)
    positions = torch.randint(0, config.max_seq_len, tokens.shape).sort().values
    for given in (None, positions):
        logits = model(tokens, positions=given)
        assert logits.abs().max() > 0.5
        torch.testing.assert_close(logits, reference(tokens, position_ids=given).logits, rtol=0, atol=2e-5)


def test_the_scaling_bands_are_all_in_the_test() -> None:
    plain = rotary_frequencies(SMALL)
    ratio = plain / rotary_frequencies(replace(SMALL, rope_scaling=SCALING))
    assert ratio.min() == 1
    assert ratio.max() == 8
    assert ((ratio > 1) & (ratio < 8)).any()


@pytest.mark.parametrize("num_kv_heads", [4, 2])
@torch.no_grad()
def test_a_mask_stands_in_for_causality(num_kv_heads: int) -> None:
    model, tokens = build(replace(SMALL, num_kv_heads=num_kv_heads)), some_tokens(SMALL)
    mask = torch.rand(2, 1, 48, 48) < 0.3
    mask |= torch.eye(48, dtype=torch.bool)  # a query that sees no key has no answer
    reference = hugging_face(model.config, model)
    expected = reference(tokens, attention_mask=mask).logits
    torch.testing.assert_close(model(tokens, attention_mask=mask), expected, rtol=0, atol=2e-5)
    assert (expected - model(tokens)).abs().max() > 0.1


@pytest.mark.parametrize("num_kv_heads", [4, 2])
@torch.no_grad()
def test_mask_and_positions_keep_documents_apart(num_kv_heads: int) -> None:
    config = replace(SMALL, num_kv_heads=num_kv_heads)
    model, tokens, cut = build(config), some_tokens(SMALL), 17
    document = (torch.arange(48) >= cut).long().expand(2, -1)
    positions = torch.arange(48).expand(2, -1) - document * cut
    mask = torch.ones(48, 48, dtype=torch.bool).tril() & (document.unsqueeze(2) == document.unsqueeze(1))
    packed = model(tokens, positions=positions, attention_mask=mask.unsqueeze(1))
    apart = torch.cat((model(tokens[:, :cut]), model(tokens[:, cut:])), dim=1)
    torch.testing.assert_close(packed, apart, rtol=0, atol=2e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("cuts", [(0, 4), (1, 3), (0, 2, 2, 4), (4,)])
def test_stages_after_each_other_are_the_whole_bitwise(tied: bool, cuts: tuple[int, ...]) -> None:
    config = replace(SMALL, num_layers=4, num_kv_heads=2, tie_embeddings=tied)
    whole, tokens = build(config, loss_chunk_tokens=20), some_tokens(SMALL)
    edges = (0, *cuts, 4)
    states = whole.state_dict()
    hidden: Tensor = tokens
    for index, (start, end) in enumerate(zip(edges, edges[1:], strict=False)):
        last = index == len(edges) - 2
        stage = Llama(config, layers=range(start, end), embedding=index == 0, head=last, loss_chunk_tokens=20)
        stage.load_state_dict({name: states[name] for name in stage.state_dict()})  # strict: names are global
        hidden = stage(hidden, targets=tokens if last else None)
    assert torch.equal(hidden, whole(tokens, targets=tokens))


def test_built_on_meta_it_equals_one_built_in_place_and_stays_tied() -> None:
    config = replace(SMALL, rope_scaling=SCALING, tie_embeddings=True)
    here = Llama(config)
    initialize(here, seed=1)
    with torch.device("meta"):
        moved = Llama(config)
    assert all(tensor.is_meta for tensor in (*moved.parameters(), *moved.buffers()))
    moved.to_empty(device="cpu")
    initialize(moved, seed=1)
    tokens = some_tokens(config)
    assert torch.equal(here(tokens), moved(tokens))
    assert moved.lm_head.weight is moved.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(moved.named_parameters())


def test_rotation_keeps_fp32_angles_in_a_bf16_model() -> None:
    config = replace(SMALL, max_seq_len=100_000)
    rotary = RotaryEmbedding(config).to(torch.bfloat16)
    queries = torch.randn(1, 4, 4, 16, dtype=torch.bfloat16)
    positions = torch.tensor([[3, 1001, 32_003, 99_999]])
    rotated, _ = rotary(queries, queries, positions)
    angles = positions.double().unsqueeze(-1) * rotary_frequencies(config).double()
    turn = torch.polar(torch.ones_like(angles), angles).unsqueeze(2)
    exact = torch.view_as_real(torch.complex(*queries.double().chunk(2, -1)) * turn)
    exact = torch.cat((exact[..., 0], exact[..., 1]), -1)
    # fp32 angles near 1e5 are off by at most 2^-8 / 2, about the rounding of a bf16 result (2^-9 relative).
    torch.testing.assert_close(rotated.double(), exact, rtol=2**-8, atol=2**-8 * queries.abs().max().item())


def test_norm_statistics_and_scaling_are_fp32_in_a_bf16_model() -> None:
    norm = Llama(SMALL).model.norm.to(torch.bfloat16)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2.0)
    hidden = (torch.randn(5, 64) * 300).to(torch.bfloat16)
    wide = hidden.float()
    exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + SMALL.norm_eps) * norm.weight.float()
    # One rounding to bf16 and no other: at most half a unit in the last of 8 bits.
    torch.testing.assert_close(norm(hidden).float(), exact, rtol=2**-8, atol=0)
    assert norm(hidden).dtype == torch.bfloat16


def _mixed_precision(rank: int, world_size: int) -> tuple[float, float]:
    """Return how far loss and logits of a sharded bf16 model are from one held in bf16; late positions, 2 ranks."""
    config = replace(SMALL, max_seq_len=100_000, num_kv_heads=2)
    tokens = some_tokens(config)
    positions = torch.arange(48).expand(2, -1) * 2000 + 17
    whole, sharded = build(config, loss_chunk_tokens=20), build(config, loss_chunk_tokens=20)
    for unit in (*sharded.blocks.values(), sharded):
        fully_shard(unit, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    whole.to(torch.bfloat16)
    losses = [model(tokens, positions, targets=tokens).detach() for model in (whole, sharded)]
    assert [loss.dtype for loss in losses] == [torch.float32] * 2
    logits = [model(tokens, positions) for model in (whole, sharded)]
    return (losses[0] - losses[1]).abs().item(), (logits[0] - logits[1]).abs().max().item()


def test_mixed_precision_rounds_parameters_and_activations_only() -> None:
    # The casts at module borders touch no angle, no statistic and no loss, so nothing differs by a single bit.
    assert run_ranks(2, _mixed_precision) == [(0.0, 0.0)] * 2


def test_bf16_loss_is_computed_in_fp32() -> None:
    model, tokens = build(SMALL).to(torch.bfloat16), some_tokens(SMALL)
    loss = model(tokens, targets=tokens)
    assert loss.dtype == torch.float32
    logits = model(tokens).float().flatten(0, 1)
    torch.testing.assert_close(loss, F.cross_entropy(logits, tokens.flatten(), reduction="sum"), rtol=1e-6, atol=0)


def test_longer_than_max_seq_len_is_our_mistake() -> None:
    model = Llama(replace(SMALL, max_seq_len=16))
    model(some_tokens(SMALL, seq_len=16))
    with pytest.raises(AssertionError, match="17 tokens .* max_seq_len=16"):
        model(some_tokens(SMALL, seq_len=17))
