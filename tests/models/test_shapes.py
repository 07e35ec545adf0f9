"""Parameter names, shapes and counts against published totals and the module; FLOPs against torch's counter."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hp_train.config.schema import ModelSection
from hp_train.models import shapes
from hp_train.models.llama import Llama

LLAMA3_8B = ModelSection(
    vocab_size=128256, dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_dim=14336, rope_theta=5e5
)
LLAMA3_70B = ModelSection(vocab_size=128256, dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, ffn_dim=28672)
LLAMA3_405B = ModelSection(vocab_size=128256, dim=16384, num_layers=126, num_heads=128, num_kv_heads=8, ffn_dim=53248)
LLAMA32_1B = ModelSection(
    vocab_size=128256, dim=2048, num_layers=16, num_heads=32, num_kv_heads=8, ffn_dim=8192, tie_embeddings=True
)
SMOLLM2_135M = ModelSection(
    vocab_size=49152, dim=576, num_layers=30, num_heads=9, num_kv_heads=3, ffn_dim=1536, tie_embeddings=True
)
MODELS = [LLAMA3_8B, LLAMA3_70B, LLAMA3_405B, LLAMA32_1B, SMOLLM2_135M]


def module_shapes(config: ModelSection, **part: object) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        module = Llama(config, **part)
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


# The totals on the models' cards, as Hugging Face counts the parameters of the published checkpoints.
@pytest.mark.parametrize(
    ("config", "published"),
    list(zip(MODELS, [8_030_261_248, 70_553_706_496, 405_853_388_800, 1_235_814_400, 134_515_008], strict=True)),
)
def test_published_counts(config: ModelSection, published: int) -> None:
    assert shapes.num_parameters(config) == published


@pytest.mark.parametrize("config", [*MODELS, ModelSection()])
def test_shapes_are_those_of_the_module(config: ModelSection) -> None:
    in_module = module_shapes(config)
    assert list(shapes.parameter_shapes(config).items()) == list(in_module.items())
    assert shapes.num_parameters(config) == sum(torch.Size(shape).numel() for shape in in_module.values())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("layers", "embedding", "head"),
    [(range(0, 2), True, False), (range(2, 3), False, False), (range(3, 4), False, True), (range(0, 0), True, True)],
)
def test_stage_shapes_are_those_of_the_partial_module(tied: bool, layers: range, embedding: bool, head: bool) -> None:
    config = ModelSection(tie_embeddings=tied, num_kv_heads=2)
    part = {"layers": layers, "embedding": embedding, "head": head}
    in_module = module_shapes(config, **part)
    assert list(shapes.parameter_shapes(config, **part).items()) == list(in_module.items())
    counted = shapes.num_parameters_of_stage(config, layers, embedding=embedding, head=head)
    assert counted == sum(torch.Size(shape).numel() for shape in in_module.values())


def test_stages_add_up_to_the_model_and_one_copy_of_the_tied_matrix() -> None:
    for tied in (False, True):
        config = ModelSection(tie_embeddings=tied)
        first = shapes.num_parameters_of_stage(config, range(0, 1), head=False)
        last = shapes.num_parameters_of_stage(config, range(1, 4), embedding=False)
        copy = shapes.part_sizes(config).head if tied else 0
        assert first + last == shapes.num_parameters(config) + copy


@pytest.mark.parametrize(
    "config", [ModelSection(), ModelSection(num_kv_heads=1, ffn_dim=200, vocab_size=77, tie_embeddings=True)]
)
def test_flops_are_those_that_torch_counts(config: ModelSection) -> None:
    batch, seq_len = 2, 24
    module = Llama(config)
    tokens = torch.zeros(batch, seq_len, dtype=torch.long)
    # torch counts products of matrices; the plain attention kernel shows them all, forward and backward.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        module(tokens, targets=tokens).backward()
    norms = (2 * config.num_layers + 1) * config.dim  # in 6N by convention, but no product of matrices
    expected = shapes.flops_per_token(config, seq_len) - 6 * norms
    assert counter.get_total_flops() == batch * seq_len * expected


def test_shapes_and_learning_rate_need_no_torch() -> None:
    program = "import sys, hp_train.models.shapes, hp_train.training.lr_schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
