"""What each byte buys: the cheapest plan's overhead at budgets from the smallest feasible one up. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from budgetopt import solvers
from budgetopt._errors import BudgetOptError, SolverError
from budgetopt._problem import CHOICES, UNSEEN, describe_event, to_problem
from budgetopt._schema import FrontierPoint, Profile
from budgetopt._solve import solver_options
from budgetopt.solvers.problem import Solution


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
        BudgetOptError: fewer than two points, an unknown choice or layer. SolverError: the solver answers not all.
    """
    if points < 2:
        raise BudgetOptError(f"points={points}: give two or more, the smallest budget and keep-everything are two")
    options = solver_options(solver, backend, time_limit, gap)
    problem = to_problem(profile, 0, allow=tuple(allow), exclude=tuple(exclude))
    options["time_limit"] *= points
    try:
        answers = solvers.frontier(problem, points, profile.peak_bytes, **options)
    except solvers.SolverError as error:
        raise SolverError(f"solver={solver!r}: {error}. The default, 'auto', finds all of them") from error
    found = []
    best: Solution | None = None
    for usable, answer in answers:
        if best is None or answer.cost_ns <= best.cost_ns:
            best = answer
        found.append(_point(profile, usable + UNSEEN, best))
    return found


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
