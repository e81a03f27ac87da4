"""Try every choice: the yardstick that the other solvers are tested against."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

from .answer import answer
from .errors import SolverError
from .memory import Simulation, simulate
from .problem import Choice, Problem, Solution
from .stages import useful
from .timeline import timeline

MOST_VALUES = 16
MOST_CHOICES = 200_000


def exhaustive(problem: Problem, backend: str = "auto", time_limit: float = 10.0, gap: float = 0.01) -> Solution:
    """The cheapest choice within the budget, and the smaller peak among equals; the other arguments are unused.

    Raises:
        SolverError: too many values or choices to try. InfeasibleError: none fits; its minimum is exact here.
    """
    best = smallest = None
    for choices in _all(problem):
        found = simulate(problem, choices)
        if smallest is None or (found.peak, found.cost_ns) < (smallest.peak, smallest.cost_ns):
            smallest = found
        if found.peak <= problem.budget and (best is None or _rank(found) < _rank(best)):
            best = found
    if best is None:
        return answer(problem, smallest, "exhaustive")
    return answer(problem, best, "exhaustive", "optimal", best.cost_ns)


def _rank(found: Simulation) -> tuple[int, int]:
    return found.cost_ns, found.peak


def _all(problem: Problem) -> Iterator[list[Choice]]:
    values = useful(problem)[0]
    options = [_options(problem, v) for v in values]
    tries = prod(len(option) for option in options)
    if len(values) > MOST_VALUES or tries > MOST_CHOICES:
        raise SolverError(f"{len(values)} values have {tries} choices; the exhaustive solver tries {MOST_CHOICES}")
    for picked in product(*options):
        choices = [Choice.RECOMPUTE] * len(problem.values)
        for v, choice in zip(values, picked, strict=True):
            choices[v] = choice
        yield choices


def _options(problem: Problem, v: int) -> tuple[Choice, ...]:
    halves = problem.values[v].half_bytes and timeline(problem).saved[v]
    return (Choice.KEEP, Choice.RECOMPUTE, Choice.FP16) if halves else (Choice.KEEP, Choice.RECOMPUTE)
