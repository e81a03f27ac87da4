"""What each byte buys, and why a layer is treated as it is."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest

import budgetopt
from budgetopt import Plan, Profile
from tests.models import gpt2_small

EXACT = ("keep", "recompute")


@cache
def profiled() -> Profile:
    return budgetopt.profile(*gpt2_small(), optimizer=None)


@cache
def half_plan() -> Plan:
    profile = profiled()
    resident = profile.fixed.total
    return budgetopt.solve(profile, (resident + profile.peak_bytes) // 2, allow=EXACT, solver="greedy")


def test_frontier_runs_from_the_smallest_budget_to_keep_everything() -> None:
    points = budgetopt.frontier(profiled(), points=4, allow=EXACT)
    assert [p.budget_bytes for p in points] == sorted({p.budget_bytes for p in points}) and len(points) == 4
    assert all(p.peak_bytes <= p.budget_bytes for p in points)
    assert all(a.overhead >= b.overhead for a, b in pairwise(points))
    assert points[0].overhead > 0 and points[-1].overhead == 0 and points[-1].extra_ns == 0
    with pytest.raises(budgetopt.InfeasibleBudgetError) as error:
        budgetopt.solve(profiled(), points[0].budget_bytes * 95 // 100, allow=EXACT, time_limit=2)
    assert error.value.minimum <= points[0].budget_bytes


def test_frontier_wants_two_points() -> None:
    with pytest.raises(budgetopt.BudgetOptError, match="points=1"):
        budgetopt.frontier(profiled(), points=1)


def test_a_solver_that_misses_the_smallest_budget_says_so() -> None:
    with pytest.raises(budgetopt.SolverError, match=r"solver='greedy': no choice fits into .* 'auto'"):
        budgetopt.frontier(profiled(), points=4, allow=EXACT, solver="greedy")


def test_the_table_says_per_layer_what_happens_and_why() -> None:
    plan = half_plan()
    table = str(plan)
    for region in plan.regions:
        assert region.path in table
    assert "per MB freed" in table and "replays" in table


def test_explain_speaks_of_every_saved_value_of_the_layer() -> None:
    plan = half_plan()
    text = plan.explain("transformer.h.0")
    head, *lines = text.splitlines()
    decisions = [d for r in plan.regions if r.path == "transformer.h.0" for d in r.decisions if d.choice != "hold"]
    assert len(lines) == len(decisions) > 5
    assert "recomputed" in head and sum(line.split()[0] == "recompute" for line in lines) == sum(
        d.choice == "recompute" for d in decisions
    )


def test_explain_of_a_layer_that_saves_nothing_and_of_none() -> None:
    assert "saves nothing" in half_plan().explain("transformer.wpe")
    with pytest.raises(budgetopt.BudgetOptError, match=r"no layer 'h.0'; did you mean .*transformer.h.0"):
        half_plan().explain("h.0")
