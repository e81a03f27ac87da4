"""Steps of well-known models at full size: answers within the budget, near the proven optimum, in bounded time."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import pytest

from budgetopt.solvers import Choice, InfeasibleError, Problem, Solution, load_problem, simulate, smallest, solve
from budgetopt.solvers.answer import outcome
from budgetopt.solvers.compare import plain_peak
from budgetopt.solvers.halves import exactly

FOLDER = Path(__file__).parent / "recorded"
NAMES = sorted(path.name.removesuffix(".json.gz") for path in FOLDER.glob("*.json.gz"))
SECONDS = {"highs": 3.0, "cbc": 6.0}
GAP = 0.01
"""Of the step: a plan that costs half a percent of it can't be told from one that costs a tenth less."""


@cache
def recorded(name: str) -> Problem:
    return load_problem(FOLDER / f"{name}.json.gz")


def budgets(problem: Problem, backend: str, count: int = 8) -> list[int]:
    low, high = smallest(problem, "regions", backend).peak, plain_peak(problem)
    return [low + (high - low) * number // (count - 1) for number in range(count)]


@pytest.mark.parametrize("name", NAMES)
def test_every_recording_is_sound(name: str) -> None:
    problem = recorded(name)
    assert problem.resident < plain_peak(problem)
    assert len(problem.operators) > 90
    assert problem.step_ns > 0


@pytest.mark.parametrize("name", ["vgg16"])
def test_small_ones_are_solved_within_the_budget(name: str) -> None:
    problem = recorded(name)
    budget = (problem.resident + 3 * plain_peak(problem)) // 4
    found = solve(replace(problem, budget=budget), "regions")
    assert simulate(problem, found.choices).peak == found.peak <= budget
    assert found.cost_ns <= solve(replace(problem, budget=budget), "greedy").cost_ns
    assert found.cost_ns - found.bound_ns <= GAP * problem.step_ns


def test_some_bound_fits_where_making_everything_again_does_not() -> None:
    # VGG-16 has two regions. All of the first made again at once takes as many bytes as keeping it.
    problem = recorded("vgg16")
    budget = problem.resident + 3 * (plain_peak(problem) - problem.resident) // 4
    assert simulate(problem, [Choice.RECOMPUTE] * len(problem.values)).peak > budget
    assert solve(replace(problem, budget=budget), "knapsack").peak <= budget


@pytest.mark.parametrize("name", ["vgg16", "mobilenet_v2"])
def test_the_whole_program_agrees_on_small_ones(name: str) -> None:
    _agree(name, 0.75)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_whole_program_agrees(name: str) -> None:
    """Prints both overheads and both gaps, at each share of the activation bytes at which something fits."""
    assert sum(_agree(name, share) for share in (0.9, 0.75, 0.6, 0.5, 0.35))


def _agree(name: str, share: float) -> bool:
    """Whether something fits; no bound of one is above the other's answer. Without fp16: they allow different."""
    problem = exactly(recorded(name))
    asked = replace(problem, budget=problem.resident + round(share * (plain_peak(problem) - problem.resident)))
    regions, ilp = (outcome(partial(solve, asked, solver, "highs", SECONDS["highs"])) for solver in ("regions", "ilp"))
    if not isinstance(regions, Solution) or not isinstance(ilp, Solution):
        return False
    shown = (f"{one.cost_ns / problem.step_ns:.3%} (gap {one.gap:.2%})" for one in (regions, ilp))
    print(f"{name} at {share}: regions {next(shown)}, ilp {next(shown)}")
    assert regions.bound_ns <= ilp.cost_ns and ilp.bound_ns <= regions.cost_ns
    return True


@pytest.mark.slow
@pytest.mark.parametrize("backend", sorted(SECONDS))
@pytest.mark.parametrize("name", NAMES)
def test_eight_budgets(name: str, backend: str) -> None:
    """Prints seconds, the gap relative to the extra time and to the step, and the overhead, at each budget."""
    problem, limit = recorded(name), SECONDS[backend]
    costs = []
    for number, budget in enumerate(budgets(problem, backend)):
        start = time.perf_counter()
        try:
            found = solve(replace(problem, budget=budget), "regions", backend, limit)
        except InfeasibleError as error:  # the smallest budget was found in more time than this
            assert number == 0 and error.minimum <= 1.01 * budget
            continue
        seconds = time.perf_counter() - start
        apart = (found.cost_ns - found.bound_ns) / problem.step_ns
        print(f"{name} {backend} {budget:,}: {seconds:.1f} s, gap {found.gap:.2%}, {apart:.2%} of the step, "
              f"overhead {found.cost_ns / problem.step_ns:.2%}")  # fmt: skip
        assert simulate(problem, found.choices).peak == found.peak <= budget
        # What is proven to be within the gap that was asked for is good enough, even where greedy is within it as well.
        asked = 1 - GAP if found.status == "optimal" else 1.0
        assert asked * found.cost_ns <= _greedy(problem, budget)
        costs.append(found.cost_ns)
    assert all(later <= earlier * 1.01 for earlier, later in pairwise(costs))


def _greedy(problem: Problem, budget: int) -> int:
    try:
        return solve(replace(problem, budget=budget), "greedy").cost_ns
    except InfeasibleError:
        return 1 << 62
