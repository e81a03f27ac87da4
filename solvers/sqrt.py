"""Chen, Xu, Zhang and Guestrin, "Training deep nets with sublinear memory cost" (2016)."""

from __future__ import annotations

from math import sqrt as root
from time import monotonic

from .answer import claimed
from .greedy import start
from .memory import Simulation, simulate
from .problem import Problem, Segment, Solution


def sqrt(problem: Problem, backend: str = "auto", time_limit: float = 10.0, gap: float = 0.01) -> Solution:
    """Equal segments of regions: the forward keeps what they hand to each other, and each is run again as one.

    All lengths that make another number of segments are tried, those nearest to the square root first, and the cheapest
    that fits is taken. The last segment keeps what it makes, for its backward pass comes next, unless nothing fits so.
    Nothing is proven; ``backend`` and ``gap`` are unused.

    Raises:
        InfeasibleError: no length fits; its minimum is of choices of this kind.
    """
    deadline, count = monotonic() + time_limit, len(problem.regions)
    lengths = {-(-count // number) for number in range(1, count + 1)}
    best = _cut(problem, 1, 0)
    for end in (False, True):
        for length in sorted(lengths, key=lambda one: (abs(one - root(count)), one)):
            if (best.peak <= problem.budget and end) or monotonic() > deadline:
                break
            stop = count if end else count - length
            best = min(best, _cut(problem, length, stop), key=lambda one: one.rank(problem.budget))
    return claimed(problem, best, "sqrt")


def _cut(problem: Problem, length: int, stop: int) -> Simulation:
    """Segments of so many regions that begin before the one where to stop.

    What is not saved is made on the way: kept, a segment's pass would store it, and nobody would ask for it.
    """
    last = len(problem.regions) - 1
    rows = [Segment(first, min(first + length - 1, last)) for first in range(0, stop, length)]
    return simulate(problem, start(problem), rows)
