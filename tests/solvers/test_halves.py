"""What crosses regions in fp16: chosen where it is cheapest, judged by the referee, left alone where nothing has it."""

from __future__ import annotations

from dataclasses import replace

from budgetopt.solvers import Choice, Problem, frontier, minimum, simulate, smallest, solve
from budgetopt.solvers.halves import exactly, halved
from budgetopt.solvers.timeline import timeline

from .steps import layers, transformer

CODEC = 1  # nanoseconds; making a layer's output again takes 5, and that is not all of it


def _halves(problem: Problem, choices: tuple[Choice, ...]) -> int:
    return sum(choices[v] == Choice.FP16 for v in timeline(problem).shared)


def test_cheaper_than_rows_of_layers_run_again() -> None:
    problem = layers(20, half=5, codec=CODEC)
    budget = minimum(exactly(problem))[0] - 60  # of about 200 bytes that the layers hand to each other
    problem = replace(problem, budget=budget)
    rows, best = solve(problem, "segments"), solve(problem)
    assert rows.segments
    assert _halves(problem, best.choices) >= 12
    assert best.cost_ns < rows.cost_ns
    seen = simulate(problem, best.choices, best.segments)
    assert (seen.peak, seen.cost_ns) == (best.peak, best.cost_ns)
    assert seen.peak <= budget


def test_no_more_than_the_budget_asks_for() -> None:
    problem = layers(20, half=5, codec=CODEC)
    problem = replace(problem, budget=minimum(exactly(problem))[0] - 60)
    variant = halved(problem)
    assert variant is not None
    everything = sum(value.halved for value in variant.values)
    assert 0 < _halves(problem, solve(problem).choices) < everything == 19


def test_dear_fp16_is_not_used() -> None:
    problem = layers(20, half=5, codec=1000)
    problem = replace(problem, budget=minimum(exactly(problem))[0] - 60)
    assert not _halves(problem, solve(problem).choices)


def test_nothing_to_halve() -> None:
    assert halved(layers(5)) is None
    assert halved(transformer(2, halves=True).problem()) is None


def test_a_frontier_begins_at_the_smallest_peak_and_falls() -> None:
    problem = layers(20, half=5, codec=CODEC)
    highest = simulate(problem, [Choice.KEEP] * len(problem.values)).peak
    points = frontier(problem, 12, highest)
    assert points[0][0] == smallest(problem).peak
    assert points[-1] == (highest, points[-1][1]) and points[-1][1].cost_ns == 0
    assert all(solution.peak <= budget for budget, solution in points)
    assert any(_halves(problem, solution.choices) for _, solution in points)
