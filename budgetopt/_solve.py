"""Profile + budget → Plan, with the solvers' errors in the user's words. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from budgetopt import solvers
from budgetopt._answer import to_plan
from budgetopt._errors import InfeasibleBudgetError, SolverError
from budgetopt._plan import Plan
from budgetopt._problem import CHOICES, UNSEEN, infeasible, to_problem
from budgetopt._schema import Profile
from budgetopt._units import parse_bytes, show_bytes
from budgetopt.solvers.problem import Problem, Solution


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
    headroom: int = 0,
    kept: Collection[tuple[int, int]] = (),
    excess: int = 0,
) -> Plan:
    """Decide what to keep, recompute or store in fp16 so that the step's peak fits `budget`.

    Args:
        budget: bytes, or text such as ``"8GB"``. allow: choices that may be made.
        exclude: paths of modules whose values are all kept.
        solver: the method (``"ilp"``, ``"greedy"``, ``"auto"`` …). backend: the MILP engine
            (``"cbc"``, ``"highs"``, ``"auto"``: HiGHS if installed).
        time_limit: seconds. gap: relative distance from the program's optimum that is good enough.
        headroom: bytes taken off the budget first.
        kept: (operator, slot) of values that are kept whatever it costs.
        excess: bytes by which an earlier answer, when run, was over its prediction.

    Raises:
        InvalidBudgetError: the budget can't be read. InfeasibleBudgetError: nothing fits; it says what would.
        SolverError: unknown solver or backend, or no engine answered.
    """
    limit = parse_bytes(budget, total=None, free=None)
    usable = limit - headroom - excess - UNSEEN
    problem = to_problem(profile, usable, allow=allow, exclude=exclude, kept=frozenset(kept))
    solution = solution_for(problem, profile, limit, solver, backend, time_limit, gap)
    return to_plan(profile, problem, solution, budget=limit, headroom=headroom, allow=allow, exclude=exclude)


def solution_for(
    problem: Problem, profile: Profile, limit: int, solver: str, backend: str, time_limit: float, gap: float
) -> Solution:
    """The solver's answer; its errors speak of `limit`, the bytes that the user gave."""
    if backend not in ("auto", "cbc", "highs"):
        raise SolverError(f"backend {backend!r} is not one of auto, cbc, highs")
    try:
        return solvers.solve(problem, solver=solver, backend=backend, time_limit=time_limit, gap=gap)
    except solvers.InfeasibleError as error:
        minimum, floor = infeasible(problem, profile)
        minimum = min(minimum, error.minimum)
        spare = limit - problem.budget
        raise InfeasibleBudgetError(
            f"no plan fits {show_bytes(limit)}: the smallest feasible budget is {minimum + spare} bytes "
            f"({show_bytes(minimum + spare)}), set {floor}. Raise the budget or make the batch smaller.",
            minimum + spare,
            floor,
        ) from error
    except solvers.SolverError as error:
        raise SolverError(str(error)) from error
