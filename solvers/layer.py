"""Whole regions made again: what people do by hand with ``torch.utils.checkpoint``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from time import monotonic

from .answer import claimed
from .memory import Simulation, simulate
from .problem import Choice, Problem, Solution

_LEAST, _MOST = 8, 64  # numbers tried besides those of halving
_WORK = 1_000_000  # events replayed for them, about: a second or two


def layer(problem: Problem, backend: str = "auto", time_limit: float = 10.0, gap: float = 0.01) -> Solution:
    """Regions of which nothing is kept but what others use: the first n, or n spread over the step.

    The better of the two ways, each with the cheapest n that fits of those tried, see :func:`cheapest`. Nothing is
    proven; ``backend`` and ``gap`` are unused.

    Raises:
        InfeasibleError: no number of regions was found to be enough; its minimum is of choices of this kind.
    """
    deadline = monotonic() + time_limit
    found = (cheapest(problem, len(problem.regions), way, deadline) for way in (_first, _spread))
    return claimed(problem, _better(problem, *found), "layer")


def cheapest(problem: Problem, most: int, way: Callable[[Problem, int], Simulation], deadline: float) -> Simulation:
    """What fits and costs least of what a way has for the numbers up to ``most``, or what needs least if nothing fits.

    The smallest number that fits is found by halving, taking it that larger ones need less and cost more. Neither is so
    everywhere, since making things again needs bytes too, so some other numbers are tried.
    """
    none = way(problem, 0)
    if none.peak <= problem.budget:
        return none
    best = _better(problem, none, way(problem, most))
    low, high = 1, most
    while low < high and monotonic() < deadline:
        middle = (low + high) // 2
        found = way(problem, middle)
        best = _better(problem, best, found)
        low, high = (low, middle) if found.peak <= problem.budget else (middle + 1, high)
    tries = max(_LEAST, min(_MOST, _WORK // (len(problem.events) + 1)))
    for number in sorted({most * part // tries for part in range(1, tries)}):
        if monotonic() > deadline:
            break
        best = _better(problem, best, way(problem, number))
    return best


def _better(problem: Problem, one: Simulation, other: Simulation) -> Simulation:
    return min(one, other, key=lambda found: found.rank(problem.budget))


def without(problem: Problem, regions: Collection[int]) -> list[Choice]:
    """Keep nothing of these regions, and all of the others."""
    return [Choice.RECOMPUTE if value.region in regions else Choice.KEEP for value in problem.values]


def _first(problem: Problem, count: int) -> Simulation:
    return simulate(problem, without(problem, range(count)))


def _spread(problem: Problem, count: int) -> Simulation:
    every = len(problem.regions)
    return simulate(problem, without(problem, {number * every // count for number in range(count)}))
