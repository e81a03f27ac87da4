"""What crosses regions in fp16: the same step, with those values halved whatever else is chosen.

What one region hands to the next is kept, and is most of what a convolutional network can't step below. In fp16 it
is half of that, and replays of other regions then read rounded values: an answer with it is not exact, and the
caller has to see that its gradients are good enough.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from time import monotonic

from .answer import answer, better, given, outcome
from .errors import InfeasibleError
from .greedy import polish
from .memory import Simulation, simulate
from .problem import Problem, Solution
from .regions import Prepared, segments
from .timeline import timeline

_FIRST, _EXACT = 0.5, 0.2  # of the time limit: for the step as it is, and without fp16; the rest is for halves


def auto(problem: Problem, backend: str = "auto", time_limit: float = 10.0, gap: float = 0.01) -> Solution:
    """The better of :func:`budgetopt.solvers.regions.segments` on the step as it is, and with what crosses in fp16.

    ``bound_ns`` holds for choices without either: an answer may cost less.

    Raises:
        InfeasibleError: nothing was found that the referee accepts. SolverError: ``backend`` is unknown.
    """
    deadline = monotonic() + time_limit
    if not any(value.half_bytes for value in problem.values):
        return segments(problem, backend, time_limit, gap)
    variant = halved(problem)
    share = 1 - _EXACT if variant is None else _FIRST
    found = outcome(partial(segments, problem, backend, share * time_limit, gap))
    seconds = min(_EXACT * time_limit, deadline - monotonic())
    if seconds > 0 and (isinstance(found, InfeasibleError) or found.status != "optimal"):
        # What is best without fp16 may have been missed.
        found = better(found, outcome(partial(segments, exactly(problem), backend, seconds, gap)))
    if variant is None or (isinstance(found, Solution) and found.cost_ns <= _codec_ns(variant)):
        return given(found)
    rounded = outcome(partial(segments, variant, backend, max(0.0, deadline - monotonic()), gap))
    if isinstance(rounded, Solution):
        rounded = _exact_again(problem, rounded, deadline)
    return given(better(found, rounded))


def frontier(
    problem: Problem, count: int, highest: int, backend: str = "auto", time_limit: float = 10.0, gap: float = 0.01
) -> list[tuple[int, Solution]]:
    """Budgets evenly spaced from the smallest feasible one, each with a solution as :func:`auto` finds them.

    Raises:
        SolverError: ``backend`` is unknown.
    """
    prepared = _variants(problem, backend, monotonic() + time_limit)
    budgets = spaced(min(highest, *(one.least.peak for one in prepared)), highest, count)
    found = None
    for one in prepared:
        found = one.outcomes(budgets, gap, found)
    assert found is not None
    return list(zip(budgets, map(given, found), strict=True))


def spaced(lowest: int, highest: int, count: int) -> list[int]:
    """Bytes from the one to the other."""
    return [lowest + (highest - lowest) * number // (count - 1) for number in range(count)]


def smallest(problem: Problem, backend: str = "auto", time_limit: float = 10.0) -> Simulation:
    """The choice with the smallest peak that is found; an upper bound of the smallest that there is.

    Raises:
        SolverError: ``backend`` is unknown.
    """
    deadline = monotonic() + time_limit
    found = [one.least for one in _variants(problem, backend, deadline)]
    if len(found) > 1:
        found.append(Prepared(exactly(problem), backend, deadline, rows=True).least)
    return min(found, key=lambda one: one.peak)


def _variants(problem: Problem, backend: str, deadline: float) -> list[Prepared]:
    """The step as it is, and with what crosses regions in fp16."""
    plain, variant = Prepared(problem, backend, deadline, rows=True), halved(problem)
    return [plain] if variant is None else [plain, Prepared(variant, backend, deadline, rows=True, like=plain)]


def exactly(problem: Problem) -> Problem:
    """The step without fp16."""
    return replace(problem, values=tuple(replace(value, half_bytes=0) for value in problem.values))


def halved(problem: Problem) -> Problem | None:
    """The step with everything in fp16 that crosses regions and that handles hold longer than the user's code.

    None if there is nothing of the kind.
    """
    line = timeline(problem)
    chosen = {v for v in line.shared if line.die_at[problem.values[v].storage] < line.released_at[v]}
    if not chosen:
        return None
    values = tuple(replace(value, halved=v in chosen) for v, value in enumerate(problem.values))
    return replace(problem, values=values)


def _codec_ns(variant: Problem) -> int:
    return sum(value.codec_ns for value in variant.values if value.halved)


def _exact_again(problem: Problem, found: Solution, deadline: float) -> Solution:
    """The same, with what fits kept as it is instead of in fp16."""
    seen = simulate(problem, found.choices, found.segments)
    seen = seen if seen.segments else polish(problem, seen, deadline)
    return answer(problem, seen, f"{found.solver}, fp16 between regions", "feasible")
