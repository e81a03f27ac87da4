"""Try every choice: the yardstick that the other solvers are tested against."""

from __future__ import annotations

from .answer import answer
from .choices import count, every
from .errors import SolverError
from .memory import Simulation, simulate
from .problem import Problem, Solution

MOST_CHOICES = 200_000
"""Choices that the exhaustive solver tries at most: those of 17 values without fp16, of 11 with it."""


def exhaustive(problem: Problem, backend: str = "auto", time_limit: float = 10.0, gap: float = 0.01) -> Solution:
    """The cheapest choice within the budget, and the smaller peak among equals; the other arguments are unused.

    Raises:
        SolverError: too many choices to try. InfeasibleError: none fits; its minimum is exact here.
    """
    if count(problem) > MOST_CHOICES:  # of a large step, too many for Python to print
        raise SolverError(f"there are too many choices to try: the exhaustive solver stops at {MOST_CHOICES}")
    found = (simulate(problem, choice) for choice in every(problem))
    best = min(found, key=lambda one: _rank(one, problem.budget))
    return answer(problem, best, "exhaustive", "optimal", best.cost_ns)


def _rank(found: Simulation, budget: int) -> tuple[int, int, int]:
    """Fitting choices first, by cost and then peak; the others by peak alone."""
    if found.peak <= budget:
        return 0, found.cost_ns, found.peak
    return 1, found.peak, found.cost_ns
