"""Watch a backward pass from inside its nodes only, and what goes from node to node.

Between the nodes the engine sums the gradients that reach one tensor: in place, if nobody else holds them. Whatever
looks at gradients from Python holds them, so a watched pass makes a new buffer where the plain one makes none. Who
knows what each node gave and what the next received can tell those buffers from the plain step's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from budgetopt import _torch

Edge = tuple[int, int]
"""Where a gradient goes: the number of a node, and which of its inputs."""


class Watcher(Protocol):
    """A dispatch mode that also wants the gradients that go from node to node.

    Attributes:
        leaves: numbers of the nodes that gather the gradients of leaves.
    """

    leaves: set[int]

    def received(self, node: int, gradients: Any) -> None:
        """The node of that number is about to run on `gradients`."""

    def delivered(self, edges: Sequence[Edge], gradients: Any) -> None:
        """A node ran and gave `gradients`, which go along `edges`."""

    def __enter__(self) -> Any:
        """The mode goes on."""

    def __exit__(self, *details: Any) -> Any:
        """It goes off."""


@contextmanager
def inside_nodes(loss: torch.Tensor, watcher: Watcher) -> Iterator[None]:
    """Have `watcher` on while the nodes of the graph of `loss` run, and off between them."""

    nodes = _nodes(loss)
    watcher.leaves = {number for node, number in nodes.items() if not node.next_functions}
    handles = []
    for node, number in nodes.items():
        edges = [(nodes.get(parent, -1), slot) for parent, slot in node.next_functions]
        handles += [node.register_prehook(_before(watcher, number)), node.register_hook(_after(watcher, edges))]
    del nodes, node  # the engine's alone, as in a plain step
    before = _torch.modes()
    try:
        yield
    finally:
        _torch.back_to(before)  # an error inside a node leaves the mode on
        for handle in handles:  # a leaf's node may outlive the graph
            handle.remove()


def _before(watcher: Watcher, number: int) -> Callable[[Any], None]:
    def before(gradients: Any) -> None:
        watcher.received(number, gradients)
        watcher.__enter__()

    return before


def _after(watcher: Watcher, edges: Sequence[Edge]) -> Callable[[Any, Any], None]:
    def after(gradients: Any, received: Any) -> None:
        watcher.__exit__(None, None, None)
        watcher.delivered(edges, gradients)

    return after


def _nodes(loss: torch.Tensor) -> dict[Any, int]:
    """All nodes of the graph, with a number each."""
    found: dict[Any, int] = {}
    stack = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found[node] = len(found)
            stack.extend(parent for parent, _ in node.next_functions)
    return found
