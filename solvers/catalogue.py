"""The regions of a step, nested, with the patterns of their kinds: what every budget is solved from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from math import ceil, isfinite
from time import monotonic
from typing import NamedTuple

from .master import Master, Worth
from .nest import Node, Option, Recursion, measure, nest, outside_in
from .parts import NO_LIMIT, Part, fixed_ends, parts, share, sharing
from .patterns import Pattern, Prices, Workshop, ends, first_patterns
from .problem import Choice, Problem
from .stages import fixed_bytes, inputs
from .timeline import timeline

Corrections = dict[Node, tuple[int, int, int]]
"""Bytes to add to the peaks of the two windows, and to the gap."""

_NOTHING = 0, 0, 0

_CLOSE = 1e-3  # of the smallest need, between it and its bound
_ROUNDS = 6  # of patterns for the smallest need
_COLUMNS = 4000  # so many patterns, over all regions, go into one program at once


class Catalogue:
    """The regions of a step, nested, and the patterns of their kinds.

    Attributes:
        root: see :mod:`budgetopt.solvers.nest`. workshops: of each node; equal regions share one.
    """

    def __init__(self, problem: Problem, root: Node, workshops: dict[Node, Workshop]) -> None:
        self.root, self.workshops = root, workshops
        self._values = len(problem.values)
        self._bounds: list[tuple[float, float]] = []  # nanoseconds at no budget, and per byte of it
        self._elsewhere: dict[int, int] = {}  # nanoseconds at one budget
        self._engines: dict[str, None] = {}  # that answered for the whole step

    @classmethod
    def of(cls, problem: Problem, backend: str, deadline: float, whole: bool = False) -> Catalogue | None:
        """Make the first patterns of every kind; None if the lives of the regions do not nest.

        ``whole``: of each kind only two, which keep everything and nothing.
        """
        found = parts(problem)
        root = None if found is None else nest(found)
        if found is None or root is None:
            return None
        kinds: dict[Problem, Workshop] = {}
        alike: dict[tuple[object, ...], Workshop] = {}  # differ at most in what is around them
        workshops: dict[Node, Workshop] = {}
        for node in outside_in(root):
            if node.part is not None:
                alone = node.part.alone
                if alone not in kinds:
                    same = alone.operators, alone.storages
                    make = ends if whole else partial(first_patterns, like=alike.get(same))
                    kinds[alone] = make(node.part, backend, deadline)
                    alike.setdefault(same, kinds[alone])
                workshops[node] = kinds[alone]
        bare = [workshop.bare for workshop in workshops.values()]
        measure(root, fixed_bytes(problem), bare, _counted_twice(problem, found))
        return cls(problem, root, workshops)

    @property
    def engines(self) -> str:
        """Names of the engines that answered so far, with their notes; "" if none did."""
        regions = {name: None for shop in self.workshops.values() for name in shop.engines}
        return " and ".join(regions | self._engines)

    def until(self, deadline: float) -> None:
        """Let the workshops work until then."""
        for workshop in self.workshops.values():
            workshop.deadline = deadline

    def learn(self, choices: Sequence[Choice]) -> None:
        """Take over what a choice for the whole step does in each region."""
        for node, workshop in self.workshops.items():
            assert node.part is not None
            workshop.add([choices[v] for v in node.part.values])

    def price(self, worth: Worth, exact: bool) -> tuple[float, bool]:
        """Make the patterns that prices ask for: the bound at no budget that they prove, and whether any is new."""
        total = worth.constant
        new = False
        bounds: dict[tuple[Workshop, Prices], float] = {}
        for node, workshop in self.workshops.items():
            key = workshop, worth.prices(node)
            if key not in bounds:
                tried = workshop.price(key[1], exact)
                bounds[key] = tried.bound
                new |= tried.added
            total += bounds[key]
        if isfinite(total) and worth.time:
            self._bounds.append((total, worth.of_budget))
        return total, new

    def bound_ns(self, budget: int) -> int:
        """The largest proven lower bound of the cost of every choice within the budget."""
        return max([self._elsewhere.get(budget, 0), *(ceil(total - budget * price) for total, price in self._bounds)])

    def proven(self, budget: int, bound_ns: int) -> None:
        """Somebody else proved a bound for one budget."""
        self._elsewhere[budget] = max(bound_ns, self._elsewhere.get(budget, 0))

    def lowest(self, backend: str, deadline: float, enough: int = 0) -> dict[Node, Pattern]:
        """Patterns with the smallest need, new ones made while their prices say that they would lower it.

        ``enough``: a need that is small enough.
        """
        self.until(deadline)
        exact = False
        for _ in range(_ROUNDS):
            picks = self.recursion(limit=0)
            need = picks.recursion.least
            worth = self.worth(need, picks.within(0), backend, deadline, lowest=True)
            if need <= enough or worth is None or monotonic() > deadline:
                break
            total, new = self.price(worth, exact)
            if (exact and not new) or need - total <= _CLOSE * need:
                break
            exact = not new
        return self.recursion(limit=0).within(0)

    def worth(
        self, budget: int, picked: dict[Node, Pattern], backend: str, deadline: float, lowest: bool = False
    ) -> Worth | None:
        """The prices of bytes over all known patterns; None if no mixture fits.

        With ``lowest``, those of a program that looks for the smallest budget.
        Where patterns are many, the program begins with those picked and the ends of each node's, and gets
        those that its prices ask for.
        """
        known = {node: workshop.patterns for node, workshop in self.workshops.items()}
        few = sum(map(len, known.values())) <= _COLUMNS
        master = Master(self.root, budget, backend, lowest)
        for node, patterns in known.items():
            ends = patterns[0], min(patterns, key=lambda p: (_need(node, p), p)), min(patterns, key=lambda p: p.held)
            for pattern in patterns if few else (*ends, picked[node]):
                master.add(node, pattern)
        while True:
            worth = master.worth(max(0.1, deadline - monotonic()))
            if worth is None:
                return None
            self._engines[worth.engine] = None
            if few:
                return worth
            asked = [master.add(node, min(known[node], key=worth.prices(node).of)) for node in known]
            if not any(asked):
                return worth

    def recursion(self, more: Corrections | None = None, limit: int = NO_LIMIT) -> Picks:
        """The best patterns for every budget up to a limit, out of those known now."""
        known = {node: list(workshop.patterns) for node, workshop in self.workshops.items()}
        more = more or {}
        options = {
            node: [Option(p.cost_ns, p.held, _need(node, p, more.get(node, _NOTHING))) for p in patterns]
            for node, patterns in known.items()
        }
        gaps = {node: node.gap + more.get(node, _NOTHING)[2] for node in (self.root, *known)}
        return Picks(Recursion(self.root, options, gaps, limit), known)

    def choices(self, picked: dict[Node, Pattern]) -> list[Choice]:
        """One choice for each value of the whole step."""
        choices = [Choice.RECOMPUTE] * self._values
        for node, pattern in picked.items():
            assert node.part is not None
            for v, choice in zip(node.part.values, pattern.choices, strict=True):
                choices[v] = choice
        return choices


class Picks(NamedTuple):
    """A recursion and the patterns that its options stand for."""

    recursion: Recursion
    known: dict[Node, list[Pattern]]

    def cost(self, budget: int) -> int:
        """Nanoseconds of the cheapest patterns within a budget; :data:`NO_LIMIT` if nothing fits."""
        at = self.recursion.steps.last(budget)
        return NO_LIMIT if at < 0 else int(self.recursion.steps.cost[at])

    def within(self, budget: int) -> dict[Node, Pattern]:
        """The cheapest patterns within a budget, or those with the smallest need if nothing fits."""
        numbers = self.recursion.picks(max(budget, self.recursion.least))
        return {node: self.known[node][number] for node, number in numbers.items()}


def _need(node: Node, pattern: Pattern, more: tuple[int, int, int] = _NOTHING) -> int:
    """Highest bytes in both windows, what the regions around hold left out."""
    return max(pattern.forward + node.shift[0] + more[0], pattern.backward + node.shift[1] + more[1])


def _counted_twice(problem: Problem, found: Sequence[Part]) -> list[int]:
    """Bytes at most, at every event, by which regions judged alone count more than the referee."""
    ends, born = fixed_ends(problem), timeline(problem).born_at
    shared = sharing(problem, {part.region: part.backward.stop for part in found})
    double = list(_lingering(problem, found, ends, shared))
    for storage, regions in shared.items():
        # In a window of one of them in which it is born or dies, that window's level moves by a share alone.
        rest = problem.storages[storage] - problem.storages[storage] // len(regions)
        for at in {born[storage], ends[storage]} & set(range(len(double))):
            double[at] += rest
    return double


def _lingering(
    problem: Problem, found: Sequence[Part], ends: Sequence[int], shared: dict[int, frozenset[int]]
) -> Iterator[int]:
    """At every event, storages that outlive a region's forward in any case, and yet count as held by the region."""
    decided = {problem.values[v].storage for v in timeline(problem).decided}
    read = {(problem.operators[i].region, storage) for storage, some in inputs(problem).items() for i in some}
    deltas = [0] * (len(problem.events) + 1)
    for part in found:
        for storage in {problem.values[v].storage for v in part.values}:
            held = storage in decided or (part.region, storage) in read
            # What is there until the backward window begins counts for nobody.
            if held and part.forward.stop < ends[storage] < part.backward.start:
                size = share(problem, storage, part.region, shared)
                deltas[part.forward.stop] += size
                deltas[ends[storage]] -= size
    return accumulate(deltas[:-1])
