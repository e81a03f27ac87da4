"""Beaumont et al., "Optimal checkpointing for heterogeneous chains" (2019), on the chain of regions."""

from __future__ import annotations

from time import monotonic

from .answer import claimed
from .catalogue import Catalogue
from .chain import Chain
from .layer import layer
from .memory import Simulation, minimum, simulate
from .problem import Choice, Problem, Solution


def leanest(problem: Problem) -> Simulation:
    """A choice with a small peak, found fast: by the referee's descent, or with rows of regions run again as one.

    An upper bound of the smallest peak that there is.
    """
    best = simulate(problem, minimum(problem)[1])
    catalogue = Catalogue.of(problem, "auto", monotonic(), whole=True)
    if catalogue is None:
        return best
    catalogue.learn(best.choices)
    return Chain(problem, catalogue, 0).better(best, 0)


def chain(problem: Problem, backend: str = "auto", time_limit: float = 10.0, gap: float = 0.01) -> Solution:
    """Each region keeps all that it makes or nothing, and rows of regions, one in the other, are run again as one.

    The recursion is that of :mod:`budgetopt.solvers.chain`, with two patterns for each region. Bytes are rounded in
    long chains, so nothing is proven. Where regions do not follow each other one by one, the answer is that of
    :func:`budgetopt.solvers.layer.layer`. ``backend`` and ``gap`` are unused.

    Raises:
        InfeasibleError: nothing was found that fits; its minimum is of choices of this kind.
    """
    start = monotonic()
    catalogue = Catalogue.of(problem, backend, start + time_limit, whole=True)
    if catalogue is None:
        return layer(problem, backend, time_limit, gap)
    budget = problem.budget
    alone = simulate(problem, catalogue.choices(catalogue.recursion().within(budget)))
    ends = [simulate(problem, [choice] * len(problem.values)) for choice in (Choice.KEEP, Choice.RECOMPUTE)]
    best = min(alone, *ends, key=lambda one: one.rank(budget))
    return claimed(problem, Chain(problem, catalogue, budget).better(best, budget), "chain")
