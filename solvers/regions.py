"""Patterns for each kind of region, and a recursion over the regions that picks one of them for each.

Regions that look the same share everything: a sweep of small programs gives each kind its patterns
(:mod:`budgetopt.solvers.patterns`), a recursion picks the best ones for any budget (:mod:`budgetopt.solvers.nest`),
and while the duals of the program over patterns (:mod:`budgetopt.solvers.master`) say that another pattern
would help, it is made and the recursion runs again (:mod:`budgetopt.solvers.search`). Where regions follow each
other, rows of them may be run again as one (:mod:`budgetopt.solvers.chain`). The referee has the last word on the
whole step. Where lives of regions do not nest, the step is one program (:mod:`budgetopt.solvers.ilp`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import monotonic

from .answer import answer
from .backends import order
from .catalogue import Catalogue, Picks
from .chain import Chain, best_rows
from .ilp import ilp
from .memory import Simulation, minimum, simulate
from .problem import Choice, Problem, Solution
from .search import Search

_SEARCHING = 0.5  # of the time limit, at least, is left for the search when the first patterns are made
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
    deadline = monotonic() + time_limit
    kept = simulate(problem, [Choice.KEEP] * len(problem.values))
    if kept.peak <= problem.budget and kept.cost_ns == 0:
        return answer(problem, kept, "regions", "optimal")
    catalogue = Catalogue.of(problem, backend, deadline - _SEARCHING * time_limit)
    if catalogue is None:
        return ilp(problem, backend, time_limit, gap)
    found = Search(problem, catalogue, backend, deadline, gap).solve(time_limit)
    if not catalogue.engines:  # it says why, and has an answer without one
        return ilp(problem, backend, max(0.0, deadline - monotonic()), gap)
    if rows:
        again = best_rows(problem, catalogue)
        found = min(found, again or found, key=lambda one: one.rank(problem.budget))
    return _judged(problem, found, catalogue, gap)


def frontier(
    problem: Problem,
    budgets: Sequence[int],
    backend: str = "auto",
    time_limit: float = 10.0,
    gap: float = 0.01,
    rows: bool = True,
) -> list[Solution]:
    """A solution for each budget, all from one recursion; ``time_limit`` is seconds for all of them together.

    Args:
        rows: also of regions that are run again as one.

    Raises:
        InfeasibleError: no choice was found for one of them. SolverError: ``backend`` is unknown.
    """
    order(backend)
    deadline = monotonic() + time_limit
    catalogue = Catalogue.of(problem, backend, deadline - _SEARCHING * time_limit)
    if catalogue is None:
        return [ilp(replace(problem, budget=b), backend, time_limit / len(budgets), gap) for b in budgets]
    catalogue.learn(minimum(problem, deadline=deadline)[1])
    catalogue.lowest(backend, deadline)
    picks = catalogue.recursion()
    for number in range(_PRICED):
        budget = sorted(budgets)[number * len(budgets) // _PRICED]
        worth = catalogue.worth(budget, picks.within(budget), backend, deadline)
        if worth is not None:
            catalogue.price(worth, exact=False)
    picks = catalogue.recursion()
    chain = Chain(problem, catalogue) if rows else None
    return [
        _judged(replace(problem, budget=b), _point(problem, catalogue, picks, chain, b), catalogue, gap)
        for b in budgets
    ]


def _point(problem: Problem, catalogue: Catalogue, picks: Picks, chain: Chain | None, budget: int) -> Simulation:
    """The better of the two recursions' ways as they see it; the referee sees the other one only if it must."""
    alone = simulate(problem, catalogue.choices(picks.within(budget)))
    if chain is None:
        return alone
    rows = chain.judged(budget)
    return min(alone, rows or alone, key=lambda one: one.rank(budget))


def smallest(problem: Problem, backend: str = "auto", time_limit: float = 10.0, rows: bool = True) -> Simulation:
    """The choice with the smallest peak that is found; an upper bound of the smallest that there is.

    Args:
        rows: also of regions that are run again as one.

    Raises:
        SolverError: ``backend`` is unknown.
    """
    order(backend)
    deadline = monotonic() + time_limit
    best = simulate(problem, minimum(problem, deadline=deadline)[1])
    catalogue = Catalogue.of(problem, backend, deadline - _SEARCHING * time_limit)
    if catalogue is None:
        return best
    catalogue.learn(best.choices)
    found = [best, simulate(problem, catalogue.choices(catalogue.lowest(backend, deadline)))]
    if rows:
        found += [one for one in [Chain(problem, catalogue, 0).judged(0)] if one is not None]
    return min(found, key=lambda one: one.peak)


def _judged(problem: Problem, found: Simulation, catalogue: Catalogue, gap: float) -> Solution:
    """A solution; what is proven holds for choices without segments, so of one with them nothing is."""
    if found.segments:
        return answer(problem, found, f"segments, {catalogue.engines}", "feasible")
    bound_ns = catalogue.bound_ns(problem.budget)
    solution = answer(problem, found, f"regions, {catalogue.engines or 'no engine answered'}", "feasible", bound_ns)
    return replace(solution, status="optimal") if solution.gap <= gap else solution
