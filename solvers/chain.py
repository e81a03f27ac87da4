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

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from .catalogue import Catalogue
from .holding import holds
from .memory import Simulation, normalise, simulate
from .nest import Node
from .parts import NO_LIMIT
from .patterns import Pattern
from .problem import Choice, Problem, Segment
from .row import Stretch, stretches
from .segments import late
from .timeline import timeline
from .ways import Ways, best, both, nothing, then

_CUTS = 50  # places at most where segments may begin or end
_STRETCHES = 100  # at most, about
_STEPS = 400  # of one step function at most
_WORK = 1_000_000  # steps in all, about: fewer of each for long chains
_TRIES = 6  # answers of the recursion that the referee is asked about
_FEWEST = 3  # stretches that make a chain worth cutting


class Pick(NamedTuple):
    """A pattern for each region, and the segments."""

    patterns: dict[Node, Pattern]
    segments: tuple[Segment, ...]

    def judged(self, problem: Problem, catalogue: Catalogue) -> Simulation:
        """What the referee says of it. What a pass would store for itself alone is made on its way instead."""
        chosen = list(normalise(problem, catalogue.choices(self.patterns)))
        line = timeline(problem)
        stored = late(problem, line, chosen, self.segments)
        wanted = holds(problem, line, chosen, stored).wanted
        for v, level in stored.level.items():
            if wanted[v] <= stored.begins[level]:  # one that crosses regions stays as it is: see normalise
                chosen[v] = Choice.RECOMPUTE
        return simulate(problem, chosen, self.segments)


class Chain:
    """The recursion over a chain of regions; no steps, where there is no chain to speak of.

    Args:
        limit: bytes; ways that need more are not worked out, unless none needs less.
    """

    def __init__(self, problem: Problem, catalogue: Catalogue, limit: int = NO_LIMIT) -> None:
        self._problem, self._catalogue = problem, catalogue
        self._row = stretches(problem, catalogue, _STRETCHES)
        # What is before g may be run again, and is then not held.
        self._limits = list(accumulate((sum(size for _, size in one.handed) for one in self._row), initial=limit))
        self._end = len(self._row) - 1
        self._cuts = _places(len(self._row))
        pairs = max(1, len(self._cuts) * len(self._row) // 2)
        self._most = max(20, min(_STEPS, _WORK // pairs))
        self._ways: dict[tuple[int, int], Ways] = {}
        self._sums: dict[int, list[int]] = {}
        self._least: Chain | None = None
        if sum(stretch.linked for stretch in self._row) + 1 >= _FEWEST:
            for end in [*(cut - 1 for cut in self._cuts[1:]), self._end]:
                self._to(end)

    @property
    def steps(self) -> Ways | None:
        """What each budget costs; None where there is no chain."""
        return self._ways.get((0, self._end))

    def cost(self, budget: int) -> int:
        """Nanoseconds of the cheapest way within a budget, as it looks here; :data:`NO_LIMIT` if there is none."""
        at = -1 if self.steps is None else self.steps.last(budget)
        return NO_LIMIT if self.steps is None or at < 0 else int(self.steps.cost[at])

    def better(self, known: Simulation, budget: int) -> Simulation:
        """What is known already, or the cheapest way that the referee accepts, or that with the smallest peak."""
        if self.steps is None:
            return known
        best = min(known, self._judged(budget), key=lambda one: one.rank(budget))
        if best.peak <= budget or not budget:
            return best
        # Of ways that need the least, as they look here, the referee may like better what is found without a budget.
        self._least = self._least or Chain(self._problem, self._catalogue, 0)
        return min(best, self._least._judged(0), key=lambda one: one.rank(budget))

    def _judged(self, budget: int) -> Simulation:
        """The cheapest way that the referee accepts, or that with the smallest peak.

        What the chain says of a need is close, not exact: it is asked for somewhat less where the referee counts
        more.
        """
        assert self.steps is not None
        least = int(self.steps.need[0])
        tried: list[Simulation] = []
        wanted = budget
        while len(tried) < _TRIES:
            tried.append(self.within(max(wanted, least)).judged(self._problem, self._catalogue))
            if tried[-1].peak <= budget or wanted <= least:
                break
            wanted -= max(1, tried[-1].peak - budget)
        return min(tried, key=lambda one: one.rank(budget))

    def within(self, budget: int) -> Pick:
        """The cheapest way that is said to need no more than a budget for which there is one."""
        patterns: dict[Node, Pattern] = {}
        segments: list[Segment] = []
        waiting = [(0, self._end, self._ways[0, self._end].last(budget))]
        while waiting:
            g, end, at = waiting.pop()
            ways = self._ways[g, end]
            how, inner = int(ways.how[at]), int(ways.inner[at])
            if how >= 0:
                patterns |= zip(self._row[g].nodes, self._row[g].options[how].patterns, strict=True)
                waiting += [(g + 1, end, inner)] if g < end else []
            else:
                t = -1 - how
                segments.append(Segment(self._row[g].first, self._row[t].last))
                waiting += [(g, t, inner), (t + 1, end, int(ways.rest[at]))]
        return Pick(patterns, tuple(sorted(segments)))

    def _to(self, end: int) -> None:
        """All C(g, end); on the outside, to keep costs no time. Until where the row is not linked."""
        outside = end == self._end
        inner = nothing()
        freed = 0
        for g in range(end, -1, -1):
            stretch = self._row[g]
            if not outside and g < end and not stretch.linked:
                return
            more = 0
            if not outside:  # its forward is in the pass, in the middle of the backward
                freed += stretch.freed(self._row[end].last)
                more = max(0, self._row[end].before[1] - freed - stretch.before[0])
            if outside or g < end:
                inner = inner.at_least(stretch.gap)
            again = _storing(stretch, outside, g == end)
            found = list(self._plain(stretch, more, again, inner))
            if g in self._cuts:
                found += self._segments(g, end)
            inner = self._ways[g, end] = best(found, self._limits[g], self._most)

    def _plain(self, stretch: Stretch, more: int, storing: list[int], inner: Ways) -> Iterator[Ways]:
        """Each option of a stretch, and then the rest.

        Args:
            more: bytes in its forward. storing: nanoseconds more for each option.
        """
        for number, (one, again) in enumerate(zip(stretch.options, storing, strict=True)):
            yield then(max(one.forward + more, one.backward), one.held, one.cost + again, number, inner)

    def _freed(self, t: int) -> list[int]:
        """Bytes that need not be held if the stretches from g up to t are run again, for every g."""
        if t not in self._sums:
            sizes = [one.freed(self._row[t].last) for one in self._row[: t + 1]]
            self._sums[t] = list(accumulate(reversed(sizes)))[::-1]
        return self._sums[t]

    def _segments(self, g: int, end: int) -> Iterator[Ways]:
        """Segments that begin at g, and then the rest."""
        again = 0
        for t in range(g, end):
            stretch = self._row[t]
            inside, rest = self._ways.get((g, t)), self._ways.get((t + 1, end))
            if inside is not None and rest is not None:
                yield both(inside, rest, self._freed(t)[g], again, -1 - t)
            again += stretch.again
            if not stretch.linked:
                return


def _storing(stretch: Stretch, outside: bool, at_end: bool) -> list[int]:
    """Time to store what each option keeps, in a pass that makes what is handed on, unless it is the last."""
    if outside:
        return [0] * len(stretch.options)
    return [one.alone if at_end else one.both - stretch.again for one in stretch.options]


def _places(count: int) -> list[int]:
    """Where segments may begin: closer to each other towards the end, where they are best short."""
    if count <= _CUTS:
        return list(range(count))
    return sorted({count - round(count * (1 - i / _CUTS) ** 2) for i in range(_CUTS)} - {count})
