"""The row of regions that a recursion over a chain works on: what each holds, hands on and may do.

Where there are very many regions, neighbours are joined into one *stretch*, with the best combinations of their
patterns: a recursion rounds bytes at each step, and many steps add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import NamedTuple

from .catalogue import Catalogue
from .nest import Node, outside_in
from .patterns import Pattern
from .problem import Choice, Problem
from .stages import fixed_bytes
from .timeline import timeline

_OPTIONS = 6  # per stretch at most, and one


class Option(NamedTuple):
    """What a stretch may do: a pattern for each of its regions.

    Attributes:
        forward, backward: highest bytes in its windows, with what no choice changes there. held: between them.
        cost: nanoseconds. alone: to make what is kept, in a pass that ends here. both: that as well as what is handed
            on. patterns: one per region.
    """

    forward: int
    backward: int
    held: int
    cost: int
    alone: int
    both: int
    patterns: tuple[Pattern, ...]

    @property
    def need(self) -> int:
        """Highest bytes in both windows."""
        return max(self.forward, self.backward)


@dataclass(frozen=True, slots=True)
class Stretch:
    """One region of the chain, or several in a row that are treated as one.

    Attributes:
        nodes: its regions. first, last: number of the first one, and of the last one before the next stretch.
        gap: bytes between the windows, outside of what is inside. again: time to make what it hands on.
        before: bytes at the start of its forward, and of its backward, that no choice changes. handed: what is held
            for other regions alone, as (the last one that uses it, bytes). linked: some of it is for the next stretch.
    """

    nodes: tuple[Node, ...]
    first: int
    last: int
    gap: int
    again: int
    options: tuple[Option, ...]
    before: tuple[int, int]
    handed: tuple[tuple[int, int], ...]
    linked: bool

    def freed(self, last: int) -> int:
        """Bytes that need not be held if all regions up to the last one are run again."""
        return sum(size for reach, size in self.handed if reach <= last)


def stretches(problem: Problem, catalogue: Catalogue, most: int) -> list[Stretch]:
    """The regions if each lies directly in the one before it, joined to about `most` stretches; else none."""
    single = _single(problem, catalogue)
    size = -(-len(single) // most)
    rows: list[list[Stretch]] = []
    for one in single:
        if not rows or len(rows[-1]) >= size or not rows[-1][-1].linked:
            rows.append([])
        rows[-1].append(one)
    return [reduce(_joined, reversed(row[:-1]), row[-1]) for row in rows]


def _joined(inner: Stretch, outer: Stretch) -> Stretch:
    options = [_one_in_another(a, b, outer.gap) for a, b in product(outer.options, inner.options)]
    return Stretch(
        outer.nodes + inner.nodes,
        outer.first,
        inner.last,
        inner.gap,
        outer.again + inner.again,
        _few(options),
        (outer.before[0], inner.before[1]),
        outer.handed + inner.handed,
        inner.linked,
    )


def _one_in_another(outer: Option, inner: Option, gap: int) -> Option:
    return Option(
        max(outer.forward, outer.held + inner.forward),
        max(outer.backward, outer.held + inner.backward, outer.held + gap),
        outer.held + inner.held,
        outer.cost + inner.cost,
        outer.both + inner.alone,
        outer.both + inner.both,
        outer.patterns + inner.patterns,
    )


def _single(problem: Problem, catalogue: Catalogue) -> list[Stretch]:
    nodes = [node for node in outside_in(catalogue.root) if node.part is not None]
    if not nodes or any(len(node.inside) > 1 for node in (catalogue.root, *nodes)):
        return []
    line, fixed = timeline(problem), fixed_bytes(problem)
    crossing: dict[int, list[int]] = {}
    for v in sorted(line.crossing):
        if not problem.values[v].halved:
            crossing.setdefault(problem.values[v].region, []).append(v)
    numbers = [node.part.region for node in nodes if node.part is not None]
    found = []
    for node, first, after in zip(nodes, numbers, [*numbers[1:], len(problem.regions)], strict=True):
        assert node.part is not None
        own = crossing.get(first, [])
        few = _few([_option(node, pattern) for pattern in catalogue.workshops[node].patterns])
        held = [v for v in own if line.die_at[problem.values[v].storage] < line.released_at[v]]
        found.append(
            Stretch(
                (node,),
                first,
                after - 1,
                node.gap,
                _time(problem, own),
                tuple(_timed(problem, node, one, own) for one in few),
                (fixed[node.part.forward.start], fixed[node.part.backward.start]),
                tuple((line.reach[v], problem.storages[problem.values[v].storage]) for v in held),
                any(line.reach[v] >= after for v in own),
            )
        )
    return found


def _option(node: Node, pattern: Pattern) -> Option:
    """A pattern in its place, without the times of a pass."""
    forward, backward = pattern.forward + node.shift[0], pattern.backward + node.shift[1]
    return Option(forward, backward, pattern.held, pattern.cost_ns, 0, 0, (pattern,))


def _timed(problem: Problem, node: Node, option: Option, crossing: Sequence[int]) -> Option:
    assert node.part is not None
    pairs = zip(node.part.values, option.patterns[0].choices, strict=True)
    kept = {v for v, choice in pairs if choice == Choice.KEEP}
    return option._replace(alone=_time(problem, kept), both=_time(problem, {*kept, *crossing}))


def _time(problem: Problem, values: Iterable[int]) -> int:
    """Of the operators of one region that make these values from what is kept in any case."""
    line = timeline(problem)
    operators: set[int] = set()
    waiting = [v for v in values if v not in line.kept or v in line.crossing]
    while waiting:
        i = problem.values[waiting.pop()].operator
        if i not in operators:
            operators.add(i)
            waiting += [u for u in line.inner[i] if u not in line.kept]
    return sum(problem.operators[i].time_ns for i in operators)


def _few(options: Sequence[Option]) -> tuple[Option, ...]:
    """Those on the lower hull of bytes held and cost, evenly, and the one that needs the least."""
    hull: list[Option] = []
    for one in sorted(options, key=lambda one: (one.held, one.cost, one.need)):
        while len(hull) > 1 and _above(hull[-2], hull[-1], one):
            hull.pop()
        if not hull or one.cost < hull[-1].cost:
            hull.append(one)
    step = max(1, -(-(len(hull) - 1) // (_OPTIONS - 1)))
    chosen = [*hull[::step], hull[-1], min(options, key=lambda one: (one.need, one.cost, one.held))]
    return tuple(dict.fromkeys(chosen))


def _above(left: Option, middle: Option, right: Option) -> bool:
    """Whether the middle one is no cheaper than a mixture of the two around it."""
    wide, part = right.held - left.held, middle.held - left.held
    return (middle.cost - left.cost) * wide >= (right.cost - left.cost) * part
