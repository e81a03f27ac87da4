"""The one door to the solvers: a table of functions with the same signature."""

from __future__ import annotations

from collections.abc import Callable

from .errors import SolverError
from .exhaustive import exhaustive
from .greedy import greedy
from .ilp import ilp
from .problem import Problem, Solution
from .regions import regions, segments

SOLVERS: dict[str, Callable[[Problem, str, float, float], Solution]] = {
    "auto": segments,
    "regions": regions,
    "segments": segments,
    "ilp": ilp,
    "greedy": greedy,
    "exhaustive": exhaustive,
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
    if solver not in SOLVERS:
        raise SolverError(f"solver {solver!r} is not one of {', '.join(sorted(SOLVERS))}")
    return SOLVERS[solver](problem, backend, time_limit, gap)
