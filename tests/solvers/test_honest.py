"""Solvers keep each other honest: on generated steps, each against the exhaustive one and against the referee."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budgetopt.solvers import (
    OUTSIDE,
    SOLVERS,
    Choice,
    InfeasibleError,
    Kind,
    Problem,
    Solution,
    minimum,
    simulate,
    solve,
)
from budgetopt.solvers.choices import count

from .steps import Step, chain, network

GAP = 0.001
EXACT = ("regions", "ilp")
HEURISTIC = ("lp_rounding", "greedy", "chain", "sqrt", "knapsack", "layer")


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Up to 12 values in one to four regions: branches, shared inputs, writes in place, ties, no time."""
    random = Random(draw(st.integers(0, 10_000)))
    halves = draw(st.booleans())
    step = network(random, draw(st.integers(1, 4)), draw(st.integers(1, 3)), halves=halves)
    problem = step.problem()
    if draw(st.booleans()):  # ties
        problem = replace(problem, operators=tuple(replace(o, time_ns=5) for o in problem.operators))
    if draw(st.booleans()):
        still = random.randrange(len(problem.operators))
        free = [replace(o, time_ns=0) if i == still else o for i, o in enumerate(problem.operators)]
        problem = replace(problem, operators=tuple(free))
    low, high = minimum(problem)[0], _kept(problem)
    return replace(problem, budget=low + (high - low) * draw(st.integers(-1, 8)) // 8)


def _kept(problem: Problem) -> int:
    return simulate(problem, [Choice.KEEP] * len(problem.values)).peak


def _common(problem: Problem, found: Solution) -> bool:
    """Whether the answer is in the plan space that all share: no segments, and nothing between regions in fp16."""
    plain = simulate(problem, found.choices, found.segments)
    crossing = [c for v, c in zip(problem.values, plain.choices, strict=True) if v.crossing]
    return not found.segments and Choice.FP16 not in crossing


def _answer(problem: Problem, solver: str) -> Solution | InfeasibleError:
    try:
        return solve(problem, solver, gap=GAP)
    except InfeasibleError as error:
        return error


@settings(max_examples=30, deadline=None, derandomize=True)
@given(problems())
def test_none_is_over_budget_and_none_beats_trying_everything(problem: Problem) -> None:
    if count(problem) > 3000:
        return
    best = _answer(problem, "exhaustive")
    for solver in (*EXACT, *HEURISTIC, "auto", "segments"):
        found = _answer(problem, solver)
        if isinstance(found, InfeasibleError):
            assert solver in HEURISTIC or isinstance(best, InfeasibleError), solver
            assert found.minimum > problem.budget
            continue
        seen = simulate(problem, found.choices, found.segments)
        assert (seen.peak, seen.cost_ns) == (found.peak, found.cost_ns), solver
        assert found.peak <= problem.budget, solver
        assert found.bound_ns <= found.cost_ns, solver
        if isinstance(best, Solution):
            assert found.bound_ns <= best.cost_ns, solver
            if _common(problem, found):
                assert found.cost_ns >= best.cost_ns, solver
        else:
            assert not _common(problem, found), solver


@settings(max_examples=30, deadline=None, derandomize=True)
@given(problems())
def test_one_program_of_all_is_as_good_as_trying_everything(problem: Problem) -> None:
    if count(problem) > 3000:
        return
    best, found = _answer(problem, "exhaustive"), _answer(problem, "ilp")
    assert isinstance(found, Solution) == isinstance(best, Solution)
    if isinstance(found, Solution) and isinstance(best, Solution):
        assert best.cost_ns <= found.cost_ns
        if found.status == "optimal":
            assert found.cost_ns <= best.cost_ns + GAP * found.cost_ns


@settings(max_examples=12, deadline=None, derandomize=True)
@given(problems())
def test_more_bytes_never_cost_more(problem: Problem) -> None:
    low, high = minimum(problem)[0], _kept(problem)
    for solver in ("exhaustive", *EXACT):
        if solver == "exhaustive" and count(problem) > 3000:
            continue
        costs = [_answer(replace(problem, budget=low + (high - low) * part // 4), solver) for part in range(5)]
        known = [one.cost_ns for one in costs if isinstance(one, Solution)]
        assert all(later <= earlier * (1 + GAP) for earlier, later in pairwise(known)), solver


SAID = """
import sys
sys.path.insert(0, {root!r})
from random import Random
from budgetopt.solvers import minimum, simulate, solve, Choice, SOLVERS
from tests.solvers.steps import network
for seed in (3, 8):
    problem = network(Random(seed), 3, 4, halves=seed == 8).problem()
    low = minimum(problem)[0]
    top = simulate(problem, [Choice.KEEP] * len(problem.values)).peak
    for solver in sorted(SOLVERS):
        try:
            found = solve(network(Random(seed), 3, 4, halves=seed == 8).problem((low + top) // 2), solver)
            print(seed, solver, [int(c) for c in found.choices], found.segments, found.cost_ns)
        except Exception as error:
            print(seed, solver, type(error).__name__)
"""


def test_the_same_step_has_the_same_plan_in_every_process() -> None:
    root = str(Path(__file__).parents[2])
    said = []
    for number in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": number, "PYTHONPATH": root}
        done = subprocess.run(
            [sys.executable, "-c", SAID.format(root=root)], env=environment, capture_output=True, text=True, check=True
        )
        said.append(done.stdout)
    assert said[0] == said[1]
    assert len(said[0].splitlines()) == 2 * len(SOLVERS)


def _no_regions() -> Step:
    step = Step(resident=7)
    step.make(OUTSIDE, 10)
    step.event(Kind.FORWARD_END)
    return step


@pytest.mark.parametrize("solver", sorted(SOLVERS))
class TestDegenerate:
    """Steps at the edge of what there is, for every solver."""

    def test_no_regions(self, solver: str) -> None:
        problem = _no_regions().problem(17)
        assert solve(problem, solver).cost_ns == 0
        with pytest.raises(InfeasibleError):
            solve(replace(problem, budget=16), solver)

    def test_one_region(self, solver: str) -> None:
        problem = chain(1, 10, time=3).problem()
        assert solve(replace(problem, budget=_kept(problem)), solver).cost_ns == 0

    def test_operators_without_time(self, solver: str) -> None:
        problem = chain(5, 10, time=0).problem()
        low, high = minimum(problem)[0], _kept(problem)
        found = _answer(replace(problem, budget=(low + high) // 2), solver)
        assert isinstance(found, InfeasibleError) or (found.cost_ns == 0 and found.peak <= (low + high) // 2)

    def test_all_equal(self, solver: str) -> None:
        problem = chain(6, 10, time=2).problem()
        low, high = minimum(problem)[0], _kept(problem)
        found = _answer(replace(problem, budget=(low + high) // 2), solver)
        if solver in ("auto", "regions", "ilp", "exhaustive"):
            assert isinstance(found, Solution)
        assert isinstance(found, InfeasibleError) or found.peak <= (low + high) // 2

    def test_exactly_enough_for_everything(self, solver: str) -> None:
        problem = network(Random(5), 3, 3).problem()
        found = solve(replace(problem, budget=_kept(problem)), solver)
        assert found.cost_ns == 0

    def test_nothing_may_be_dropped(self, solver: str) -> None:
        step = network(Random(5), 3, 3)
        step.values = [replace(value, droppable=False, crossing=False) for value in step.values]
        high = _kept(step.problem())
        found = solve(step.problem(high), solver)
        assert (found.peak, found.cost_ns, found.segments) == (high, 0, ())
        with pytest.raises(InfeasibleError) as error:
            solve(step.problem(high - 1), solver)
        assert error.value.minimum == high

    def test_the_smallest_peak_that_it_names_is_enough(self, solver: str) -> None:
        # Whoever is told that nothing fits gives as much as was asked for.
        for seed in (5, 9, 13):
            problem = network(Random(seed), 3, 3).problem()
            with pytest.raises(InfeasibleError) as error:
                solve(replace(problem, budget=problem.resident), solver)
            least = error.value.minimum
            assert solve(replace(problem, budget=least), solver).peak <= least

    def test_what_fits_as_it_is_is_left_alone(self, solver: str) -> None:
        # A step that needs more with everything made again than with everything kept: replays need bytes, too.
        problem = network(Random(9), 3, 3).problem()
        dropped = simulate(problem, [Choice.RECOMPUTE] * len(problem.values)).peak
        assert _kept(problem) < dropped
        found = solve(replace(problem, budget=dropped - 1), solver)
        assert (found.cost_ns, found.segments) == (0, ())
