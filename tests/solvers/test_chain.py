"""Rows of regions that are run again: below what single regions reach, and cheaper, in the referee's eyes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from budgetopt.solvers import Choice, InfeasibleError, Segment, minimum, simulate, solve
from budgetopt.solvers.segments import chains, in_order

from .steps import layers, transformer


@pytest.mark.parametrize("budget", [250, 300, 400])
def test_below_what_regions_hand_to_each_other(budget: int) -> None:
    problem = replace(layers(30), budget=budget)
    assert minimum(problem)[0] > 400
    with pytest.raises(InfeasibleError):
        solve(problem, "regions")
    solution = solve(problem, "segments")
    seen = simulate(problem, solution.choices, solution.segments)
    assert solution.segments
    assert seen.peak == solution.peak <= budget
    assert seen.cost_ns == solution.cost_ns
    assert chains(in_order(solution.segments))


def test_one_extra_forward_does_for_twice_the_root_of_the_layers() -> None:
    """Chen et al.: n layers in about 2 sqrt(n) of the stream, for one forward more. Each is 10 bytes and 10 ns here."""
    count = 100
    problem = replace(layers(count), budget=100 + 10 * (2 * 10 + 14))
    solution = solve(problem, "segments")
    assert solution.peak <= problem.budget
    assert solution.cost_ns <= 10 * count


def test_what_fits_without_segments_has_none() -> None:
    problem = layers(8)
    kept = simulate(problem, [Choice.KEEP] * len(problem.values))
    solution = solve(replace(problem, budget=kept.peak), "segments")
    assert (solution.segments, solution.cost_ns) == ((), 0)


def test_never_dearer_than_regions() -> None:
    problem = transformer(6).problem()
    low, high = minimum(problem)[0], simulate(problem, [Choice.KEEP] * len(problem.values)).peak
    for share in (0.1, 0.4, 0.8):
        one = replace(problem, budget=low + round(share * (high - low)))
        assert solve(one, "segments").cost_ns <= solve(one, "regions").cost_ns


def test_infeasible_names_the_smaller_need() -> None:
    problem = replace(layers(30), budget=120)
    with pytest.raises(InfeasibleError) as raised:
        solve(problem, "segments")
    error = raised.value
    assert error.minimum < minimum(problem)[0]
    rows = [Segment(*row) for row in error.segments]
    assert simulate(problem, [Choice(c) for c in error.choices], rows).peak == error.minimum


@pytest.mark.parametrize("rows", [[(0, 2), (1, 3)], [(3, 2)]])
def test_rows_that_overlap_are_refused(rows: list[tuple[int, int]]) -> None:
    problem = layers(5)
    with pytest.raises(ValueError, match="overlaps"):
        simulate(problem, [Choice.KEEP] * len(problem.values), [Segment(*row) for row in rows])
