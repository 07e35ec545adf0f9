"""Backward in two halves: first the input gradient, which the previous stage waits for, later that of the weights.

Imports torch only. Zero-bubble schedules (Qi et al. 2023, 2401.10241) fill bubbles with the second half. Both halves
walk the one autograd graph of the forward. The graph's nodes split in two: those on a way to an input, and the rest.
A node on the way whose other edges lead to parameters is a *frontier* node: the first half notes the gradient that
arrives at it, the second half starts from there and computes only what leads to parameters. The same kernels run on
the same numbers in the same order as in an undivided backward, so the gradients are bitwise equal; parameters are
accumulated by the engine itself, so their hooks fire, once. (A hook on an activation that is the direct result of an
operation with a weight runs in both halves; what it returns counts once. The one sum whose order may differ is that of
a parameter with three uses or more, of which some multiply activations and others only parameters.) Parameters are
found in the graph, not in the module: a sharded module shows other tensors by the time the second half runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Grads = tuple[Tensor | None, ...]


@dataclass(slots=True)
class _Group:
    """Parameters, and all the places from which gradients flow to them off the inputs' ways: one run of the engine."""

    frontier: list[Node]
    roots: list[tuple[GradientEdge, Tensor | None]]  # outputs that no input leads to, with their gradients
    leaves: list[Tensor]
    arrived: dict[Node, Grads] = field(default_factory=dict)  # what the first half recorded at the frontier
    off_inputs: set[Node] = field(default_factory=set)  # where the frontier's edges leave the inputs' ways


@dataclass(slots=True)
class PendingWeights:
    """What the second half needs. Holds the graph, and so the activations, alive until it has run."""

    groups: list[_Group]


def backward_input(
    roots: Sequence[GradientEdge], root_grads: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], PendingWeights]:
    """Run the first half: the gradient of each of `inputs`, and what `backward_weight` takes later.

    `roots` are the edges of the outputs, `root_grads` their gradients (None for a scalar is 1). An input that no output
    depends on gets None.
    """
    ways = _Ways([root.node for root in roots], [get_gradient_edge(each).node for each in inputs])
    pairs = list(zip(roots, root_grads, strict=True))
    groups = ways.groups([pair for pair in pairs if pair[0].node not in ways.to_input])
    handles = [node.register_prehook(_recorder(group.arrived, node)) for group in groups for node in group.frontier]
    try:
        grads: list[Tensor | None] = [None] * len(inputs)
        reached = [pair for pair in pairs if pair[0].node in ways.to_input]
        if reached:
            edges, edge_grads = zip(*reached, strict=True)
            grads = list(torch.autograd.grad(edges, list(inputs), edge_grads, retain_graph=True, allow_unused=True))
    finally:
        for handle in handles:
            handle.remove()
    return grads, PendingWeights(groups)


def backward_weight(pending: PendingWeights) -> None:
    """Run the second half: accumulate into the parameters' `.grad` and let go of the graph."""
    for group in pending.groups:
        if len(group.frontier) + len(group.roots) == 1:
            _run_from_one(group)
        else:
            _run_from_several(group)
    pending.groups.clear()


def _run_from_one(group: _Group) -> None:
    """Let the engine run the one frontier node again, for its parameters' sake only."""
    edges, grads = zip(*group.roots, strict=True) if group.roots else ((), ())
    handles = []
    for node, arrived in group.arrived.items():
        given = [index for index, grad in enumerate(arrived) if grad is not None]
        edges = tuple(GradientEdge(node, index) for index in given)
        grads = tuple(arrived[index] for index in given)
        # A hook on what the node made runs again; the recording has seen it already.
        handles.append(node.register_prehook(_replacer(arrived)))
    try:
        if edges:
            torch.autograd.backward(edges, grads, inputs=group.leaves)
    finally:
        for handle in handles:
            handle.remove()


def _run_from_several(group: _Group) -> None:
    """Call the frontier nodes by hand, then let the engine sum what comes out of them.

    One of the nodes may lie below another, on the way from it to the shared parameter; the engine would run that way
    again, and its hooks. A call by hand computes the gradient of the node's input once more, which nobody takes.
    """
    edges, grads = [edge for edge, _ in group.roots], [grad for _, grad in group.roots]
    for node, arrived in group.arrived.items():
        call = node if callable(node) else node.apply
        made = call(*arrived)
        made = made if isinstance(made, tuple) else (made,)
        for (child, index), grad in zip(node.next_functions, made, strict=True):
            if child in group.off_inputs and grad is not None:
                # What the engine does between nodes: undo broadcasting and promotion.
                expected = child._input_metadata[index]
                edges.append(GradientEdge(child, index))
                grads.append(grad.sum_to_size(expected.shape).to(expected.dtype))
    if edges:
        torch.autograd.backward(edges, grads, inputs=group.leaves)


class _Ways:
    """Which nodes of a graph lead to an input, which only to parameters."""

    def __init__(self, roots: Sequence[Node], input_nodes: Sequence[Node]) -> None:
        inputs = set(input_nodes)
        self.to_input: set[Node] = set()
        self._to_leaves: dict[Node, frozenset[Node]] = {}  # parameters below a node off the inputs' ways
        self._order = _children_first(roots)
        for node in self._order:
            children = [child for child, _ in node.next_functions if child is not None]
            if node in inputs or any(child in self.to_input for child in children):
                self.to_input.add(node)
            elif _is_leaf(node):
                self._to_leaves[node] = frozenset((node,))
            else:
                self._to_leaves[node] = frozenset().union(*(self._to_leaves[child] for child in children))

    def groups(self, detached: list[tuple[GradientEdge, Tensor | None]]) -> list[_Group]:
        """Frontier nodes and detached roots with their parameters, joined where they share some; roots' side first."""
        by_leaf: dict[Node, _Group] = {}
        for node in reversed(self._order):
            if node in self.to_input:
                children = [child for child, _ in node.next_functions if child in self._to_leaves]
                leaves = dict.fromkeys(leaf for child in children for leaf in self._to_leaves[child])
                _join(by_leaf, list(leaves), _Group([node], [], [], off_inputs=set(children)))
        for root, grad in detached:
            _join(by_leaf, list(self._to_leaves[root.node]), _Group([], [(root, grad)], []))
        return list({id(group): group for group in by_leaf.values()}.values())


def _join(by_leaf: dict[Node, _Group], leaves: list[Node], source: _Group) -> None:
    """Put `source`, from which gradients flow to `leaves`, into one group with all that flows there too."""
    if not leaves:
        return
    shared = {id(by_leaf[leaf]): by_leaf[leaf] for leaf in leaves if leaf in by_leaf}
    joined = _Group([], [], [leaf.variable for leaf in leaves if leaf not in by_leaf])
    for group in (*shared.values(), source):
        joined.frontier += group.frontier
        joined.roots += group.roots
        joined.leaves += group.leaves
        joined.off_inputs |= group.off_inputs
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


def _recorder(arrived: dict[Node, Grads], node: Node) -> Callable[[Grads], None]:
    def record(grads: Grads) -> None:
        arrived[node] = grads

    return record


def _replacer(recorded: Grads) -> Callable[[Grads], Grads]:
    def replace(_: Grads) -> Grads:
        return recorded

    return replace
