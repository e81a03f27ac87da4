"""What torch.compile does with ``activation_memory_budget``: a knapsack of saved bytes, in which no peak is known."""

from __future__ import annotations

from time import monotonic
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .answer import claimed
from .layer import cheapest
from .memory import Simulation, simulate
from .problem import Choice, Problem, Solution
from .timeline import timeline

_BUCKETS = 10_000  # of bytes, from none to all, but for rounding; as many as torch has


def knapsack(problem: Problem, backend: str = "auto", time_limit: float = 10.0, gap: float = 0.01) -> Solution:
    """Of all saved values, those worth most whose bytes together are within a bound; the best bound that fits.

    A value is worth the time of the operator that makes it, as in torch's partitioner
    (``torch/_functorch/partitioners.py`` and its dynamic program): what else would have to run again is not counted,
    nor when bytes are there. Those are rounded to ten-thousandths of the whole, as they are there, so what is very
    small is kept. Bounds are tried as in :func:`budgetopt.solvers.layer.cheapest`, with the referee's word on the peak.
    Nothing is proven; ``backend`` and ``gap`` are unused.

    Raises:
        InfeasibleError: no bound fits; its minimum is of choices of this kind.
    """
    line = timeline(problem)
    saved = [v for v in line.decided if line.saved[v] and v not in line.coded]
    sizes = [problem.storages[problem.values[v].storage] for v in saved]
    worth = [problem.operators[problem.values[v].operator].time_ns for v in saved]
    packed = _packed(sizes, worth)

    def dropping(step: Problem, buckets: int) -> Simulation:
        chosen = [Choice.RECOMPUTE] * len(step.values)
        left = packed.most - buckets
        for number in reversed(range(len(saved))):
            if packed.taken[number, left]:
                chosen[saved[number]] = Choice.KEEP
                left -= packed.weights[number]
        return simulate(step, chosen)

    best = cheapest(problem, packed.most, dropping, monotonic() + time_limit)
    return claimed(problem, best, "knapsack")


class _Table(NamedTuple):
    """What is best under every bound.

    Attributes:
        taken: for each item and bound, whether the best choice up to that item takes it. weights: of the items, in
            buckets. most: the sum of them; under that bound, everything is taken.
    """

    taken: NDArray[np.bool_]
    weights: list[int]
    most: int


def _packed(sizes: list[int], worth: list[int]) -> _Table:
    """The dynamic program over all bounds at once."""
    unit = max(1, -(-sum(sizes) // _BUCKETS))
    # To the nearest: rounded up, thousands of small values would fill the whole by themselves.
    weights = [(2 * size + unit) // (2 * unit) for size in sizes]
    most = sum(weights)
    taken = np.zeros((len(sizes), most + 1), dtype=np.bool_)
    best = np.zeros(most + 1, dtype=np.int64)
    for number, (weight, value) in enumerate(zip(weights, worth, strict=True)):
        with_it = np.full_like(best, -1)
        with_it[weight:] = best[: most + 1 - weight] + value
        taken[number] = with_it >= best
        best = np.maximum(best, with_it)
    return _Table(taken, weights, most)
