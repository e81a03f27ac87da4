"""The solvers against each other, against trying everything, and against numbers worked out by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from budgetopt.solvers import (
    OUTSIDE,
    SOLVERS,
    Choice,
    InfeasibleError,
    Kind,
    Problem,
    Segment,
    Solution,
    SolverError,
    minimum,
    simulate,
    solve,
)
from budgetopt.solvers.choices import count

from .steps import Step, chain, network, transformer

BACKENDS = ("cbc", "highs")
EXACT = ("auto", "regions", "segments", "ilp", "exhaustive")
PROGRAMS = ("ilp", "regions")
K, R, H = Choice.KEEP, Choice.RECOMPUTE, Choice.FP16


def _keep_all(problem: Problem) -> int:
    return simulate(problem, [K] * len(problem.values)).peak


def _check(problem: Problem, solution: Solution) -> None:
    """What a solution says is what the referee says."""
    seen = simulate(problem, solution.choices, solution.segments)
    assert seen.peak <= problem.budget
    assert (seen.peak, seen.peak_event, seen.cost_ns) == (solution.peak, solution.peak_event, solution.cost_ns)
    assert seen.choices == solution.choices
    assert max(solution.window_peaks) == solution.peak
    assert 0 <= solution.bound_ns <= solution.cost_ns


def _fan(sizes: tuple[int, ...], times: tuple[int, ...], work: int) -> Step:
    """Independent values made from one input and saved; then an operator that needs ``work`` bytes for itself."""
    step = Step()
    x = step.make(OUTSIDE, 1)
    g = step.enter()
    handles = []
    for size, ns in zip(sizes, times, strict=True):
        v = step.make(g, size, (x,), time=ns)
        handles.append(step.save(v))
        step.die(v)
    step.event(Kind.EXIT, g)
    step.die(step.make(OUTSIDE, work))
    step.event(Kind.FORWARD_END)
    for h in reversed(handles):
        step.event(Kind.UNPACK, h)
        step.event(Kind.HANDLE_DIE, h)
    return step


@pytest.mark.parametrize("solver", sorted(SOLVERS))
def test_a_knapsack_by_hand(solver: str) -> None:
    # Keep-all at the big operator: 1 + (50 + 40 + 30) + 100 = 221. At 180, 41 bytes must go: 50 alone for 9 ns,
    # 40 + 30 for 5 + 3 = 8 ns, or 50 + 30 and so on for more. So keep the first, drop the others.
    problem = _fan((50, 40, 30), (9, 5, 3), 100).problem(180)
    solution = solve(problem, solver)
    _check(problem, solution)
    if solver in EXACT:
        assert solution.choices[1:4] == (K, R, R)
        assert (solution.peak, solution.cost_ns) == (1 + 50 + 100, 8)


@pytest.mark.parametrize("solver", sorted(SOLVERS))
def test_keep_all_is_free_where_it_fits(solver: str) -> None:
    problem = chain(layers=4, size=10, record_ns=5).problem(60)
    solution = solve(problem, solver)
    _check(problem, solution)
    assert (solution.cost_ns, solution.gap) == (0, 0.0)


@pytest.mark.parametrize("solver", sorted(SOLVERS))
def test_what_does_not_fit_says_the_smallest_peak(solver: str) -> None:
    # The big operator runs beside the input: 1 + 100, whatever is dropped.
    with pytest.raises(InfeasibleError) as error:
        solve(_fan((50, 40), (9, 5), 100).problem(100), solver)
    assert error.value.minimum == 101
    choices, segments = [Choice(c) for c in error.value.choices], [Segment(*row) for row in error.value.segments]
    assert simulate(_fan((50, 40), (9, 5), 100).problem(), choices, segments).peak == 101


@pytest.mark.parametrize("solver", PROGRAMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_recording_gathers_drops_in_one_region(solver: str, backend: str) -> None:
    # Two equal regions, each with two values of 10 bytes that cost 1 ns; recording a region costs 100.
    # 20 bytes must go: both from one region is 102, one from each 202.
    step = Step()
    handles = []
    for _ in range(2):
        g = step.enter(record_ns=100)
        for _ in range(2):
            v = step.make(g, 10, time=1)
            handles.append(step.save(v))
            step.die(v)
        step.event(Kind.EXIT, g)
    step.die(step.make(OUTSIDE, 50))
    step.event(Kind.FORWARD_END)
    for h in reversed(handles):
        step.event(Kind.UNPACK, h)
        step.event(Kind.HANDLE_DIE, h)
    problem = step.problem(90 - 20)
    solution = solve(problem, solver, backend)
    _check(problem, solution)
    assert solution.cost_ns == 102


@pytest.mark.parametrize("solver", PROGRAMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_fp16_is_chosen_where_it_is_cheaper(solver: str, backend: str) -> None:
    # One value of 100 bytes, 50 in fp16; 50 must go. Remaking costs 10, the codec 3.
    step = Step()
    g = step.enter()
    v = step.make(g, 100, time=10, half=50, codec=3)
    h = step.save(v)
    step.die(v)
    step.event(Kind.EXIT, g)
    step.die(step.make(OUTSIDE, 300))
    step.event(Kind.FORWARD_END)
    step.event(Kind.UNPACK, h)
    step.event(Kind.HANDLE_DIE, h)
    problem = step.problem(350)
    solution = solve(problem, solver, backend)
    _check(problem, solution)
    assert (solution.choices[0], solution.cost_ns) == (H, 3)


@pytest.mark.parametrize("solver", PROGRAMS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layers", [3, 6, 9])
def test_chains_are_solved_as_well_as_by_trying_everything(solver: str, backend: str, layers: int) -> None:
    step = chain(layers, 10, time=7, half=5, codec=2) if layers < 9 else chain(layers, 10, time=7)
    low, high = minimum(step.problem())[0], _keep_all(step.problem())
    for budget in sorted({low, (low + high) // 2, high - 1} & set(range(low, high))):
        problem = step.problem(budget)
        solution = solve(problem, solver, backend, gap=0.001)
        _check(problem, solution)
        assert solution.cost_ns == solve(problem, "exhaustive").cost_ns


def _small(random: Random) -> Step | None:
    step = network(random, random.randint(1, 3), random.randint(2, 5))
    return step if count(step.problem()) <= 1000 else None


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False), st.integers(0, 90), st.sampled_from(BACKENDS))
def test_any_small_problem(random: Random, percent: int, backend: str) -> None:
    step = _small(random)
    if step is None:
        return
    low, high = minimum(step.problem())[0], _keep_all(step.problem())
    problem = step.problem(low + (high - low) * percent // 100)
    best = solve(problem, "exhaustive")
    greedy = solve(problem, "greedy")
    ilp = solve(problem, "ilp", backend, gap=0.001)
    regions = solve(problem, "regions", backend, gap=0.001)
    for solution in (best, greedy, ilp, regions):
        _check(problem, solution)
    assert ilp.bound_ns <= best.cost_ns <= ilp.cost_ns <= greedy.cost_ns
    assert regions.bound_ns <= best.cost_ns <= regions.cost_ns
    with pytest.raises(InfeasibleError) as error:
        solve(step.problem(low - 1), "ilp", backend)
    assert error.value.minimum == low


def test_small_problems_are_mostly_solved_and_proven_to_the_optimum() -> None:
    costs, proven = [], []
    for seed in range(30):
        step = _small(Random(seed))
        if step is None:
            continue
        low, high = minimum(step.problem())[0], _keep_all(step.problem())
        for percent in (0, 30, 60):
            problem = step.problem(low + (high - low) * percent // 100)
            ours = solve(problem, "ilp", gap=0.001)
            costs.append((ours.cost_ns, solve(problem, "exhaustive").cost_ns))
            proven.append(ours.status == "optimal")
    assert sum(cost == best for cost, best in costs) >= 0.98 * len(costs)
    assert sum(proven) >= 0.95 * len(proven)
    assert sum(cost for cost, _ in costs) <= 1.01 * sum(best for _, best in costs)


def test_equal_problems_get_equal_answers_in_every_process() -> None:
    code = (
        "from tests.solvers.steps import transformer\n"
        "from budgetopt.solvers import solve\n"
        "for solver in ('ilp', 'regions', 'greedy'):\n"
        "    s = solve(transformer(3, halves=True).problem(70 << 20), solver)\n"
        "    print(s.peak, s.cost_ns, s.bound_ns, *map(int, s.choices))\n"
    )
    root = Path(__file__).parents[2]
    answers = set()
    for seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
        command = [sys.executable, "-W", "error", "-c", code]
        done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=True)
        answers.add(done.stdout)
    assert len(answers) == 1
    assert answers.pop().count("\n") == 3  # nothing else on stdout: no banner, no log


@pytest.mark.parametrize("solver", PROGRAMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_layers_are_no_trap(solver: str, backend: str) -> None:
    step = transformer(12)
    dropped = simulate(step.problem(), [R] * len(step.values))
    for share in (0.2, 0.6):
        problem = step.problem(int(dropped.peak + share * (_keep_all(step.problem()) - dropped.peak)))
        solution = solve(problem, solver, backend, time_limit=8)
        _check(problem, solution)
        assert solution.cost_ns <= solve(problem, "greedy").cost_ns
        assert solution.gap <= 0.03


@pytest.mark.parametrize("solver", sorted(SOLVERS))
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_decide(solver: str, backend: str) -> None:
    step = Step(resident=5)
    assert solve(step.problem(5), solver, backend).peak == 5
    with pytest.raises(InfeasibleError):
        solve(step.problem(0), solver, backend)
    h = step.save(step.make(step.enter(), 10, replayable=False))
    step.event(Kind.FORWARD_END)
    step.event(Kind.UNPACK, h)
    step.event(Kind.HANDLE_DIE, h)
    assert solve(step.problem(15), solver, backend).cost_ns == 0
    with pytest.raises(InfeasibleError) as error:
        solve(step.problem(14), solver, backend)
    assert error.value.minimum == 15


def test_solving_needs_no_torch() -> None:
    root = Path(__file__).parents[2]
    code = "import sys; import budgetopt.solvers; print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("solver", [*EXACT, "greedy", "lp_rounding"])
def test_fp16_without_replays(solver: str) -> None:
    # Five values of 10 bytes, 5 in fp16; x and the big operator take 51. At 91, two of the five must be halves.
    step = _fan((10,) * 5, (1,) * 5, 50)
    problem = replace(
        step.problem(91),
        values=tuple(replace(v, half_bytes=5, codec_ns=3) if v.region >= 0 else v for v in step.values),
        operators=tuple(replace(operator, replayable=False) for operator in step.operators),
    )
    solution = solve(problem, solver)
    _check(problem, solution)
    assert solution.cost_ns == 2 * 3
    assert R not in (solution.choices[v] for v in step.handles)


def test_a_region_needs_no_entering_and_leaving() -> None:
    step = chain(6, 10, time=7)
    bare = [event for event in step.events if event.kind not in (Kind.ENTER, Kind.EXIT)]
    problem = replace(step.problem(70), events=tuple(bare))
    solution = solve(problem, "ilp")
    _check(problem, solution)
    assert solution.cost_ns == solve(problem, "exhaustive").cost_ns


def test_what_is_asked_for_must_exist() -> None:
    problem = chain(3, 10).problem()
    with pytest.raises(SolverError, match="simulated-annealing"):
        solve(problem, "simulated-annealing")
    with pytest.raises(SolverError, match="gurobi"):
        solve(problem, "ilp", "gurobi")
    with pytest.raises(SolverError, match="too many"):
        solve(chain(20, 10).problem(50), "exhaustive")
