"""Segments of a chain of regions: which rows to run again, and which pattern each region gets then.

Where regions follow each other one by one, what is left of the budget when region g begins decides alone what is
best from there on. With patterns p of one region as in :mod:`budgetopt.solvers.nest`, and rows g..t that become a
segment, the cheapest way through g..s with m bytes left is

    C(g, s, m) = min( min over p { cost(p) + C(g+1, s, m - held(p)) : need(p) <= m },
                      min over t { again(g..t) + C(g, t, m) + C(t+1, s, m + handed(g..t)) } )

where handed(g..t) is what the regions of the row hand to each other and the segment need not hold meanwhile, and
again(g..t) the time of its pass. C(g, t, m) inside may use segments in its turn. This is the recursion of Beaumont
et al., "Optimal checkpointing for heterogeneous chains" (2019), with patterns as its leaves. Every C is a step
function of m, so one recursion serves all budgets. It is not exact, as passes overlap with what is around them: the
referee judges what comes of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from time import monotonic
from typing import Any, NamedTuple

from .answer import answer
from .catalogue import Catalogue
from .errors import InfeasibleError
from .memory import Simulation, holds, minimum, normalise, simulate
from .nest import Node, outside_in
from .patterns import Pattern
from .problem import Choice, Problem, Segment, Solution
from .regions import regions
from .segments import late
from .stages import fixed_bytes
from .stepwise import last, thin, together
from .timeline import timeline

_CUTS = 40  # places at most where segments may begin or end
_OPTIONS = 6  # patterns per region at most, and one
_STEPS = 150  # of one step function at most
_WORK = 3_000_000  # steps in all, about: fewer of each for long chains
_PLAIN = 0.5  # of the time limit is for the answer without segments
_TRIES = 6  # answers of the recursion that the referee is asked about
_FEWEST = 3  # regions that make a chain worth cutting


def segments(problem: Problem, backend: str = "auto", time_limit: float = 10.0, gap: float = 0.01) -> Solution:
    """The better of what :func:`regions` answers and of the best rows of regions to run again.

    Where the regions are no chain, it is the former. ``bound_ns`` holds for choices without segments: an answer may
    cost less.

    Raises:
        InfeasibleError: nothing was found that the referee accepts. SolverError: ``backend`` is unknown.
    """
    deadline = monotonic() + time_limit
    try:
        plain = regions(problem, backend, _PLAIN * time_limit, gap)
    except InfeasibleError as error:
        found, engines = _rows(problem, backend, deadline)
        if found is None or found.peak >= error.minimum:
            raise
        return answer(problem, found, f"segments, {engines}", "feasible")
    found, engines = _rows(problem, backend, deadline)
    if found is None or found.peak > problem.budget or plain.cost_ns <= found.cost_ns:
        return plain
    return answer(problem, found, f"segments, {engines}", "feasible", plain.bound_ns)


def _rows(problem: Problem, backend: str, deadline: float) -> tuple[Simulation | None, str]:
    """The best rows to run again, if the regions are a chain, and who answered for the patterns."""
    catalogue = Catalogue.of(problem, backend, deadline)
    if catalogue is None:
        return None, ""
    catalogue.learn(minimum(problem, deadline=deadline)[1])
    return _best(problem, catalogue, Chain(problem, catalogue, fixed_bytes(problem))), catalogue.engines


def _best(problem: Problem, catalogue: Catalogue, chain: Chain) -> Simulation | None:
    """The cheapest of the chain's ways that the referee accepts, or that with the smallest peak.

    What the chain says of a need is close, not exact: it is asked for somewhat less where the referee counts more.
    """
    best: Simulation | None = None
    budget = problem.budget
    for _ in range(_TRIES):
        pick = chain.within(max(budget, chain.steps[0].need)) if chain.steps else None
        if pick is None:
            break
        found = pick.judged(problem, catalogue)
        rank = max(0, found.peak - problem.budget), found.cost_ns
        if best is None or rank < (max(0, best.peak - problem.budget), best.cost_ns):
            best = found
        if found.peak <= problem.budget or budget <= chain.steps[0].need:
            break
        budget -= max(1, found.peak - problem.budget)
    return best


class Step(NamedTuple):
    """From ``need`` bytes on, ``cost`` nanoseconds are possible; ``how`` is a linked list of what is done."""

    need: int
    cost: int
    how: Any


class Pick(NamedTuple):
    """A pattern for each region, and the segments."""

    patterns: dict[Node, Pattern]
    segments: tuple[Segment, ...]

    def judged(self, problem: Problem, catalogue: Catalogue) -> Simulation:
        """What the referee says of it. What a pass would store for itself alone is made on its way instead."""
        chosen = list(normalise(problem, catalogue.choices(self.patterns)))
        line = timeline(problem)
        stored = late(problem, line, chosen, self.segments)
        _, _, wanted = holds(problem, line, chosen, stored)
        for v, level in stored.level.items():
            if wanted[v] <= stored.begins[level]:  # one that crosses regions stays as it is: see normalise
                chosen[v] = Choice.RECOMPUTE
        return simulate(problem, chosen, self.segments)


@dataclass(slots=True)
class _Region:
    """One region of the chain.

    Attributes:
        first, last: its number, and that of the last region before the next one in the chain. again: time to make
            what it hands on. options: patterns, each with the time to make what it keeps, and that as well as what is
            handed on. before: bytes at the start of its forward, and of its backward, that no choice changes. handed:
            what is held for other regions alone, as (the last one that uses it, bytes). linked: some of it is for the
            next one.
    """

    node: Node
    first: int
    last: int
    again: int
    options: list[tuple[Pattern, int, int]]
    before: tuple[int, int]
    handed: list[tuple[int, int]]
    linked: bool


class Chain:
    """The recursion over a chain of regions; no steps, where there is no chain to speak of.

    Args:
        fixed: bytes at every event that no choice changes.
    """

    def __init__(self, problem: Problem, catalogue: Catalogue, fixed: Sequence[int]) -> None:
        self._regions = _row(problem, catalogue, fixed)
        self._end = len(self._regions) - 1
        self._cuts = _places(len(self._regions))
        pairs = max(1, len(self._cuts) * len(self._regions) // 2)
        self._most = max(20, min(_STEPS, _WORK // (pairs * _OPTIONS)))
        self._known: dict[tuple[int, int], list[Step]] = {}
        if self._end + 1 >= _FEWEST and any(region.linked for region in self._regions):
            for end in [*(cut - 1 for cut in self._cuts[1:]), self._end]:
                self._to(end)
        self.steps = self._known.get((0, self._end), [])

    def within(self, budget: int) -> Pick | None:
        """The cheapest way that is said to need no more; None if there is none."""
        at = last(self.steps, budget)
        return None if at < 0 else self._pick(self.steps[at].how)

    def _to(self, end: int) -> None:
        """All C(g, end) for g at a place where a segment may begin. On the outside, to keep costs no time."""
        outside = end == self._end
        steps = [Step(0, 0, None)]
        handed = 0
        for g in range(end, -1, -1):
            region = self._regions[g]
            if not outside and g < end and not region.linked:
                return
            handed += sum(size for reach, size in region.handed if reach <= self._regions[end].last)
            forward = region.node.shift[0]
            if not outside:  # its forward is in the pass, in the middle of the backward
                forward += max(0, self._regions[end].before[1] - handed - region.before[0])
            if outside or g < end:
                steps = [Step(max(step.need, region.node.gap), *step[1:]) for step in steps]
            steps = self._plain(g, forward, _storing(region, outside, g == end), steps)
            if g in self._cuts:
                steps = self._thin([*steps, *self._segments(g, end)])
                self._known[g, end] = steps

    def _plain(self, g: int, shift: int, storing: list[int], inner: list[Step]) -> list[Step]:
        """Region g with a pattern, and then the rest; ``storing``: nanoseconds more for each pattern."""
        region = self._regions[g]
        found = []
        for (pattern, _, _), more in zip(region.options, storing, strict=True):
            own = max(pattern.forward + shift, pattern.backward + region.node.shift[1])
            cost = pattern.cost_ns + more
            first = max(0, last(inner, own - pattern.held))
            for need, rest, how in inner[first:]:
                found.append(Step(max(own, need + pattern.held), cost + rest, (g, pattern, how)))
        return self._thin(found)

    def _segments(self, g: int, end: int) -> Iterator[Step]:
        """Segments that begin at g, and then the rest."""
        again = 0
        for t in range(g, end):
            region = self._regions[t]
            inside, rest = self._known.get((g, t)), self._known.get((t + 1, end))
            if inside is not None and rest is not None:
                size = sum(b for k in self._regions[g : t + 1] for reach, b in k.handed if reach <= region.last)
                for need, cost, a, b in together(inside, rest, size):
                    yield Step(need, cost + again, (g, t, inside[a].how, rest[b].how))
            again += region.again
            if not region.linked:
                return

    def _thin(self, steps: list[Step]) -> list[Step]:
        return thin(sorted(steps, key=_need_and_cost), self._most)

    def _pick(self, how: Any) -> Pick:
        patterns: dict[Node, Pattern] = {}
        segments: list[Segment] = []
        waiting = [how]
        while waiting:
            how = waiting.pop()
            if how is None:
                continue
            if len(how) == 3:
                g, pattern, rest = how
                patterns[self._regions[g].node] = pattern
                waiting.append(rest)
            else:
                g, t, inside, rest = how
                segments.append(Segment(self._regions[g].first, self._regions[t].last))
                waiting += [inside, rest]
        return Pick(patterns, tuple(sorted(segments)))


def _row(problem: Problem, catalogue: Catalogue, fixed: Sequence[int]) -> list[_Region]:
    """The regions, if each lies directly in the one before it; else none."""
    nodes = [node for node in outside_in(catalogue.root) if node.part is not None]
    if not nodes or any(len(node.inside) > 1 for node in (catalogue.root, *nodes)):
        return []
    line = timeline(problem)
    crossing: dict[int, list[int]] = {}
    for v in sorted(line.crossing):
        crossing.setdefault(problem.values[v].region, []).append(v)
    numbers = [node.part.region for node in nodes if node.part is not None]
    found = []
    for node, first, after in zip(nodes, numbers, [*numbers[1:], len(problem.regions)], strict=True):
        assert node.part is not None
        own = crossing.get(first, [])
        kept = {
            p: {v for v, choice in zip(node.part.values, p.choices, strict=True) if choice == Choice.KEEP}
            for p in _few(catalogue.workshops[node].patterns)
        }
        options = [(p, _time(problem, values), _time(problem, {*values, *own})) for p, values in kept.items()]
        held = [v for v in own if line.die_at[problem.values[v].storage] < line.released_at[v]]
        found.append(
            _Region(
                node,
                first,
                after - 1,
                _time(problem, own),
                options,
                (fixed[node.part.forward.start], fixed[node.part.backward.start]),
                [(line.reach[v], problem.storages[problem.values[v].storage]) for v in held],
                any(line.reach[v] >= after for v in own),
            )
        )
    return found


def _storing(region: _Region, outside: bool, at_end: bool) -> list[int]:
    """Time to store what each pattern keeps, in a pass that makes what the region hands on, unless it is the last."""
    if outside:
        return [0] * len(region.options)
    return [alone if at_end else both - region.again for _, alone, both in region.options]


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


def _few(patterns: Sequence[Pattern]) -> list[Pattern]:
    """Those on the lower hull of bytes held and cost, evenly, and the one that needs the least."""
    hull: list[Pattern] = []
    for p in sorted(patterns, key=lambda p: (p.held, p.cost_ns)):
        while len(hull) > 1 and _above(hull[-2], hull[-1], p):
            hull.pop()
        if not hull or p.cost_ns < hull[-1].cost_ns:
            hull.append(p)
    step = max(1, -(-(len(hull) - 1) // (_OPTIONS - 1)))
    chosen = [*hull[::step], hull[-1], min(patterns, key=lambda p: (max(p.forward, p.backward), p.cost_ns))]
    return list(dict.fromkeys(chosen))


def _above(left: Pattern, middle: Pattern, right: Pattern) -> bool:
    """Whether the middle one is no cheaper than a mixture of the two around it."""
    wide, part = right.held - left.held, middle.held - left.held
    return (middle.cost_ns - left.cost_ns) * wide >= (right.cost_ns - left.cost_ns) * part


def _places(count: int) -> list[int]:
    """Where segments may begin: closer to each other towards the end, where they are best short."""
    if count <= _CUTS:
        return list(range(count))
    return sorted({count - round(count * (1 - i / _CUTS) ** 2) for i in range(_CUTS)} - {count})


_need_and_cost = itemgetter(0, 1)
