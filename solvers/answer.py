"""From the referee's word on a choice to the solution that leaves a solver. Nothing leaves without it."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from .errors import InfeasibleError
from .memory import Simulation, minimum, simulate, window_peaks
from .problem import Problem, Solution

PATIENCE = 0.5
"""Seconds beyond a time limit in which a solver may still look for anything that fits."""


def answer(
    problem: Problem,
    found: Simulation,
    solver: str,
    status: str = "heuristic",
    bound_ns: int = 0,
    deadline: float = inf,
) -> Solution:
    """The solution for a simulated choice; for the smallest peak if that choice is over the budget.

    Args:
        deadline: ``time.monotonic()``; the smallest peak is looked for until :data:`PATIENCE` after it.

    Raises:
        InfeasibleError: the smallest peak is over the budget, too.
    """
    if found.peak > problem.budget:
        found = _smallest(problem, found, deadline + PATIENCE)
    return Solution(
        choices=found.choices,
        peak=found.peak,
        peak_event=found.peak_event,
        cost_ns=found.cost_ns,
        bound_ns=min(bound_ns, found.cost_ns),
        status=status,
        solver=solver,
        window_peaks=window_peaks(problem, found),
        segments=found.segments,
    )


def claimed(problem: Problem, found: Simulation, solver: str, bound_ns: int = 0) -> Solution:
    """As :func:`answer`, of a method that claims only what it can express: no other choice takes its place.

    Raises:
        InfeasibleError: the choice is over the budget.
    """
    if found.peak > problem.budget:
        raise infeasible(found, problem.budget)
    return answer(problem, found, solver, bound_ns=bound_ns)


def infeasible(least: Simulation, budget: int) -> InfeasibleError:
    """The error that names a smallest peak, and the choice that has it."""
    return InfeasibleError(least.peak, tuple(map(int, least.choices)), budget, least.segments)


Outcome = Solution | InfeasibleError
"""What a solver has to say of one budget."""


def outcome(solver: Callable[[], Solution]) -> Outcome:
    """What a solver answers, or why nothing fits."""
    try:
        return solver()
    except InfeasibleError as error:
        return error


def better(one: Outcome, other: Outcome) -> Outcome:
    """The cheaper of two solutions; a solution rather than none; of two that don't fit, what needs less."""
    return min(one, other, key=_rank)


def given(found: Outcome) -> Solution:
    """The solution.

    Raises:
        InfeasibleError: there is none.
    """
    if isinstance(found, InfeasibleError):
        raise found
    return found


def _rank(found: Outcome) -> tuple[int, int]:
    return (0, found.cost_ns) if isinstance(found, Solution) else (1, found.minimum)


def _smallest(problem: Problem, found: Simulation, deadline: float) -> Simulation:
    """The smaller of the referee's minimum and what was found, where that is within the budget."""
    least = min(simulate(problem, minimum(problem, deadline=deadline)[1]), found, key=lambda one: one.peak)
    if least.peak > problem.budget:
        raise infeasible(least, problem.budget)
    return least
