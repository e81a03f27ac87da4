"""From the referee's word on a choice to the solution that leaves a solver. Nothing leaves without it."""

from __future__ import annotations

from .errors import InfeasibleError
from .memory import Simulation, minimum, window_peaks
from .problem import Problem, Solution


def answer(problem: Problem, found: Simulation, solver: str, status: str = "heuristic", bound_ns: int = 0) -> Solution:
    """The solution for a simulated choice.

    Raises:
        InfeasibleError: its peak is over the budget.
    """
    if found.peak > problem.budget:
        raise infeasible(problem, found)
    return Solution(
        choices=found.choices,
        peak=found.peak,
        peak_event=found.peak_event,
        cost_ns=found.cost_ns,
        bound_ns=min(bound_ns, found.cost_ns),
        status=status,
        solver=solver,
        window_peaks=window_peaks(problem, found),
    )


def infeasible(problem: Problem, found: Simulation) -> InfeasibleError:
    """The error for a budget that nothing fits: the smaller of the referee's minimum and what was found."""
    peak, choices = minimum(problem)
    if found.peak < peak:
        peak, choices = found.peak, found.choices
    return InfeasibleError(peak, tuple(int(choice) for choice in choices), problem.budget)
