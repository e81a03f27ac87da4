"""How the regions of a step lie in each other, and the recursion that picks one pattern for each of them.

Autograd walks back what the forward did, so the life of a region, from its forward to its backward window,
holds the whole life of every region that began between the two: lives nest. While a region runs, or is walked
back, exactly the regions around it hold what they hold between their passes. So with

    need(p) = the highest bytes in both windows under pattern p, all regions around it left out
    held(p) = what p holds between the windows

the cheapest way through a region and all inside it, with s bytes left by those around it, is

    C(s) = min over p { cost(p) + sum of C'(s - held(p)) over the regions directly inside : need(p) <= s }

A region inside needs no budget to be known: C is a step function of s, worked out from the innermost region
outwards, and the outermost one has the answer for every budget.

The recursion over a chain of stages under a bound of memory is that of Beaumont et al., "Optimal checkpointing
for heterogeneous chains" (2019), with patterns in place of keeping or dropping a whole stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import sub
from typing import NamedTuple

from .parts import NO_LIMIT, Part
from .ways import Ways, best, both, nothing, then

_STEPS = 4000  # of one step function; exact bytes, the cheapest of each stretch
_WORK = 4_000_000  # options times steps, over all regions: fewer steps for very many regions


@dataclass(eq=False)
class Node:
    """One region among the others.

    Attributes:
        part: the region; None for the root, which holds the step. inside: the regions directly inside it.
        gap: highest bytes between its windows that are outside of all windows, no region's choice counted.
        shift: (forward, backward), bytes to add to the peaks of the region alone, no region's choice counted.
        double, double_gap: bytes in the windows and in the gap by which regions alone may count too much.
    """

    part: Part | None
    inside: list[Node] = field(default_factory=list)
    gap: int = 0
    shift: tuple[int, int] = (0, 0)
    double: tuple[int, int] = (0, 0)
    double_gap: int = 0


class Option(NamedTuple):
    """One pattern for one node: cost, bytes held, bytes needed."""

    cost_ns: int
    held: int
    need: int


def nest(found: Sequence[Part]) -> Node | None:
    """The root of the regions, which are given in the order of their forwards; None if lives overlap otherwise."""
    root = Node(None)
    around = [root]
    for part in found:
        while (last := around[-1].part) is not None and last.backward.stop <= part.forward.start:
            around.pop()
        if last is not None and not (last.forward.stop <= part.forward.start and _ends_inside(part, last)):
            return None
        node = Node(part)
        around[-1].inside.append(node)
        around.append(node)
    return root


def _ends_inside(part: Part, around: Part) -> bool:
    return part.backward.stop <= around.backward.start


def measure(root: Node, fixed: Sequence[int], bare: Sequence[tuple[int, int]], double: Sequence[int]) -> None:
    """Set gaps, shifts and doubles.

    Args:
        fixed: bytes at every event that no choice changes. bare: the same of each part alone, its windows' peaks.
        double: bytes at every event that may be counted twice.
    """
    alone, least = iter(bare), list(map(sub, fixed, double))
    for node in outside_in(root):
        node.gap = outside_windows(node, fixed)
        node.double_gap = node.gap - outside_windows(node, least)
        if node.part is not None:
            spans = node.part.forward, node.part.backward
            forward, backward = (max(fixed[a:b]) - own for (a, b), own in zip(spans, next(alone), strict=True))
            node.shift = forward, backward
            forward, backward = (max(double[a:b]) for a, b in spans)
            node.double = forward, backward


def outside_windows(node: Node, sizes: Sequence[int]) -> int:
    """The largest size between the windows of a node, or anywhere for the root, and outside of all inside it."""
    start, stop = 0, len(sizes)
    if node.part is not None:
        start, stop = node.part.forward.stop, node.part.backward.start
    most = 0
    for child in node.inside:
        assert child.part is not None
        most = max(most, max(sizes[start : child.part.forward.start], default=0))
        start = child.part.backward.stop
    return max(most, max(sizes[start:stop], default=0))


def outside_in(root: Node) -> list[Node]:
    """All nodes, each before those inside it, in the order of their forwards."""
    found: list[Node] = []
    waiting = [root]
    while waiting:
        node = waiting.pop()
        found.append(node)
        waiting += reversed(node.inside)
    return found


class Recursion:
    """The step functions of all nodes, for every budget up to a limit.

    Args:
        options: of each node; the root has none. gaps: bytes between the windows of each node. limit: bytes; no way
            that needs more is worked out, unless none needs less.
    """

    def __init__(
        self,
        root: Node,
        options: Mapping[Node, Sequence[Option]],
        gaps: Mapping[Node, int],
        limit: int = NO_LIMIT,
    ) -> None:
        self._root, self._options, self._limit = root, options, limit
        total = sum(len(some) for some in options.values())
        self._most = max(100, min(_STEPS, _WORK // (total + 1)))
        self._steps: dict[Node, Ways] = {}
        self._sums: dict[Node, list[Ways]] = {}
        for node in reversed(outside_in(root)):
            inside = self._inside(node).at_least(gaps[node])
            self._steps[node] = inside if node.part is None else self._of(node, inside)

    @property
    def steps(self) -> Ways:
        """Smallest budget first: what each budget costs."""
        return self._steps[self._root]

    @property
    def least(self) -> int:
        """The smallest budget that anything fits."""
        return int(self.steps.need[0])

    def picks(self, budget: int) -> dict[Node, int]:
        """The number of the option for each node, within a budget of at least the first way's need."""
        at = self.steps.last(budget)
        if at < 0:
            raise ValueError(f"nothing fits {budget} bytes, the smallest need is {self.least}")
        picks: dict[Node, int] = {}
        waiting = [(self._root, at)]
        while waiting:
            node, at = waiting.pop()
            if node.part is not None:
                ways = self._steps[node]
                picks[node], at = int(ways.how[at]), int(ways.inner[at])
            for child, sums in zip(reversed(node.inside), reversed(self._sums[node]), strict=True):
                waiting.append((child, int(sums.inner[at])))
                at = int(sums.rest[at])
        return picks

    def _inside(self, node: Node) -> Ways:
        """The sum over what is directly inside: ``inner`` is the child's way, ``rest`` that of the sum before it."""
        total = nothing()
        self._sums[node] = []
        for child in node.inside:
            total = best([both(self._steps[child], total, 0, 0, 0)], NO_LIMIT, self._most)
            self._sums[node].append(total)
        return total

    def _of(self, node: Node, inside: Ways) -> Ways:
        found = [then(own, held, cost, pick, inside) for pick, (cost, held, own) in enumerate(self._options[node])]
        return best(found, self._limit, self._most)
