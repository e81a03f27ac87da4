"""What each byte buys: the cheapest plan's overhead at budgets from the smallest feasible one up. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from budgetopt import solvers
from budgetopt._errors import BudgetOptError
from budgetopt._problem import CHOICES, UNSEEN, describe_event, to_problem
from budgetopt._schema import FrontierPoint, Profile
from budgetopt._solve import solution_for, solver_options
from budgetopt.solvers.problem import Problem, Solution


def frontier(
    profile: Profile,
    *,
    points: int = 8,
    allow: Iterable[str] = CHOICES,
    exclude: Iterable[str] = (),
    solver: str = "auto",
    backend: str = "auto",
    time_limit: float = 2.0,
    gap: float = 0.01,
) -> list[FrontierPoint]:
    """Solve for `points` budgets, evenly spaced in bytes from the smallest feasible one to keep-everything.

    Args:
        points: how many, two or more. time_limit: seconds per budget. The others: see :func:`budgetopt.solve`.

    Returns:
        points with rising budgets, whose predicted overhead never rises: a cheaper plan for less memory is
        taken for more as well.

    Raises:
        BudgetOptError: fewer than two points, an unknown choice or layer. SolverError: no engine answered.
    """
    if points < 2:
        raise BudgetOptError(f"points={points}: give two or more, the smallest budget and keep-everything are two")
    options = solver_options(solver, backend, time_limit, gap)
    problem = to_problem(profile, 0, allow=tuple(allow), exclude=tuple(exclude))
    method = solvers.SOLVERS[options["solver"]]
    lowest = solvers.smallest(problem, backend, time_limit, rows=method is solvers.segments).peak + UNSEEN
    highest = max(lowest, profile.peak_bytes + UNSEEN)
    budgets = [lowest + (highest - lowest) * number // (points - 1) for number in range(points)]
    found = []
    best: Solution | None = None
    for budget, answer in zip(budgets, _answers(problem, profile, budgets, options), strict=True):
        if best is None or answer.cost_ns <= best.cost_ns:
            best = answer
        found.append(_point(profile, budget, best))
    return found


def _answers(problem: Problem, profile: Profile, budgets: list[int], options: dict[str, Any]) -> list[Solution]:
    """All from one recursion, unless another solver is asked for."""
    method = solvers.SOLVERS[options["solver"]]
    if method in (solvers.regions, solvers.segments):
        limit = options["time_limit"] * len(budgets)
        usable = [budget - UNSEEN for budget in budgets]
        rows = method is solvers.segments
        return solvers.frontier(problem, usable, options["backend"], limit, options["gap"], rows)
    return [solution_for(replace(problem, budget=budget - UNSEEN), profile, budget, options) for budget in budgets]


def _point(profile: Profile, budget: int, solution: Solution) -> FrontierPoint:
    return FrontierPoint(
        budget_bytes=budget,
        peak_bytes=solution.peak,
        peak_at=describe_event(profile, solution.peak_event),
        extra_ns=solution.cost_ns,
        overhead=solution.cost_ns / profile.step_ns if profile.step_ns else 0.0,
        gap=round(solution.gap, 6),
        solver=solution.solver,
    )
