"""Patterns for each kind of region, and a recursion over the regions that picks one of them for each.

Regions that look the same share everything: a sweep of small programs gives each kind its patterns
(:mod:`budgetopt.solvers.patterns`), a recursion picks the best ones for any budget (:mod:`budgetopt.solvers.nest`),
and while the duals of the program over patterns (:mod:`budgetopt.solvers.master`) say that another pattern
would help, it is made and the recursion runs again (:mod:`budgetopt.solvers.search`). Where regions follow each
other, rows of them may be run again as one (:mod:`budgetopt.solvers.chain`). The referee has the last word on the
whole step. Where lives of regions do not nest, or patterns prove too little, the step is one program
(:mod:`budgetopt.solvers.ilp`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf
from time import monotonic

from .answer import PATIENCE, Outcome, answer, better, infeasible, outcome
from .backends import order
from .catalogue import Catalogue, Picks
from .chain import Chain
from .errors import InfeasibleError
from .greedy import search
from .ilp import ilp
from .memory import Simulation, minimum, simulate
from .parts import NO_LIMIT
from .problem import Choice, Problem, Solution
from .search import Search, low

_SEARCHING = 0.5  # of the time limit, at least, is left for the search when the first patterns are made
_AT_ONCE = 3000  # events at most, of a step that may be one program where patterns prove too little
_SEARCHED = 0.6  # of the time limit, for patterns; the rest is for that, or for the greedy search of a larger step
_ALONE = 0.4  # of the time limit, where there is one region
_REST = 2.0  # seconds at most, for either: a plan is made while somebody waits
_PRICED = 6  # budgets of a frontier for which bytes are priced


def segments(problem: Problem, backend: str = "auto", time_limit: float = 10.0, gap: float = 0.01) -> Solution:
    """The better of what :func:`regions` answers and of the best rows of regions to run again.

    Where the regions are no chain, it is the former. ``bound_ns`` holds for choices without segments: an answer may
    cost less.

    Raises:
        InfeasibleError: nothing was found that the referee accepts. SolverError: ``backend`` is unknown.
    """
    return _solve(problem, backend, time_limit, gap, rows=True)


def regions(problem: Problem, backend: str = "auto", time_limit: float = 10.0, gap: float = 0.01) -> Solution:
    """The cheapest choice that one pattern per region makes possible, within the budget.

    ``time_limit`` is seconds for everything; ``gap`` the relative distance from the best choice at which it is
    good enough. ``bound_ns`` holds for every choice that the referee accepts.

    Raises:
        InfeasibleError: no choice was found that the referee accepts. SolverError: ``backend`` is unknown.
    """
    return _solve(problem, backend, time_limit, gap, rows=False)


def _solve(problem: Problem, backend: str, time_limit: float, gap: float, rows: bool) -> Solution:
    order(backend)  # an unknown name is an error even where no program is needed
    start = monotonic()
    deadline = start + time_limit
    kept = simulate(problem, [Choice.KEEP] * len(problem.values))
    if kept.peak <= problem.budget and kept.cost_ns == 0:
        return answer(problem, kept, "regions", "optimal")
    catalogue = Catalogue.of(problem, backend, deadline - _SEARCHING * time_limit)
    if catalogue is None:
        return ilp(problem, backend, time_limit, gap)
    alone = len(catalogue.workshops) == 1  # whose own program is as large as that of the whole step
    until = start + _ALONE * time_limit if alone else deadline if rows else start + _SEARCHED * time_limit
    found = Search(problem, catalogue, backend, deadline, gap).solve(min(PATIENCE, time_limit), until)
    if not catalogue.engines:  # it says why, and has an answer without one
        return ilp(problem, backend, max(0.0, deadline - monotonic()), gap)
    # With rows, three variants of a step are solved while somebody waits: no time for that.
    if (
        (alone or not rows)
        and found.peak <= problem.budget
        and found.cost_ns - catalogue.bound_ns(problem.budget) > gap * found.cost_ns
    ):
        found = _at_once(
            problem, found, catalogue, backend, deadline if alone else min(deadline, monotonic() + _REST), gap
        )
    if rows:
        found = Chain(problem, catalogue, problem.budget).better(found, problem.budget)
    return _judged(problem, found, catalogue, gap, deadline)


def _at_once(
    problem: Problem, found: Simulation, catalogue: Catalogue, backend: str, deadline: float, gap: float
) -> Simulation:
    """What is found in the time that is left: of a small step as one program, whose bound holds here as well."""
    if monotonic() > deadline:
        return found
    if len(problem.events) > _AT_ONCE:
        return min(found, search(problem, deadline), key=lambda one: one.rank(problem.budget))
    whole = outcome(partial(ilp, problem, backend, max(0.0, deadline - monotonic()), gap))
    if isinstance(whole, InfeasibleError):  # it did not find what patterns did
        return found
    catalogue.proven(problem.budget, whole.bound_ns)
    return simulate(problem, whole.choices) if whole.cost_ns < found.cost_ns else found


def points(
    problem: Problem, budgets: Sequence[int], backend: str = "auto", time_limit: float = 10.0, gap: float = 0.01
) -> list[Outcome]:
    """What :func:`regions` may do at each budget, all from one recursion, in ``time_limit`` seconds for all together.

    Raises:
        SolverError: ``backend`` is unknown.
    """
    return Prepared(problem, backend, monotonic() + time_limit, rows=False).outcomes(budgets, gap)


class Prepared:
    """A step with patterns for its regions, from which every budget is answered.

    Args:
        deadline: ``time.monotonic()``. rows: also of regions that are run again as one. like: the same step but for
            what crosses regions in fp16.

    Attributes:
        least: the choice with the smallest peak that is found; an upper bound of the smallest that there is.
    """

    def __init__(
        self, problem: Problem, backend: str, deadline: float, *, rows: bool, like: Prepared | None = None
    ) -> None:
        order(backend)
        self._problem, self._backend, self._deadline = problem, backend, deadline
        left = max(0.0, deadline - monotonic())
        self._catalogue = Catalogue.of(problem, backend, deadline - _SEARCHING * left)
        self._chain = Chain(problem, self._catalogue) if rows and self._catalogue is not None else None
        self._low: tuple[Choice, ...] = self._lowest() if like is None else like._low
        self.least = simulate(problem, self._low)
        if self._catalogue is not None:
            self._catalogue.learn(self._low)
            found = simulate(problem, self._catalogue.choices(self._catalogue.lowest(backend, deadline)))
            self.least = min(self.least, found, key=lambda one: one.peak)
        if self._chain is not None:
            self.least = self._chain.better(self.least, 0)

    def _lowest(self) -> tuple[Choice, ...]:
        if self._catalogue is None:
            return minimum(self._problem, deadline=self._deadline)[1]
        return low(self._problem, self._deadline)

    def outcomes(self, budgets: Sequence[int], gap: float, known: Sequence[Outcome] | None = None) -> list[Outcome]:
        """What to do at each budget; what is known already where nothing here looks cheaper than that."""
        if self._catalogue is None:
            found = [self._alone(budget, len(budgets), gap) for budget in budgets]
            return found if known is None else list(map(better, known, found))
        self._price(self._catalogue, budgets)
        picks = self._catalogue.recursion()
        if known is None:
            known = [InfeasibleError(NO_LIMIT, (), budget) for budget in budgets]
        return [self._at(budget, one, picks, gap) for budget, one in zip(budgets, known, strict=True)]

    def _price(self, catalogue: Catalogue, budgets: Sequence[int]) -> None:
        """Patterns for some of the budgets."""
        picks = catalogue.recursion()
        for number in range(_PRICED):
            budget = sorted(budgets)[number * len(budgets) // _PRICED]
            worth = catalogue.worth(budget, picks.within(budget), self._backend, self._deadline)
            if worth is not None:
                catalogue.price(worth, exact=False)

    def _at(self, budget: int, known: Outcome, picks: Picks, gap: float) -> Outcome:
        """The referee is asked only about what the recursions find cheaper than what is known."""
        best, problem, catalogue = self.least, replace(self._problem, budget=budget), self._catalogue
        chain = self._chain
        assert catalogue is not None
        limit = known.cost_ns if isinstance(known, Solution) else NO_LIMIT
        if picks.cost(budget) < limit:
            found = simulate(problem, catalogue.choices(picks.within(budget)))
            best = min(best, found, key=lambda one: one.rank(budget))
        if chain is not None and chain.cost(budget) < min(limit, best.cost_ns if best.peak <= budget else NO_LIMIT):
            best = chain.better(best, budget)
        if best.peak > budget:
            return better(known, infeasible(best, budget))
        return better(known, _judged(problem, best, catalogue, gap))

    def _alone(self, budget: int, count: int, gap: float) -> Outcome:
        left = max(0.0, self._deadline - monotonic())
        return outcome(partial(ilp, replace(self._problem, budget=budget), self._backend, left / count, gap))


def _judged(problem: Problem, found: Simulation, catalogue: Catalogue, gap: float, deadline: float = inf) -> Solution:
    """A solution; what is proven holds for choices without segments, so of one with them nothing is."""
    if found.segments:
        return answer(problem, found, f"segments, {catalogue.engines}", "feasible")
    bound_ns, engines = catalogue.bound_ns(problem.budget), catalogue.engines or "no engine answered"
    solution = answer(problem, found, f"regions, {engines}", "feasible", bound_ns, deadline)
    return replace(solution, status="optimal") if solution.gap <= gap else solution
