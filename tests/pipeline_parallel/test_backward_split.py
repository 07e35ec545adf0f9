"""The two halves of a backward against the whole: bitwise equal gradients, hooks fired once, on many kinds of graph."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from hp_train.pipeline_parallel.backward_split import backward_input, backward_weight


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Shared(nn.Module):
    """One matrix used three times, with another parameter between two of the uses, and one norm used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.between, self.norm = nn.Linear(6, 6), Mlp(), nn.RMSNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.matrix(x)))
        x = self.norm(self.matrix(self.between(x)))
        return x @ self.matrix.weight.t()


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = Mlp(), Mlp(), nn.Linear(2, 2)
        self.first.requires_grad_(False)
        self.second.up.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class ParameterBranch(nn.Module):
    """Weights made of parameters, and an output that no input leads to."""

    def __init__(self) -> None:
        super().__init__()
        self.direction, self.size, self.bias = (nn.Parameter(torch.randn(*s)) for s in ((6, 6), (6, 1), (3, 6)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.size * self.direction / self.direction.norm(dim=1, keepdim=True)
        return x @ weight + self.bias.exp().sum(0), self.size.square().sum()


class ManyValues(nn.Module):
    """Two inputs, three outputs: one unused by the caller, one that is an input passed through."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.left(x) * y, self.right(y), y


class HookedActivation(nn.Module):
    """A hook that changes the gradient of what a weight just made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        out.register_hook(lambda grad: grad * 2)
        return out


CASES: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...]]] = {  # module, inputs, outputs without a gradient
    "mlp": (Mlp, 1, ()),
    "stack": (lambda: nn.Sequential(Mlp(), Mlp(), nn.Linear(6, 6)), 1, ()),
    "checkpointed": (Checkpointed, 1, ()),
    "shared": (Shared, 1, ()),
    "frozen": (Frozen, 1, ()),
    "parameter branch": (ParameterBranch, 1, ()),
    "parameter branch alone": (ParameterBranch, 1, (0,)),
    "many values": (ManyValues, 2, ()),
    "unused output": (ManyValues, 2, (1,)),
    "hooked activation": (HookedActivation, 1, ()),
    "no parameters": (nn.Tanh, 1, ()),
}


def run(module: nn.Module, inputs: list[Tensor], skipped: tuple[int, ...], halves: bool) -> list[Tensor | None]:
    """Forward and backward; gradients of the inputs. Those of parameters are left on them."""
    inputs = [each.clone().requires_grad_(each.requires_grad) for each in (e.detach().requires_grad_() for e in inputs)]
    outputs = module(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(out.shape, generator=generator) for out in outputs]
    chosen = [(out, grad) for at, (out, grad) in enumerate(zip(outputs, grads, strict=True)) if at not in skipped]
    leaves = [each.detach().requires_grad_() for each in inputs]
    del leaves
    if not halves:
        for each in inputs:
            each.retain_grad()
        torch.autograd.backward([out for out, _ in chosen], [grad for _, grad in chosen])
        return [each.grad for each in inputs]
    roots = [get_gradient_edge(out) for out, _ in chosen]
    del outputs
    input_grads, pending = backward_input(roots, [grad for _, grad in chosen], inputs)
    del roots, chosen
    backward_weight(pending)
    return input_grads


def same(left: Tensor | None, right: Tensor | None) -> bool:
    return (left is None and right is None) or (left is not None and right is not None and torch.equal(left, right))


@pytest.mark.parametrize("name", CASES)
def test_halves_equal_the_whole_bitwise(name: str) -> None:
    build, num_inputs, skipped = CASES[name]
    torch.manual_seed(0)
    whole = build()
    halved = copy.deepcopy(whole)
    for _ in range(2):  # the second micro-batch adds to the first
        inputs = [torch.randn(3, 6) for _ in range(num_inputs)]
        expected = run(whole, inputs, skipped, halves=False)
        actual = run(halved, inputs, skipped, halves=True)
        assert all(map(same, expected, actual)), (expected, actual)
    for (key, left), right in zip(whole.named_parameters(), halved.parameters(), strict=True):
        assert same(left.grad, right.grad), (key, left.grad, right.grad)


@pytest.mark.parametrize("name", ["stack", "checkpointed", "shared", "frozen"])
def test_hooks_fire_once_a_micro_batch(name: str) -> None:
    torch.manual_seed(0)
    counts: dict[str, list[int]] = {}
    for halves in (False, True):
        module = CASES[name][0]()
        fired: dict[str, int] = {}

        def count(key: str, fired: dict[str, int] = fired) -> None:
            fired[key] = fired.get(key, 0) + 1

        for key, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, key=key: count(f"accumulated {key}"))
                parameter.register_hook(lambda _, key=key: count(f"grad {key}"))
        for key, child in module.named_modules():
            child.register_full_backward_hook(lambda *_, key=key: count(f"backward {key}"))
        run(module, [torch.randn(3, 6)], (), halves)
        counts[halves] = fired
    assert counts[True] == counts[False]
    assert any(key.startswith("accumulated") for key in counts[True])


def test_the_second_half_is_left_to_do() -> None:
    """No parameter has a gradient before it, and no computing for weights happens twice."""
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    x = torch.randn(3, 6, requires_grad=True)
    root = get_gradient_edge(module(x))
    with torch.autograd.profiler.profile() as first_half:
        _, pending = backward_input([root], [torch.ones(3, 6)], [x])
    assert all(parameter.grad is None for parameter in module.parameters())
    with torch.autograd.profiler.profile() as second_half:
        backward_weight(pending)
    products = [sum(e.count for e in p.key_averages() if e.key == "aten::mm") for p in (first_half, second_half)]
    assert products == [2, 2]  # dX of two layers, then dW of two layers


@st.composite
def graphs(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """A chain of operations on earlier values: 0 and 1 are inputs, 2 to 5 parameters."""
    length = draw(st.integers(1, 9))
    operations = []
    for index in range(length):
        value = st.integers(0, 5 + index)
        operations.append((draw(st.sampled_from(["mm", "add", "mul", "tanh", "norm"])), draw(value), draw(value)))
    return operations


class Random(nn.Module):
    def __init__(self, operations: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.operations = operations
        self.weights = nn.ParameterList(torch.randn(4, 4) * 0.5 for _ in range(3))
        self.gain = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        values = [x, y, *self.weights, self.gain]
        apply = {
            "mm": lambda a, b: a @ b if b.ndim == 2 else a * b,
            "add": lambda a, b: a + b,
            "mul": lambda a, b: a * b,
            "tanh": lambda a, b: torch.tanh(a),
            "norm": lambda a, b: F.rms_norm(a, (4,), b if b.ndim == 1 else None),
        }
        for kind, left, right in self.operations:
            values.append(apply[kind](values[left], values[right]))
        return values[-1] * torch.ones(4, 4)


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_any_graph(operations: list[tuple[str, int, int]]) -> None:
    torch.manual_seed(0)
    whole = Random(operations)
    halved = copy.deepcopy(whole)
    inputs = [torch.randn(4, 4), torch.randn(4, 4)]
    expected, actual = (run(module, inputs, (), halves) for module, halves in ((whole, False), (halved, True)))
    assert all(map(same, expected, actual))
    for left, right in zip(whole.parameters(), halved.parameters(), strict=True):
        assert (left.grad is None) == (right.grad is None)
        if left.grad is not None:
            # Three uses or more may be summed in another order: a few roundings, where a missing term is of order one.
            torch.testing.assert_close(left.grad, right.grad, rtol=1e-4, atol=1e-4 * left.grad.abs().max().item())
