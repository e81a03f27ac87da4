"""The methods that others use, each against what its paper or its users would do, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from budgetopt.solvers import Choice, InfeasibleError, Kind, Problem, Segment, Solution, simulate, solve
from budgetopt.solvers.knapsack import _packed

from .steps import Step, chain, layers, transformer

K, R = Choice.KEEP, Choice.RECOMPUTE


def _kept(problem: Problem) -> int:
    return simulate(problem, [K] * len(problem.values)).peak


def _dropped(problem: Problem) -> int:
    return simulate(problem, [R] * len(problem.values)).peak


def _between(problem: Problem, share: float) -> Problem:
    low, high = _dropped(problem), _kept(problem)
    return replace(problem, budget=low + round(share * (high - low)))


def _regions(problem: Problem, found: Solution) -> set[int]:
    """Those of which something that could be kept is made again."""
    kept = simulate(problem, [K] * len(problem.values)).choices
    pairs = zip(problem.values, kept, found.choices, strict=True)
    return {value.region for value, before, now in pairs if before == K and now != K}


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_layers_are_made_again_whole_and_no_more_than_needed(share: float) -> None:
    problem = _between(transformer(6).problem(), share)
    found = solve(problem, "layer")
    again = _regions(problem, found)
    assert 0 < len(again) < 6
    assert found.choices == simulate(problem, [R if v.region in again else K for v in problem.values]).choices
    tighter = solve(replace(problem, budget=found.peak - 1), "layer")
    assert len(_regions(problem, tighter)) >= len(again)


def test_segments_of_a_homogeneous_chain_are_near_the_square_root() -> None:
    problem = layers(36)
    with pytest.raises(InfeasibleError) as error:
        solve(replace(problem, budget=1), "sqrt")
    found = solve(replace(problem, budget=error.value.minimum), "sqrt")
    lengths = {row.last - row.first + 1 for row in found.segments}
    assert 3 <= max(lengths) <= 12
    assert found.peak < _dropped(problem)


def test_a_pass_stores_what_is_saved_and_makes_the_rest_on_the_way() -> None:
    # As torch.utils.checkpoint does: what nobody saved is gone as soon as it was read, in the second forward too.
    problem = transformer(16).problem()
    saved = [K if v in problem.handles else R for v in range(len(problem.values))]
    fours = [Segment(first, first + 3) for first in (0, 4, 8)]
    seen = simulate(problem, saved, fours)
    assert seen.peak < simulate(problem, [K] * len(saved), fours).peak
    assert solve(replace(problem, budget=seen.peak), "sqrt").cost_ns <= seen.cost_ns


def test_the_recursion_over_whole_regions_is_never_worse_than_layers() -> None:
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        problem = _between(transformer(5).problem(), share)
        assert solve(problem, "chain").cost_ns <= solve(problem, "layer").cost_ns


def test_the_knapsack_takes_the_most_worth_for_its_bytes() -> None:
    sizes, worth = [250, 250, 500, 1000], [5, 4, 10, 11]
    table = _packed(sizes, worth)
    for bound, best in ((500, 10), (750, 15), (1000, 19), (1500, 21), (2000, 30)):
        left, total = bound * table.most // sum(sizes), 0
        for number in reversed(range(len(sizes))):
            if table.taken[number, left]:
                total, left = total + worth[number], left - table.weights[number]
        assert total == best, bound


def test_the_knapsack_keeps_thousands_of_small_values() -> None:
    # 3000 values of a byte and 30 of 10,000; an operator takes 1 ns to make any of them again. Rounded up to
    # ten-thousandths of the whole, the small ones would take a third of the room instead of a hundredth.
    step = Step()
    g, handles = step.enter(), []
    for size in [1] * 3000 + [10_000] * 30:
        v = step.make(g, size)
        handles.append(step.save(v))
        step.die(v)
    step.event(Kind.EXIT, g)
    step.event(Kind.FORWARD_END)
    for h in reversed(handles):
        step.event(Kind.UNPACK, h)
        step.event(Kind.HANDLE_DIE, h)
    assert solve(step.problem(303_000), "knapsack").cost_ns == 0
    # All small ones and 24 large ones are 243,000 bytes. The six that are not kept come first, where there is room.
    assert solve(step.problem(243_000), "knapsack").cost_ns == 6


def test_rounding_says_how_far_it_may_be_off() -> None:
    for share in (0.2, 0.5, 0.8):
        problem = _between(transformer(4).problem(), share)
        found, best = solve(problem, "lp_rounding"), solve(problem, "ilp", gap=0.0)
        assert 0 < found.bound_ns <= best.cost_ns <= found.cost_ns
        assert found.solver.startswith("lp_rounding, ")


@pytest.mark.parametrize("solver", ["layer", "sqrt", "chain", "knapsack", "lp_rounding"])
def test_a_method_claims_only_what_it_can_express(solver: str) -> None:
    chained = chain(8, 10).problem()
    with pytest.raises(InfeasibleError) as error:
        solve(replace(chained, budget=1), solver)
    choices, segments = [Choice(c) for c in error.value.choices], [Segment(*row) for row in error.value.segments]
    assert simulate(chained, choices, segments).peak == error.value.minimum
