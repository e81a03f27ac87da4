"""The program's view of memory against the referee's: never above it, and exact where it is looked at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from budgetopt.solvers import Choice, Kind, Problem, minimum, simulate, solve
from budgetopt.solvers.backends import run
from budgetopt.solvers.choices import count
from budgetopt.solvers.memory import Simulation
from budgetopt.solvers.moments import cut
from budgetopt.solvers.program import Program
from budgetopt.solvers.stages import Key, Stages, stages
from budgetopt.solvers.timeline import timeline, useful

from .steps import Step, chain, network, transformer

K, R, H = Choice.KEEP, Choice.RECOMPUTE, Choice.FP16


def _purposeful(problem: Problem, choices: list[Choice]) -> Simulation:
    """The choice without unsaved values that are kept although no replay reads them."""
    line = timeline(problem)
    found = simulate(problem, choices)
    read = {u for i, times in enumerate(found.replays) if times for u in line.inner[i]}
    return simulate(problem, [c if line.saved[v] or c != K or v in read else R for v, c in enumerate(found.choices)])


def _levels(problem: Problem, rows: Stages, seen: Simulation) -> list[int]:
    """Bytes that each row counts for a simulated choice."""

    def holds(key: Key) -> bool:
        kind, index = key
        if kind == "again":
            return seen.replays[index] > 0
        if kind == "input":
            return any(seen.replays[i] for i in rows.inputs[index])
        return seen.choices[index] == (K if kind == "keep" else H)

    def total(terms: dict[Key, int]) -> int:
        return sum(size for key, size in terms.items() if holds(key))

    held = {g: total(terms) for g, terms in rows.held.items()}
    return [row.constant + total(row.terms) + sum(held[g] for g in row.held) for row in rows.rows]


def _program(problem: Problem, events: Iterable[int] = ()) -> Program:
    program = Program(problem, stages(problem))
    cut(program, list(events))
    return program


def _optimum(problem: Problem, events: Iterable[int] = ()) -> tuple[int, Simulation]:
    """The program's own optimum, and what the referee says of its answer."""
    program = _program(problem, events)
    outcome = run(program.close(), "highs", 10, 0.0)
    assert outcome.proven
    return program.cost_ns(outcome.bound), simulate(problem, program.choices(outcome))


def _small(random: Random, percent: int) -> Problem | None:
    step = network(random, random.randint(1, 3), random.randint(2, 6))
    if count(step.problem()) > 500:
        return None
    low, high = minimum(step.problem())[0], simulate(step.problem(), [K] * len(step.values)).peak
    return step.problem(low + (high - low) * percent // 100)


_EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@_EXAMPLES
@given(st.randoms(use_true_random=False))
def test_stages_never_count_more_than_the_referee(random: Random) -> None:
    problem = network(random, random.randint(1, 3), random.randint(2, 6)).problem()
    rows = stages(problem)
    for _ in range(5):
        choices = [random.choice([K, R, H]) for _ in problem.values]
        for v in timeline(problem).shared:
            choices[v] = K  # the program has no variable for what crosses regions
        seen = _purposeful(problem, choices)
        for row, level in zip(rows.rows, _levels(problem, rows, seen), strict=True):
            assert level <= max(seen.peaks[row.start : row.stop])


@_EXAMPLES
@given(st.randoms(use_true_random=False), st.integers(0, 90))
def test_the_stages_alone_prove_a_bound_for_the_step(random: Random, percent: int) -> None:
    problem = _small(random, percent)
    if problem is not None:
        assert _optimum(problem)[0] <= solve(problem, "exhaustive").cost_ns


@_EXAMPLES
@given(st.randoms(use_true_random=False), st.integers(0, 90))
def test_exact_rows_everywhere_leave_what_the_referee_allows(random: Random, percent: int) -> None:
    problem = _small(random, percent)
    if problem is None:
        return
    best = solve(problem, "exhaustive")
    bound, found = _optimum(problem, range(len(problem.events)))
    assert (bound, found.cost_ns) == (best.cost_ns, best.cost_ns)
    assert found.peak <= problem.budget


def test_stages_are_exact_where_all_is_kept() -> None:
    problem = chain(layers=5, size=10).problem()
    seen = simulate(problem, [K] * len(problem.values))
    assert max(_levels(problem, stages(problem), seen)) == seen.peak


def _pair() -> Step:
    """x (kept) -> t (100 bytes, unsaved) -> v (10 bytes, saved); then 80 bytes beside what is held."""
    step = Step()
    x = step.make(-1, 1)
    g = step.enter()
    t = step.make(g, 100, (x,), time=1)
    v = step.make(g, 10, (t,), time=1)
    h = step.save(v)
    step.die(t)
    step.die(v)
    step.event(Kind.EXIT, g)
    step.die(step.make(-1, 105))
    step.event(Kind.FORWARD_END)
    held = step.backward(20)
    step.event(Kind.UNPACK, h)
    step.event(Kind.HANDLE_DIE, h)
    step.event(Kind.DIE, held)
    step.event(Kind.BACKWARD_END)
    return step


def test_a_replay_that_passes_through_much_is_seen_only_by_exact_rows() -> None:
    # Making v again takes 1 + 20 + 100 + 10 = 131 bytes at its unpack; the forward took 1 + 100 + 10 = 111.
    # At 115 it is cheaper for the stages to drop v: 1 + 105 = 106 where keeping is 116. The referee says 131.
    problem = _pair().problem(115)
    unpack = next(at for at, event in enumerate(problem.events) if event.kind == Kind.UNPACK)
    bound, found = _optimum(problem)
    assert (bound, found.cost_ns, found.peak) == (2, 2, 131)
    assert run(_program(problem, [unpack]).close(), "highs", 10, 0.0).found is False
    assert _optimum(replace(problem, budget=131), [unpack])[0] == 0  # 116 bytes fit: all is kept


def test_what_is_made_for_two_is_paid_as_often_as_it_is_made() -> None:
    # u is not saved and 100 bytes big; v and w are made from it at different unpacks, so u is made twice:
    # 5 + 1 + 5 + 1 = 12. The stages count u once: 7.
    step = Step()
    g = step.enter()
    u = step.make(g, 100, time=5)
    handles = []
    for _ in range(2):
        v = step.make(g, 30, (u,), time=1)
        handles.append(step.save(v))
        step.die(v)
    step.die(u)
    step.event(Kind.EXIT, g)
    step.die(step.make(-1, 160))
    step.event(Kind.FORWARD_END)
    for h in handles:
        step.event(Kind.UNPACK, h)
        step.event(Kind.HANDLE_DIE, h)
    problem = step.problem(165)
    assert _optimum(problem)[0] == 7
    assert _optimum(problem, range(len(problem.events)))[0] == 12 == solve(problem, "exhaustive").cost_ns


@pytest.mark.parametrize("share", [0.15, 0.3, 0.5, 0.7])
def test_equal_layers_are_solved_to_a_hundredth(share: float) -> None:
    step = transformer(6)
    low = simulate(step.problem(), [R] * len(step.values)).peak
    high = simulate(step.problem(), [K] * len(step.values)).peak
    problem = step.problem(int(low + share * (high - low)))
    solution = solve(problem, "ilp", "highs", time_limit=60)
    assert (solution.status, solution.gap <= 0.01) == ("optimal", True)
    assert solution.bound_ns <= solve(problem, "greedy").cost_ns


def test_no_variable_is_left_for_what_no_replay_needs() -> None:
    problem = transformer(2).problem(60 << 20)
    program = _program(problem)
    values, operators = useful(problem)
    assert sum(kind == "keep" for kind, _ in program.at) == len(values)
    assert sum(kind == "again" for kind, _ in program.at) == len(operators)


@pytest.mark.parametrize("backend", ["cbc", "highs"])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.1])
def test_several_moments_of_several_regions(backend: str, share: float) -> None:
    # Near the smallest peak every layer's own replays are what counts, at more than one unpack each.
    step = transformer(3)
    low = minimum(step.problem())[0]
    high = simulate(step.problem(), [K] * len(step.values)).peak
    problem = step.problem(int(low + share * (high - low)))
    solution = solve(problem, "ilp", backend)
    assert solution.solver.startswith("ilp")
    assert solution.cost_ns <= solve(problem, "greedy").cost_ns
    assert simulate(problem, solution.choices).peak <= problem.budget


@pytest.mark.parametrize("share", [0.0, 0.03, 0.1, 0.2])
def test_exact_rows_make_no_value_before_a_replay_needs_it(share: float) -> None:
    # Making something early, at an unpack that leaves room, would get around a replay too big for a later one.
    step = transformer(2)
    low = minimum(step.problem())[0]
    high = simulate(step.problem(), [K] * len(step.values)).peak
    problem = step.problem(int(low + share * (high - low)))
    bound, found = _optimum(problem, range(len(problem.events)))
    assert found.peak <= problem.budget
    assert bound == found.cost_ns


def test_tied_regions_choose_alike() -> None:
    problem = transformer(3).problem(60 << 20)
    program = Program(problem, stages(problem), tied=True)
    cut(program, [len(problem.events) - 40])
    choices = program.choices(run(program.close(), "highs", 10, 0.0))
    layers = [[choices[v] for v in useful(problem)[0] if problem.values[v].region == g] for g in range(3)]
    assert layers[0] == layers[1] == layers[2]
    assert len(program.at) > len({id(variable) for variable in program.at.values()})
