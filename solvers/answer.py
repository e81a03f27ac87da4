"""From the referee's word on a choice to the solution that leaves a solver. Nothing leaves without it."""

from __future__ import annotations

from .errors import InfeasibleError
from .memory import Simulation, minimum, simulate, window_peaks
from .problem import Problem, Solution


def answer(problem: Problem, found: Simulation, solver: str, status: str = "heuristic", bound_ns: int = 0) -> Solution:
    """The solution for a simulated choice; for the smallest peak if that choice is over the budget.

    Raises:
        InfeasibleError: the smallest peak is over the budget, too.
    """
    if found.peak > problem.budget:
        found = _smallest(problem, found)
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


def _smallest(problem: Problem, found: Simulation) -> Simulation:
    """The smaller of the referee's minimum and what was found, where that is within the budget."""
    least = min(simulate(problem, minimum(problem)[1]), found, key=lambda one: one.peak)
    if least.peak > problem.budget:
        choices = tuple(int(choice) for choice in least.choices)
        raise InfeasibleError(least.peak, choices, problem.budget, least.segments)
    return least
