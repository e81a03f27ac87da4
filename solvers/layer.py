"""Whole regions made again: what people do by hand with ``torch.utils.checkpoint``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from time import monotonic

from .answer import claimed
from .memory import Simulation, simulate
from .problem import Choice, Problem, Solution


def layer(problem: Problem, backend: str = "auto", time_limit: float = 10.0, gap: float = 0.01) -> Solution:
    """The fewest regions of which nothing is kept but what others use: the first n, or n spread over the step.

    The better of the two ways, each with the smallest n that fits, by halving. Nothing is proven; ``backend`` and
    ``gap`` are unused.

    Raises:
        InfeasibleError: even all regions are not enough; its minimum is of choices of this kind.
    """
    deadline = monotonic() + time_limit
    found = [fewest(problem, len(problem.regions), way, deadline) for way in (_first, _spread)]
    return claimed(problem, min(found, key=lambda one: one.rank(problem.budget)), "layer")


def fewest(problem: Problem, most: int, way: Callable[[Problem, int], Simulation], deadline: float) -> Simulation:
    """The smallest number up to ``most`` whose simulation fits, taking it that more of them need less.

    Where not even all of them do, what needs less: all, or none, since making things again needs bytes too.
    """
    none, best = way(problem, 0), way(problem, most)
    if none.peak <= problem.budget or best.peak > problem.budget:
        return min(none, best, key=lambda one: one.rank(problem.budget))
    low, high = 1, most
    while low < high and monotonic() < deadline:
        middle = (low + high) // 2
        found = way(problem, middle)
        if found.peak <= problem.budget:
            best, high = min(best, found, key=lambda one: one.rank(problem.budget)), middle
        else:
            low = middle + 1
    return best


def without(problem: Problem, regions: Collection[int]) -> list[Choice]:
    """Keep nothing of these regions, and all of the others."""
    return [Choice.RECOMPUTE if value.region in regions else Choice.KEEP for value in problem.values]


def _first(problem: Problem, count: int) -> Simulation:
    return simulate(problem, without(problem, range(count)))


def _spread(problem: Problem, count: int) -> Simulation:
    every = len(problem.regions)
    return simulate(problem, without(problem, {number * every // count for number in range(count)}))
