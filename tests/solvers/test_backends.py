"""The traps of the engines, each sprung on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pulp
import pytest

from budgetopt.solvers import SolverError, backends, minimum, simulate, solve
from budgetopt.solvers.backends import run
from budgetopt.solvers.problem import Choice, Problem
from budgetopt.solvers.program import Program
from budgetopt.solvers.stages import stages

from .steps import network, transformer


@pytest.fixture
def problem() -> Iterator[Problem]:
    yield transformer(2).problem(60 << 20)


def _cover(need: float) -> pulp.LpProblem:
    """Cheapest of x0..x2 with weights 3, 2, 2 and prices 3, 2, 2 that weigh at least ``need``."""
    program = pulp.LpProblem("cover", pulp.LpMinimize)
    x = [program.add_variable(f"x{i}", 0, 1, pulp.LpInteger) for i in range(3)]
    weights = dict(zip(x, (3.0, 2.0, 2.0), strict=True))
    program.setObjective(pulp.LpAffineExpression(weights))
    program.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(weights), pulp.LpConstraintGE, rhs=need), "c0")
    return program


@pytest.mark.parametrize("backend", ["cbc", "highs"])
def test_values_bound_and_verdict(backend: str) -> None:
    outcome = run(_cover(3.5), backend, 5, 0.0)
    assert outcome.found
    assert outcome.proven
    assert [round(outcome.values[f"x{i}"]) for i in range(3)] == [0, 1, 1]
    assert outcome.bound == pytest.approx(4, abs=0.01)
    impossible = run(_cover(8), backend, 5, 0.0)
    assert not impossible.found
    assert impossible.bound == 0


@pytest.mark.parametrize("backend", ["cbc", "highs"])
@pytest.mark.parametrize("gap", [0.03, 0.1])
def test_a_bound_that_is_good_enough_is_still_a_bound(backend: str, gap: float) -> None:
    step = network(Random(0), 8, 14)
    low = minimum(step.problem())[0]
    high = simulate(step.problem(), [Choice.KEEP] * len(step.values)).peak
    for percent in range(10, 90, 20):
        problem = step.problem(low + (high - low) * percent // 100)
        program = Program(problem, stages(problem))
        best = run(program.close(), "highs", 60, 0.0)
        rough = run(Program(problem, stages(problem)).close(), backend, 60, gap)
        assert best.proven
        assert rough.bound <= best.bound * (1 + 1e-6)
        assert rough.bound >= best.bound * (1 - 1.2 * gap) - 1e-3


def test_an_answer_that_cbc_calls_optimal_is_no_bound() -> None:
    # CBC throws away what is better than its best answer by less than the gap, and then prints no bound at all.
    program = _cover(3.5)
    program.assignVarsVals({"x0": 1.0, "x1": 1.0, "x2": 0.0})  # 5, where 4 is the optimum
    program.assignStatus(pulp.constants.LpStatusOptimal, pulp.constants.LpSolutionOptimal)
    done = "\nResult - Optimal solution found\n\nObjective value: 5.0\n"
    assert backends.cbc_bound(done, program, 0.2) == 4
    assert backends.cbc_bound(done + "Lower bound:   3.900\n", program, 0.2) == pytest.approx(3.9, abs=0.001)
    program.assignStatus(pulp.constants.LpStatusOptimal, pulp.constants.LpSolutionIntegerFeasible)
    assert backends.cbc_bound("Result - Stopped on time limit", program, 0.2) == 0


@pytest.mark.parametrize("backend", ["cbc", "highs"])
def test_nothing_is_printed(backend: str, problem: Problem, capfd: pytest.CaptureFixture[str]) -> None:
    assert solve(problem, "ilp", backend).cost_ns > 0
    assert capfd.readouterr() == ("", "")


def test_cbc_in_a_temporary_directory_with_a_space(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "with a space"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    assert solve(problem, "ilp", "cbc").solver.startswith("ilp, CBC")


@pytest.mark.parametrize("script", [None, "exit 3", "sleep 60", "exit 0", "echo Optimal"])
def test_a_broken_cbc_is_replaced_by_highs(
    script: str | None, problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _break_cbc(script, tmp_path, monkeypatch)
    monkeypatch.setattr(backends, "_GRACE", 0.0)
    limit = 2.0 if script == "sleep 60" else 10.0
    for solver in ("ilp", "regions"):
        solution = solve(problem, solver, "cbc", time_limit=limit)
        assert "cbc failed" in solution.solver
        assert solution.peak <= problem.budget


def test_without_any_engine_the_greedy_answer_comes_with_a_note(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _break_cbc("exit 3", tmp_path, monkeypatch)
    monkeypatch.setattr(backends, "has_highs", lambda: False)
    for solver in ("ilp", "regions"):
        solution = solve(problem, solver)
        assert solution.solver.startswith("greedy (no MILP engine answered: cbc failed")
        assert (solution.status, solution.bound_ns, solution.gap) == ("heuristic", 0, 1.0)
        assert solution.choices == solve(problem, "greedy").choices


def test_a_missing_highs_is_replaced_by_cbc(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "has_highs", lambda: False)
    for solver in ("ilp", "regions"):
        assert solve(problem, solver, "auto").solver.startswith(f"{solver}, CBC")
        assert "highs failed: highspy is not installed" in solve(problem, solver, "highs").solver


def test_an_unknown_engine_is_an_error() -> None:
    with pytest.raises(SolverError, match="'glpk' is not one of auto, cbc, highs"):
        run(_cover(1), "glpk", 1, 0)


def test_an_engine_that_lies_is_caught_by_the_referee(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_all(program: pulp.LpProblem, time_limit: float, gap: float) -> backends.Outcome:
        return backends.Outcome(True, True, {v.name: 1.0 for v in program.variables()}, 0.0, "liar")

    monkeypatch.setitem(backends.ENGINES, "highs", keep_all)
    solution = solve(problem, "ilp", "highs")
    assert solution.peak == simulate(problem, solution.choices).peak <= problem.budget
    assert Choice.RECOMPUTE in solution.choices


def _break_cbc(script: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "cbc"
    if script is not None:
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    monkeypatch.setattr(backends, "cbc_path", lambda: str(path))
