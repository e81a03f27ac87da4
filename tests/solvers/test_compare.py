"""The comparison of solvers: figures worked out by hand, and what is said where there is no answer."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from budgetopt import solvers
from budgetopt.solvers import SOLVERS, Choice, Problem, Solution, simulate
from tests.solvers.steps import chain


def small() -> Problem:
    """x and four values of 10 bytes that cost 1 ns each, of a step of 8 ns.

    All kept, the first gradient comes on top of five values, and the second one where the last value just went: 60.
    Without v1 it is 50 all along: when v1 is made again, for 1 ns, only x and two gradients are there beside it.
    """
    return replace(chain(4, 10).problem(), step_ns=8)


def test_figures_that_were_worked_out_by_hand() -> None:
    rows = solvers.compare(small(), (1.0, 5 / 6, 0.1), ("ilp", "exhaustive"))
    assert [(row.share, row.solver) for row in rows] == [
        (share, name) for share in (1.0, 5 / 6, 0.1) for name in ("ilp", "exhaustive")
    ]
    for row in rows[:2]:
        assert (row.budget, row.peak, row.cost_ns, row.overhead, row.gap) == (60, 60, 0, 0.0, 0.0)
    for row in rows[2:4]:
        assert (row.budget, row.peak, row.cost_ns, row.overhead, row.gap) == (50, 50, 1, 1 / 8, 0.0)
        assert row.status == "optimal" and row.minimum is None
    for row in rows[4:]:
        assert (row.budget, row.status, row.peak, row.cost_ns, row.overhead, row.gap) == (6, "infeasible", *[None] * 4)
        assert row.minimum is not None and row.minimum > 6
    assert rows[5].minimum == min(simulate(small(), choices).peak for choices in every_choice(small()))


def every_choice(problem: Problem) -> list[list[Choice]]:
    found: list[list[Choice]] = [[]]
    for _ in problem.values:
        found = [[*choices, choice] for choices in found for choice in (Choice.KEEP, Choice.RECOMPUTE)]
    return found


def test_every_solver_has_a_row_and_none_is_better_than_the_best() -> None:
    shares = (0.9, 0.7, 0.5)
    rows = solvers.compare(small(), shares, time_limit=1.0)
    assert [(row.share, row.solver) for row in rows] == [(share, name) for share in shares for name in SOLVERS]
    best = {row.share: row.cost_ns for row in rows if row.solver == "exhaustive"}
    answered = [row for row in rows if row.cost_ns is not None]
    assert len({row.solver for row in answered}) > 3
    for row in answered:
        least = best[row.share]
        assert row.peak is not None and row.cost_ns is not None and least is not None
        assert row.peak <= row.budget and row.cost_ns >= least and row.overhead == row.cost_ns / 8
        assert row.gap is None or row.cost_ns * (1 - row.gap) <= least + 1e-9


def test_without_a_time_of_the_step_there_is_no_share_of_it() -> None:
    (row,) = solvers.compare(replace(small(), step_ns=0), (5 / 6,), ("ilp",))
    assert (row.cost_ns, row.overhead) == (1, None)


def test_what_is_not_tried_out() -> None:
    (row,) = solvers.compare(chain(40, 10).problem(), (0.5,), ("exhaustive",))
    assert (row.status, row.note, row.peak) == ("refused", "more than 200000 choices to try", None)
    (row,) = solvers.compare(chain(12, 10).problem(), (0.5,), ("exhaustive",), time_limit=0.01)
    assert (row.status, row.note) == ("refused", "4096 choices take longer to try than the time limit")
    assert row.seconds < 1


def test_more_choices_than_python_prints() -> None:
    assert 2**15_000 > 10**4300  # the longest number that Python turns into text
    with pytest.raises(solvers.SolverError, match="too many choices to try"):
        solvers.solve(chain(15_000, 1).problem(), "exhaustive")


def test_the_referee_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def liar(problem: Problem, backend: str, time_limit: float, gap: float) -> Solution:
        return Solution((Choice.KEEP,) * len(problem.values), 1, 0, 0, status="optimal", solver="liar")

    def proud(problem: Problem, backend: str, time_limit: float, gap: float) -> Solution:
        return replace(SOLVERS["greedy"](problem, backend, time_limit, gap), cost_ns=0, solver="proud")

    def slow(problem: Problem, backend: str, time_limit: float, gap: float) -> Solution:
        time.sleep(1.2)
        return SOLVERS["greedy"](problem, backend, time_limit, gap)

    def shy(problem: Problem, backend: str, time_limit: float, gap: float) -> Solution:
        raise solvers.SolverError("not today")

    for name, solver in (("liar", liar), ("proud", proud), ("slow", slow), ("shy", shy)):
        monkeypatch.setitem(SOLVERS, name, solver)
    lying, lucky, late, silent = solvers.compare(small(), (5 / 6,), ("liar", "proud", "slow", "shy"), time_limit=0.1)
    assert (lying.status, lying.peak, lying.cost_ns) == ("refused", None, None)
    assert lying.note == "its answer does not fit: the referee counts 60 bytes"
    assert lucky.cost_ns is not None and lucky.cost_ns >= 1 and lucky.gap is None
    assert late.peak is not None and late.seconds > 1 and late.note == "greedy; over the time limit of 0.1 s"
    assert (silent.status, silent.note) == ("refused", "not today")


def test_unknown_names_are_errors_before_anything_is_solved() -> None:
    told: list[str] = []
    for names, backend, match in ((("ilp", "magic"), "auto", "'magic' is not one of"), (("ilp",), "gurobi", "gurobi")):
        with pytest.raises(solvers.SolverError, match=match):
            solvers.compare(small(), (0.5,), names, backend=backend, told=lambda name, budget: told.append(name))
    assert not told
