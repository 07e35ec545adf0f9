"""Backward in two halves: first the gradient of the inputs, which the previous stage waits for, later that of the weights.

Imports torch only. Zero-bubble schedules (Qi et al. 2023, 2401.10241) fill bubbles with the second half. Both halves
walk the one autograd graph of the forward. The graph's nodes split in two: those on a way to an input, and the rest.
A node on the way whose other edges lead to parameters is a *frontier* node: the first half notes the gradient that
arrives at it, the second half starts from there and computes only what leads to parameters. The same kernels run on
the same numbers in the same order as in an undivided backward, so the gradients are bitwise equal; parameters are
accumulated by the engine itself, so their hooks fire, once. Parameters are found in the graph, not in the module: a
sharded module shows other tensors by the time the second half runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass(slots=True)
class _Group:
    """Parameters that share frontier nodes: one run of the engine gives all their gradients."""

    frontier: list[Node]
    leaves: list[Tensor]
    arrived: dict[Node, tuple[Tensor | None, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class PendingWeights:
    """What the second half needs. Holds the graph, and so the activations, alive until it has run."""

    groups: list[_Group]
    detached_roots: list[tuple[GradientEdge, Tensor | None]]  # outputs that no input leads to


def backward_input(
    roots: Sequence[GradientEdge], root_grads: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], PendingWeights]:
    """Run the first half: the gradient of each of `inputs`, and what `backward_weight` takes later.

    `roots` are the edges of the outputs, `root_grads` their gradients (None for a scalar is 1). An input that no output
    depends on gets None. With no inputs at all everything is left to the second half.
    """
    ways = _Ways([root.node for root in roots], [get_gradient_edge(each).node for each in inputs])
    reached = [(root, grad) for root, grad in zip(roots, root_grads, strict=True) if root.node in ways.to_input]
    detached = [(root, grad) for root, grad in zip(roots, root_grads, strict=True) if root.node not in ways.to_input]
    groups = ways.groups()
    handles = [
        node.register_prehook(_recorder(group.arrived, node)) for group in groups for node in group.frontier
    ]
    try:
        grads: list[Tensor | None] = [None] * len(inputs)
        if reached:
            edges, edge_grads = zip(*reached, strict=True)
            grads = list(torch.autograd.grad(edges, list(inputs), edge_grads, retain_graph=True, allow_unused=True))
    finally:
        for handle in handles:
            handle.remove()
    return grads, PendingWeights(groups, detached)


def backward_weight(pending: PendingWeights) -> None:
    """Run the second half: accumulate into the parameters' `.grad` and let go of the graph."""
    for group in pending.groups:
        edges, grads = [], []
        for node in group.frontier:
            for index, grad in enumerate(group.arrived.get(node, ())):
                if grad is not None:
                    edges.append(GradientEdge(node, index))
                    grads.append(grad)
        if not edges:
            continue  # the outputs' gradients never came this way
        # Among several frontier nodes one may lie below another. The engine then adds what flows down to what we
        # feed in, though the first half's recording holds both already: put the recording in place of the sum.
        several = len(group.frontier) > 1
        handles = [
            node.register_prehook(_replacer(group.arrived[node]))
            for node in group.frontier
            if several and node in group.arrived
        ]
        try:
            # Groups cross each other's nodes on such ways, so nothing is freed before all have run.
            torch.autograd.backward(edges, grads, retain_graph=True, inputs=group.leaves)
        finally:
            for handle in handles:
                handle.remove()
    if pending.detached_roots:
        roots, root_grads = zip(*pending.detached_roots, strict=True)
        torch.autograd.backward(roots, root_grads)
    pending.groups.clear()
    pending.detached_roots.clear()


class _Ways:
    """Which nodes of a graph lead to an input, which only to parameters."""

    def __init__(self, roots: Sequence[Node], input_nodes: Sequence[Node]) -> None:
        inputs = set(input_nodes)
        self.to_input: set[Node] = set()
        self._to_leaves: dict[Node, frozenset[Node]] = {}  # parameters below a node off the inputs' ways
        order = _children_first(roots)
        for node in order:
            if node in inputs or any(child in self.to_input for child, _ in node.next_functions):
                self.to_input.add(node)
                continue
            if _is_leaf(node):
                self._to_leaves[node] = frozenset((node,))
            else:
                below = [self._to_leaves[child] for child, _ in node.next_functions if child is not None]
                self._to_leaves[node] = frozenset().union(*below) if below else frozenset()
        self._order = order

    def groups(self) -> list[_Group]:
        """Frontier nodes with the parameters that they lead to, joined where they share some; roots' side first."""
        by_leaf: dict[Node, _Group] = {}
        for node in reversed(self._order):
            if node not in self.to_input:
                continue
            leaves: dict[Node, None] = {}
            for child, _ in node.next_functions:
                if child is not None and child not in self.to_input:
                    leaves.update(dict.fromkeys(self._to_leaves[child]))
            if leaves:
                _join(by_leaf, node, list(leaves))
        return list({id(group): group for group in by_leaf.values()}.values())


def _join(by_leaf: dict[Node, _Group], node: Node, leaves: list[Node]) -> None:
    """Put `node` into one group with every earlier group that shares a leaf with it."""
    shared = {id(by_leaf[leaf]): by_leaf[leaf] for leaf in leaves if leaf in by_leaf}
    joined = _Group([], [])
    for group in shared.values():
        joined.frontier += group.frontier
        joined.leaves += group.leaves
    joined.frontier.append(node)
    joined.leaves += [leaf.variable for leaf in leaves if leaf not in by_leaf]
    members = [leaf for leaf, group in by_leaf.items() if id(group) in shared] if shared else []
    by_leaf.update(dict.fromkeys([*members, *leaves], joined))


def _children_first(roots: Sequence[Node]) -> list[Node]:
    """All nodes below `roots`, each after the nodes that it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions if child is not None and child not in seen)
    return order


def _is_leaf(node: Node) -> bool:
    return not node.next_functions and hasattr(node, "variable")


def _recorder(arrived: dict[Node, tuple[Tensor | None, ...]], node: Node):
    def record(grads: tuple[Tensor | None, ...]) -> None:
        arrived[node] = grads

    return record


def _replacer(recorded: tuple[Tensor | None, ...]):
    def replace(_: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return recorded

    return replace
