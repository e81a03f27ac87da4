"""The one door to the solvers: a table of functions with the same signature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import monotonic

from . import halves
from .answer import given
from .errors import SolverError
from .exhaustive import exhaustive
from .greedy import greedy
from .ilp import ilp
from .knapsack import knapsack
from .layer import layer
from .lp_rounding import lp_rounding
from .memory import Simulation
from .problem import Problem, Solution
from .regions import Prepared, regions, segments
from .sqrt import sqrt
from .whole import chain

Solver = Callable[[Problem, str, float, float], Solution]

SOLVERS: dict[str, Solver] = {
    "auto": halves.auto,
    "regions": regions,
    "segments": segments,
    "ilp": ilp,
    "exhaustive": exhaustive,
    "lp_rounding": lp_rounding,
    "greedy": greedy,
    "chain": chain,
    "sqrt": sqrt,
    "knapsack": knapsack,
    "layer": layer,
}
"""Solvers by name; each takes the problem, the backend's name, seconds and the relative gap."""


def solve(
    problem: Problem, solver: str = "auto", backend: str = "auto", time_limit: float = 10.0, gap: float = 0.01
) -> Solution:
    """Choose for every value, within ``problem.budget`` bytes; the referee has seen every answer.

    Args:
        solver: a key of :data:`SOLVERS`.
        backend: ``"cbc"``, ``"highs"`` or ``"auto"`` (HiGHS if installed), where a program is solved.
        time_limit: seconds for the whole solve. gap: relative distance from the best choice that is good enough.

    Raises:
        InfeasibleError: no choice was found that fits. SolverError: an unknown name, or a problem too large.
    """
    return _method(solver)(problem, backend, time_limit, gap)


def frontier(
    problem: Problem,
    count: int,
    highest: int,
    solver: str = "auto",
    backend: str = "auto",
    time_limit: float = 10.0,
    gap: float = 0.01,
) -> list[tuple[int, Solution]]:
    """Budgets evenly spaced from the smallest feasible one to the highest, each with a solution.

    From one recursion for all, where the solver is ``"auto"``, ``"segments"`` or ``"regions"``. The smallest is that of
    ``"regions"`` for all other solvers.

    Args:
        count: of the budgets, 2 or more. highest: bytes. time_limit: seconds for all of them together.

    Raises:
        InfeasibleError: no choice was found for one of them. SolverError: an unknown name, or a problem too large.
    """
    method = _method(solver)
    if solver == "auto":
        return halves.frontier(problem, count, highest, backend, time_limit, gap)
    prepared = Prepared(problem, backend, monotonic() + time_limit, rows=method is segments)
    budgets = halves.spaced(min(highest, prepared.least.peak), highest, count)
    if method in (regions, segments):
        return list(zip(budgets, map(given, prepared.outcomes(budgets, gap)), strict=True))
    return [(b, method(replace(problem, budget=b), backend, time_limit / count, gap)) for b in budgets]


def smallest(problem: Problem, solver: str = "auto", backend: str = "auto", time_limit: float = 10.0) -> Simulation:
    """The choice with the smallest peak that is found; an upper bound of the smallest that there is.

    In what ``"auto"`` or ``"segments"`` may choose; for all other solvers, in what ``"regions"`` may.

    Raises:
        SolverError: an unknown name.
    """
    method = _method(solver)
    if solver == "auto":
        return halves.smallest(problem, backend, time_limit)
    return Prepared(problem, backend, monotonic() + time_limit, rows=method is segments).least


def _method(solver: str) -> Solver:
    if solver not in SOLVERS:
        raise SolverError(f"solver {solver!r} is not one of {', '.join(sorted(SOLVERS))}")
    return SOLVERS[solver]
