"""Patterns for each kind of region, and a recursion over the regions that picks one of them for each.

Regions that look the same share everything: a sweep of small programs gives each kind its patterns
(:mod:`budgetopt.solvers.patterns`), a recursion picks the best ones for any budget (:mod:`budgetopt.solvers.nest`),
and while the duals of the program over patterns (:mod:`budgetopt.solvers.master`) say that another pattern
would help, it is made and the recursion runs again. The referee has the last word on the whole step. Where
lives of regions do not nest, the step is one program (:mod:`budgetopt.solvers.ilp`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil
from operator import add
from time import monotonic

from .answer import answer
from .backends import order
from .greedy import polish
from .ilp import ilp
from .master import Master, Worth
from .memory import Simulation, minimum, simulate
from .nest import Node, Option, Recursion, measure, nest, outside_in
from .parts import parts
from .patterns import Pattern, Prices, Workshop, first_patterns
from .problem import Choice, Problem, Solution
from .stages import stages
from .timeline import timeline

Corrections = dict[Node, tuple[int, int]]
"""Bytes to add to the peaks of the two windows."""

_ENGINES = {"highs": "HiGHS", "cbc": "CBC"}
_COLUMNS = 4000  # so many patterns, over all regions, go into one program at once
_CONVERGED = 0.2  # of the gap asked for, between the cost of the best mixture and its bound
_FILLS = 3  # rounds of looking beside the patterns that were picked
_ROUNDS = 12  # of prices and new patterns at most
_CORRECTIONS = 2  # rounds with the referee at most


def regions(problem: Problem, backend: str = "auto", time_limit: float = 10.0, gap: float = 0.01) -> Solution:
    """The cheapest choice that one pattern per region makes possible, within the budget.

    ``time_limit`` is seconds for everything; ``gap`` the relative distance from the best choice at which it is
    good enough. ``bound_ns`` holds for every choice that the referee accepts.

    Raises:
        InfeasibleError: no choice was found that the referee accepts. SolverError: ``backend`` is unknown.
    """
    engine = order(backend)[0]  # an unknown name is an error even where no program is needed
    deadline = monotonic() + time_limit
    kept = simulate(problem, [Choice.KEEP] * len(problem.values))
    if kept.peak <= problem.budget and kept.cost_ns == 0:
        return answer(problem, kept, "regions", "optimal")
    catalogue = Catalogue.of(problem, backend, deadline)
    if catalogue is None:
        return ilp(problem, backend, time_limit, gap)
    search = _Search(problem, catalogue, backend, deadline, gap)
    found = search.solve()
    solution = answer(problem, found, f"regions, {_ENGINES[engine]}", "feasible", search.bound_ns)
    return replace(solution, status="optimal") if solution.gap <= gap else solution


class Catalogue:
    """The regions of a step, nested, and the patterns of their kinds.

    Attributes:
        root: see :mod:`budgetopt.solvers.nest`. workshops: of each node; equal regions share one.
        double: bytes at most that are counted twice anywhere, where replays of two regions hold one storage.
    """

    def __init__(self, root: Node, workshops: dict[Node, Workshop], double: int) -> None:
        self.root, self.workshops, self.double = root, workshops, double

    @classmethod
    def of(cls, problem: Problem, backend: str, deadline: float) -> Catalogue | None:
        """Make the first patterns of every kind; None if the lives of the regions do not nest."""
        found = parts(problem)
        root = nest(found) if found is not None else None
        if root is None:
            return None
        kinds: dict[Problem, Workshop] = {}
        workshops: dict[Node, Workshop] = {}
        for node in outside_in(root):
            if node.part is not None:
                if node.part.alone not in kinds:
                    kinds[node.part.alone] = first_patterns(node.part, backend, deadline)
                workshops[node] = kinds[node.part.alone]
        measure(root, stages(problem).fixed, [workshop.bare for workshop in workshops.values()])
        return cls(root, workshops, _counted_twice(problem, workshops))

    def patterns(self) -> dict[Node, list[Pattern]]:
        """Those that are known now."""
        return {node: list(workshop.patterns) for node, workshop in self.workshops.items()}

    def recursion(self, patterns: dict[Node, list[Pattern]], less: Corrections, limit: int) -> Recursion:
        """Step functions up to `limit` bytes; their options have the order of the patterns."""
        options = {
            node: [Option(p.cost_ns, p.held, _need(node, p, less.get(node, (0, 0)))) for p in known]
            for node, known in patterns.items()
        }
        return Recursion(self.root, options, limit)


def _need(node: Node, pattern: Pattern, less: tuple[int, int] = (0, 0)) -> int:
    return max(pattern.forward + node.shift[0] + less[0], pattern.backward + node.shift[1] + less[1])


class _Search:
    """One budget.

    Attributes:
        bound_ns: proven lower bound of the cost of every choice within the budget.
    """

    def __init__(self, problem: Problem, catalogue: Catalogue, backend: str, deadline: float, gap: float) -> None:
        self._problem, self._catalogue, self._backend = problem, catalogue, backend
        self._deadline, self._gap = deadline, gap
        self._picked: dict[Node, Pattern] = {}
        self.bound_ns = 0

    def solve(self) -> Simulation:
        """Recursion, prices, new patterns, until the bound is met or nothing helps; then the referee's rounds."""
        best = self._pick()
        if best.peak > self._problem.budget:
            self._learn(minimum(self._problem, deadline=self._deadline)[1])
            best = min(best, self._pick(), key=self._rank)
        if best.peak > self._problem.budget:
            return best
        refinements = (self._estimate, self._price, self._neighbours)
        for refine, rounds in zip(refinements, (_ROUNDS, _ROUNDS, _FILLS), strict=True):
            for _ in range(rounds):
                if self._good(best) or monotonic() > self._deadline or not refine(best):
                    break
                best = min(best, self._pick(), key=self._rank)
        return best if self._good(best) else polish(self._problem, best, self._deadline)

    def _rank(self, found: Simulation) -> tuple[int, int]:
        """Within the budget by cost, beyond it by peak."""
        return max(0, found.peak - self._problem.budget), found.cost_ns

    def _good(self, found: Simulation) -> bool:
        return found.cost_ns - self.bound_ns <= self._gap * found.cost_ns

    def _learn(self, choices: Sequence[Choice]) -> None:
        """Take over what a choice for the whole step does in each region."""
        for node, workshop in self._catalogue.workshops.items():
            assert node.part is not None
            workshop.add([choices[v] for v in node.part.values])

    def _pick(self) -> Simulation:
        """The best patterns for the budget, or for the smallest one that has any, in the referee's eyes.

        Where the referee counts less in a window than the regions alone do, that is corrected, and they are
        picked again, twice at most.
        """
        less: Corrections = {}
        best: Simulation | None = None
        for _ in range(1 + _CORRECTIONS):
            known = self._catalogue.patterns()
            recursion = self._catalogue.recursion(known, less, self._problem.budget)
            numbers = recursion.picks(max(self._problem.budget, recursion.steps[0][0]))
            picked = {node: known[node][number] for node, number in numbers.items()}
            found = simulate(self._problem, self._choices(picked))
            if best is None or self._rank(found) < self._rank(best):
                best, self._picked = found, picked
            seen = self._differences(picked, found)
            if seen == less or not any(map(any, seen.values())):
                break
            less = seen
        assert best is not None
        return best

    def _choices(self, picked: dict[Node, Pattern]) -> list[Choice]:
        choices = [Choice.RECOMPUTE] * len(self._problem.values)
        for node, pattern in picked.items():
            assert node.part is not None
            for v, choice in zip(node.part.values, pattern.choices, strict=True):
                choices[v] = choice
        return choices

    def _differences(self, picked: dict[Node, Pattern], found: Simulation) -> Corrections:
        """Per window: what the referee counts there, less what the regions alone count."""
        around = {self._catalogue.root: 0}
        seen: Corrections = {}
        for node in outside_in(self._catalogue.root):
            held = around[node]
            if node.part is not None:
                pattern = picked[node]
                spans = node.part.forward, node.part.backward
                peaks = (max(found.peaks[span.start : span.stop]) for span in spans)
                counted = map(add, node.shift, (pattern.forward, pattern.backward))
                forward, backward = (peak - held - own for peak, own in zip(peaks, counted, strict=True))
                seen[node] = forward, backward
                held += pattern.held
            around |= dict.fromkeys(node.inside, held)
        return seen

    # Prices

    def _neighbours(self, best: Simulation) -> bool:
        """Look beside the patterns that were picked: with the bytes that are left, and with fewer."""
        left = self._problem.budget - best.peak
        workshops = self._catalogue.workshops
        places = dict.fromkeys((workshops[node], pattern.held) for node, pattern in self._picked.items())
        found = [workshop.within(size) for workshop, held in places for size in (held + left, held - 1) if size >= 0]
        return any(found)

    def _estimate(self, best: Simulation) -> bool:
        """As :meth:`_price`, faster, with less of a bound."""
        return self._price(best, exact=False)

    def _price(self, best: Simulation, exact: bool = True) -> bool:
        """Prove a bound with the prices of bytes, and make the patterns that they ask for; whether there are any."""
        worth = self._worth()
        if worth is None:
            return False
        total = worth.constant(self._catalogue.root, self._problem.budget + self._catalogue.double)
        new = False
        bounds: dict[tuple[Workshop, Prices], float] = {}
        for node, workshop in self._catalogue.workshops.items():
            prices = worth.prices(node)
            if (workshop, prices) not in bounds:
                tried = workshop.price(prices, exact)
                bounds[workshop, prices] = tried.bound
                new |= tried.added
            total += bounds[workshop, prices]
        if total > self.bound_ns:
            self.bound_ns = ceil(total)
        # What is left between the two is what whole patterns cost more than mixtures: no pattern helps there.
        return new and worth.cost_ns - total > _CONVERGED * self._gap * worth.cost_ns

    def _worth(self) -> Worth | None:
        """The duals over all known patterns. Where those are many, the program begins with some of them."""
        known = self._catalogue.patterns()
        master = Master(self._catalogue.root, self._problem.budget, self._backend)
        few = sum(map(len, known.values())) <= _COLUMNS
        for node, patterns in known.items():
            ends = (patterns[0], min(patterns, key=lambda p: (_need(node, p), p)), min(patterns, key=lambda p: p.held))
            for pattern in patterns if few else (*ends, self._picked[node]):
                master.add(node, pattern)
        while True:
            worth = master.worth(max(0.1, self._deadline - monotonic()))
            if worth is None or few:
                return worth
            asked = [master.add(node, min(known[node], key=worth.prices(node).of)) for node in known]
            if not any(asked):
                return worth


def _counted_twice(problem: Problem, nodes: Iterable[Node]) -> int:
    """Bytes of storages that replays of several regions may hold beyond everything else, each beyond the first."""
    line = timeline(problem)
    ends = {problem.values[v].storage: 0 for v in line.kept}
    for v in line.kept:
        storage = problem.values[v].storage
        ends[storage] = max(ends[storage], line.released_at[v])
    until = {node.part.region: node.part.backward.stop for node in nodes if node.part is not None}
    total = 0
    for storage, readers in stages(problem).inputs.items():
        alive = max(line.die_at[storage], ends.get(storage, 0))
        regions = {problem.operators[i].region for i in readers}
        beyond = [g for g in regions if until.get(g, 0) > alive]
        total += problem.storages[storage] * max(0, len(beyond) - 1)
    return total
