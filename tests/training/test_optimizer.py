"""The optimizer against written-out update rules, on plain and on sharded parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hp_train.config.schema import ModelSection, OptimizerSection
from hp_train.models.llama import Llama
from hp_train.training.optimizer import build_optimizer
from tests.distributed.ranks import run_ranks

CPU = torch.device("cpu")
SHAPES = {"matrix": (5, 6), "thin": (2, 3), "vector": (7,)}
CONFIGS = [
    OptimizerSection(name="adamw", lr=1e-2, betas=[0.8, 0.9], eps=1e-6, weight_decay=0.3),
    OptimizerSection(name="sgd", lr=1e-1, weight_decay=0.3),
]


def make_parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def gradient(name: str, step: int) -> Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(100 * step + len(name)))


def written_out(config: OptimizerSection, steps: int) -> dict[str, Tensor]:
    """Return what the parameters should be, in double: Loshchilov and Hutter 2019, algorithm 2; or plain descent."""
    results = {}
    for name, parameter in make_parameters().items():
        value, first, second = parameter.detach().double(), torch.zeros(()), torch.zeros(())
        decay = config.weight_decay if value.ndim > 1 else 0.0
        for step in range(1, steps + 1):
            grad = gradient(name, step).double()
            update = grad
            if config.name == "adamw":
                first = config.betas[0] * first + (1 - config.betas[0]) * grad
                second = config.betas[1] * second + (1 - config.betas[1]) * grad**2
                mean, square = first / (1 - config.betas[0] ** step), second / (1 - config.betas[1] ** step)
                update = mean / (square.sqrt() + config.eps)
            value = value - config.lr * (update + decay * value)
        results[name] = value
    return results


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_updates_follow_the_rule_and_decay_matrices_only(config: OptimizerSection) -> None:
    parameters = make_parameters()
    optimizer = build_optimizer(parameters, config, CPU)
    for step in (1, 2, 3):
        for name, parameter in parameters.items():
            parameter.grad = gradient(name, step)
        optimizer.step()
    for name, expected in written_out(config, 3).items():
        torch.testing.assert_close(parameters[name].detach().double(), expected, rtol=2e-6, atol=2e-6)


def test_every_parameter_once_in_the_order_of_the_names() -> None:
    model = Llama(ModelSection(num_layers=2, tie_embeddings=True))
    named = dict(model.named_parameters(remove_duplicate=False))
    assert named["lm_head.weight"] is named["model.embed_tokens.weight"]
    named["model.norm.weight"].requires_grad_(False)
    optimizer = build_optimizer(named, OptimizerSection(), CPU)
    decayed, plain = (group["params"] for group in optimizer.param_groups)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert [id(p) for p in decayed] == [id(p) for p in trained if p.ndim == 2]
    assert [id(p) for p in plain] == [id(p) for p in trained if p.ndim == 1]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_a_stage_with_matrices_only_has_one_group() -> None:
    optimizer = build_optimizer({"matrix": make_parameters()["matrix"]}, OptimizerSection(), CPU)
    assert len(optimizer.param_groups) == 1


def _sharded_updates(rank: int, world_size: int) -> list[str]:
    """Take three steps on shards, some of them empty; return the parameters that differ from unsharded ones."""
    mesh = init_device_mesh("cpu", (world_size,))
    wrong = []
    for config in CONFIGS:
        whole, sharded = make_parameters(), {}
        for name, parameter in make_parameters().items():
            local = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            sharded[name] = nn.Parameter(local)
        optimizers = [build_optimizer(parameters, config, CPU) for parameters in (whole, sharded)]
        for step in (1, 2, 3):
            for name in SHAPES:
                whole[name].grad = gradient(name, step)
                sharded[name].grad = distribute_tensor(gradient(name, step), mesh, [Shard(0)], src_data_rank=None)
            for optimizer in optimizers:
                optimizer.step()
        wrong += [
            f"{config.name} {name}" for name in SHAPES
            if not torch.allclose(sharded[name].full_tensor(), whole[name], rtol=1e-6, atol=1e-7)
        ]  # fmt: skip
    return wrong


def test_shards_are_updated_as_the_whole_is() -> None:
    assert run_ranks(3, _sharded_updates) == [[]] * 3
