"""Profile + budget → Plan, with the solvers' errors in the user's words. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from budgetopt import solvers
from budgetopt._answer import to_plan
from budgetopt._arguments import headroom_bytes, number
from budgetopt._errors import BudgetOptError, InfeasibleBudgetError, SolverError
from budgetopt._floor import explain_peak
from budgetopt._plan import Plan
from budgetopt._problem import CHOICES, problem_within
from budgetopt._schema import Profile
from budgetopt._units import parse_bytes, show_bytes, show_enough
from budgetopt.solvers.problem import Choice, Problem, Segment, Solution

BACKENDS = ("auto", "cbc", "highs")
SHORTEST = 1e-9
"""Seconds: a limit is more than nothing."""


def solve(
    profile: Profile,
    budget: int | str,
    *,
    allow: Iterable[str] = CHOICES,
    exclude: Iterable[str] = (),
    solver: str = "auto",
    backend: str = "auto",
    time_limit: float = 10.0,
    gap: float = 0.01,
    headroom: int | str = 0,
    kept: Collection[tuple[int, int]] = (),
    excess: int = 0,
    between: bool = True,
) -> Plan:
    """Decide what to keep, recompute or store in fp16 so that the step's peak fits `budget`.

    Args:
        budget: bytes, or text such as ``"8GB"``. allow: choices that may be made.
        exclude: paths of modules whose values are all kept.
        solver: the method (``"auto"``, ``"ilp"``, ``"greedy"`` …).
            backend: the MILP engine (``"cbc"``, ``"highs"``, ``"auto"``: HiGHS if installed).
        time_limit: seconds, more than 0 and at most a day. gap: relative distance from the program's optimum
            that is good enough, from 0 (prove the optimum) to 1 (any answer that fits).
        headroom: bytes, or a percentage of the budget, taken off first.
        kept: (operator, slot) of values that are kept whatever it costs.
        between: what layers hand to each other may be in fp16, too, if ``"fp16"`` is allowed.
        excess: bytes by which an earlier answer, when run, was over its prediction.

    Raises:
        InvalidBudgetError: the budget can't be read. InfeasibleBudgetError: nothing fits; it says what would.
        SolverError: unknown solver or backend, or no engine answered. BudgetOptError: another argument is no
            legal one.
    """
    if not isinstance(profile, Profile):
        raise BudgetOptError(f"profile={profile!r} is no Profile: make one with budgetopt.profile(model, sample)")
    options = solver_options(solver, backend, time_limit, gap)
    limit = parse_bytes(budget, total=None, free=None)
    headroom = headroom_bytes(headroom, limit)
    problem = problem_within(
        profile,
        limit,
        allow=allow,
        exclude=exclude,
        headroom=headroom,
        kept=frozenset(kept),
        excess=excess,
        between=between,
    )
    solution = solution_for(problem, profile, limit, options)
    return to_plan(profile, problem, solution, budget=limit, headroom=headroom, allow=allow, exclude=exclude)


def solver_options(solver: str, backend: str, time_limit: float, gap: float) -> dict[str, Any]:
    """The solver's arguments by name, if they are legal ones.

    Raises:
        SolverError: unknown solver or backend. BudgetOptError: time_limit or gap is out of its range.
    """
    for argument, name, legal in (("solver", solver, tuple(solvers.SOLVERS)), ("backend", backend, BACKENDS)):
        if name not in legal:
            raise SolverError(f"{argument}={name!r} is not one of {', '.join(sorted(legal))}")
    seconds = number(time_limit, "time_limit", "seconds, more than 0 and at most 86400 (a day)", SHORTEST, 86400.0)
    distance = number(gap, "gap", "a number from 0 (prove the optimum) to 1 (any answer that fits)", 0.0, 1.0)
    return {"solver": solver, "backend": backend, "time_limit": seconds, "gap": distance}


def solution_for(problem: Problem, profile: Profile, limit: int, options: dict[str, Any]) -> Solution:
    """The solver's answer; its errors speak of `limit`, the bytes that the user gave."""
    try:
        return solvers.solve(problem, **options)
    except solvers.InfeasibleError as error:
        choices, segments = [Choice(c) for c in error.choices], [Segment(*row) for row in error.segments]
        minimum, floor = error.minimum, explain_peak(profile, problem, choices, segments)
        spare = limit - problem.budget
        raise InfeasibleBudgetError(
            f"no plan fits {show_bytes(limit)}: the smallest feasible budget is {minimum + spare} bytes "
            f"({show_enough(minimum + spare)}), set {floor}. Raise the budget or make the batch smaller.",
            minimum + spare,
            floor,
        ) from error
    except solvers.SolverError as error:
        raise SolverError(str(error)) from error
