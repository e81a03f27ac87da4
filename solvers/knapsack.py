"""What torch.compile does with ``activation_memory_budget``: a knapsack of saved bytes, in which no peak is known."""

from __future__ import annotations

from time import monotonic

import numpy as np
from numpy.typing import NDArray

from .answer import claimed
from .layer import fewest
from .memory import Simulation, simulate
from .problem import Choice, Problem, Solution
from .timeline import timeline

_BUCKETS = 1000  # of bytes, from none to all


def knapsack(problem: Problem, backend: str = "auto", time_limit: float = 10.0, gap: float = 0.01) -> Solution:
    """Of all saved values, those worth most whose bytes together are within a bound; the largest bound that fits.

    A value is worth the time of the operator that makes it, as in torch's partitioner
    (``torch/_functorch/partitioners.py`` and its dynamic program): what else would have to run again is not counted,
    nor when bytes are there. The bound is found by halving, with the referee's word on the peak. Bytes are counted in
    thousandths of the whole. Nothing is proven; ``backend`` and ``gap`` are unused.

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
        left = _BUCKETS - buckets
        for number in reversed(range(len(saved))):
            if packed.taken[number, left]:
                chosen[saved[number]] = Choice.KEEP
                left -= packed.weights[number]
        return simulate(step, chosen)

    return claimed(problem, fewest(problem, _BUCKETS, dropping, monotonic() + time_limit), "knapsack")


class _Table:
    """For each item and bound, whether the best choice up to that item takes it; items' weights in buckets."""

    def __init__(self, taken: NDArray[np.bool_], weights: list[int]) -> None:
        self.taken, self.weights = taken, weights


def _packed(sizes: list[int], worth: list[int]) -> _Table:
    """The dynamic program over all bounds at once."""
    unit = max(1, -(-sum(sizes) // _BUCKETS))
    weights = [-(-size // unit) for size in sizes]
    taken = np.zeros((len(sizes), _BUCKETS + 1), dtype=np.bool_)
    best = np.zeros(_BUCKETS + 1, dtype=np.int64)
    for number, (weight, value) in enumerate(zip(weights, worth, strict=True)):
        with_it = np.full_like(best, -1)
        with_it[weight:] = best[: _BUCKETS + 1 - weight] + value
        taken[number] = with_it >= best
        best = np.maximum(best, with_it)
    return _Table(taken, weights)
