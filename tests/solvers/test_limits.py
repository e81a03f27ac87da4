"""What a solver answers when it has no time."""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random

import pytest

from budgetopt.solvers import Choice, minimum, simulate, solve

from .steps import network, transformer


@pytest.mark.parametrize("solver", ["ilp", "regions", "greedy"])
def test_the_time_limit_holds_for_everything(solver: str) -> None:
    step = network(Random(3), 24, 60, sizes=1 << 20)
    problem = step.problem()
    dropped = simulate(problem, [Choice.RECOMPUTE] * len(problem.values)).peak
    problem = replace(
        problem, budget=dropped + (simulate(problem, [Choice.KEEP] * len(problem.values)).peak - dropped) // 3
    )
    began = time.monotonic()
    solution = solve(problem, solver, time_limit=1.0)
    assert time.monotonic() - began < 2.0
    assert simulate(problem, solution.choices).peak == solution.peak <= problem.budget


def test_a_search_cut_short_still_answers_where_the_smallest_peak_fits() -> None:
    # Out of time at once, the greedy search stays over this budget; the referee's smallest peak is within it.
    step = transformer(4)
    low = minimum(step.problem())[0]
    for solver in ("greedy", "ilp", "regions"):
        problem = step.problem(low)
        solution = solve(problem, solver, time_limit=0.0)
        assert simulate(problem, solution.choices).peak == solution.peak <= problem.budget
