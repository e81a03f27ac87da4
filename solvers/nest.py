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

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .parts import Part

_STEPS = 2000  # of one step function; exact bytes, the cheapest of each stretch
_WORK = 30_000_000  # patterns times steps, over all regions: fewer steps for very many regions


@dataclass(eq=False)
class Node:
    """One region among the others.

    Attributes:
        part: the region; None for the root, which holds the step. inside: the regions directly inside it.
        gap: highest bytes between its windows that are outside of all windows, no region's choice counted.
        shift: (forward, backward), bytes to add to the peaks of the region alone, no region's choice counted.
    """

    part: Part | None
    inside: list[Node] = field(default_factory=list)
    gap: int = 0
    shift: tuple[int, int] = (0, 0)


class Option(NamedTuple):
    """One pattern for one node: cost, bytes held, bytes needed."""

    cost_ns: int
    held: int
    need: int


class Step(NamedTuple):
    """From ``need`` bytes on, ``cost_ns`` is possible: with option ``pick``, and step ``rest`` of what is inside."""

    need: int
    cost_ns: int
    pick: int
    rest: int


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


def measure(root: Node, fixed: Sequence[int], bare: Sequence[tuple[int, int]]) -> None:
    """Set gaps and shifts. ``fixed``: bytes at every event that no choice changes; ``bare``: of each part alone."""
    alone = iter(bare)
    for node in outside_in(root):
        start, stop = 0, len(fixed)
        if node.part is not None:
            start, stop = node.part.forward.stop, node.part.backward.start
            peaks = (max(fixed[span.start : span.stop]) for span in (node.part.forward, node.part.backward))
            forward, backward = (peak - own for peak, own in zip(peaks, next(alone), strict=True))
            node.shift = forward, backward
        for child in node.inside:
            assert child.part is not None
            node.gap = max(node.gap, max(fixed[start : child.part.forward.start], default=0))
            start = child.part.backward.stop
        node.gap = max(node.gap, max(fixed[start:stop], default=0))


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
    """The step functions of all nodes, for every budget.

    Args:
        options: of each node; the root has none.
    """

    def __init__(self, root: Node, options: Mapping[Node, Sequence[Option]]) -> None:
        self._root, self._options = root, options
        self._nodes = outside_in(root)
        total = sum(len(some) for some in options.values())
        self._most = max(100, min(_STEPS, _WORK // (total + 1)))
        self._steps: dict[Node, list[Step]] = {}
        self._sums: dict[Node, list[list[Step]]] = {}
        for node in reversed(self._nodes):
            inside = self._inside(node)
            self._steps[node] = self._of(node, inside) if node.part is not None else _with_gap(inside, node.gap)

    @property
    def steps(self) -> list[Step]:
        """Smallest budget first: what each budget costs."""
        return self._steps[self._root]

    def picks(self, budget: int) -> dict[Node, int]:
        """The number of the option for each node, within a budget of at least the first step's need."""
        at = bisect_right(self.steps, budget, key=lambda step: step.need) - 1
        if at < 0:
            raise ValueError(f"nothing fits {budget} bytes, the smallest need is {self.steps[0].need}")
        picks: dict[Node, int] = {}
        waiting = [(self._root, at)]
        while waiting:
            node, at = waiting.pop()
            step = self._steps[node][at]
            if node.part is not None:
                picks[node] = step.pick
            at = step.rest
            for child, sums in zip(reversed(node.inside), reversed(self._sums[node]), strict=True):
                waiting.append((child, sums[at].pick))
                at = sums[at].rest
        return picks

    def _inside(self, node: Node) -> list[Step]:
        """The sum over what is directly inside; ``pick`` is the child's step, ``rest`` that of the sum before it."""
        total = [Step(0, 0, 0, 0)]
        self._sums[node] = []
        for child in node.inside:
            total = _thin(_sum(self._steps[child], total), self._most)
            self._sums[node].append(total)
        return total

    def _of(self, node: Node, inside: list[Step]) -> list[Step]:
        found: list[Step] = []
        inner = _with_gap(inside, node.gap)
        for pick, option in enumerate(self._options[node]):
            spare = option.need - option.held
            first = max(0, bisect_right(inner, spare, key=lambda step: step.need) - 1)
            found += [
                Step(max(option.need, option.held + step.need), option.cost_ns + step.cost_ns, pick, step.rest)
                for step in inner[first:]
            ]
        found.sort()
        return _thin(found, self._most)


def _with_gap(inside: list[Step], gap: int) -> list[Step]:
    """Steps of what is inside, when the gap between needs its bytes too; ``rest`` is the number of the step."""
    return _falling([Step(max(gap, step.need), step.cost_ns, 0, at) for at, step in enumerate(inside)])


def _sum(child: list[Step], before: list[Step]) -> list[Step]:
    """Both, with the same bytes: at every need of one or the other, the last steps of each."""
    found: list[Step] = []
    a = b = 0
    while a < len(child) and b < len(before):
        need = max(child[a].need, before[b].need)
        while a + 1 < len(child) and child[a + 1].need <= need:
            a += 1
        while b + 1 < len(before) and before[b + 1].need <= need:
            b += 1
        found.append(Step(need, child[a].cost_ns + before[b].cost_ns, a, b))
        next_a = child[a + 1].need if a + 1 < len(child) else None
        next_b = before[b + 1].need if b + 1 < len(before) else None
        if next_a is not None and (next_b is None or next_a <= next_b):
            a += 1
        elif next_b is not None:
            b += 1
        else:
            break
    return found


def _falling(steps: Sequence[Step]) -> list[Step]:
    """Sorted steps without those that are no cheaper than one that needs less."""
    found: list[Step] = []
    for step in steps:
        if not found or step.cost_ns < found[-1].cost_ns:
            if found and found[-1].need == step.need:
                found.pop()
            found.append(step)
    return found


def _thin(steps: Sequence[Step], most: int) -> list[Step]:
    """At most so many falling steps and one: the first, and the cheapest of each stretch of bytes."""
    falling = _falling(steps)
    if len(falling) <= most:
        return falling
    low = falling[0].need
    width = (falling[-1].need - low) // most + 1
    cheapest = {(step.need - low) // width: step for step in falling}
    return _falling([falling[0], *cheapest.values()])
