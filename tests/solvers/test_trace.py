"""Block by block is the same step as in sums: the trace against the referee, at every event."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from budgetopt.solvers import OUTSIDE, Choice, Kind, Problem, Segment, simulate
from budgetopt.solvers.memory import CODEC_WORKSPACE
from budgetopt.solvers.trace import Action, trace

from .steps import Step, chain, network, rows, transformer

K, R, H = Choice.KEEP, Choice.RECOMPUTE, Choice.FP16


def peaks(problem: Problem, actions: tuple[Action, ...]) -> list[int]:
    """Of each event: the highest level after a block was taken, and the level at its end."""
    found = []
    level, rest = problem.resident, groupby(actions, key=lambda action: action.event)
    event, group = next(rest, (OUTSIDE, iter(())))
    for at in range(len(problem.events)):
        top = 0
        if at == event:
            for _, _, size in group:
                level += size
                top = max(top, level) if size > 0 else top
            event, group = next(rest, (OUTSIDE, iter(())))
        found.append(max(level, top))
    return found


def check(problem: Problem, choices: list[Choice], segments: Sequence[Segment] = ()) -> None:
    actions = trace(problem, choices, segments=segments)
    assert list(simulate(problem, choices, segments).peaks) == peaks(problem, actions)
    taken: dict[int, int] = {}
    for _, block, size in actions:  # what goes back was taken, once, and is as large as it was
        if size > 0:
            assert block not in taken
            taken[block] = size
        else:
            assert taken.pop(block) == -size


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_the_trace_adds_up_to_the_referees_peaks(random: Random) -> None:
    problem = network(random, random.randint(1, 3), random.randint(1, 10)).problem()
    for _ in range(4):
        check(problem, [random.choice([K, R, H]) for _ in problem.values])


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_passes_of_segments_block_by_block(random: Random) -> None:
    problem = network(random, random.randint(2, 6), random.randint(1, 6)).problem()
    for _ in range(4):
        check(problem, [random.choice([K, K, R]) for _ in problem.values], rows(random, len(problem.regions)))


@pytest.mark.parametrize("halves", [False, True])
def test_layers_of_a_transformer(halves: bool) -> None:
    problem = transformer(3, halves=halves).problem()
    rng = Random(1)
    for choices in ([K], [R], [H], [K, R, H]):
        check(problem, [rng.choice(choices) for _ in problem.values])


def test_a_replay_block_by_block() -> None:
    """One value of ten bytes is dropped and made again, with three bytes of workspace; its input is held for that."""
    step = Step(resident=1000)
    x = step.make(OUTSIDE, 100)  # 0 RUN
    g = step.enter()  # 1
    a = step.make(g, 10, (x,), workspace=3, rng=7)  # 2 RUN
    h = step.save(a)  # 3 PACK
    step.event(Kind.EXIT, g)  # 4
    step.die(a)  # 5
    step.die(x)  # 6
    step.event(Kind.FORWARD_END)  # 7
    step.event(Kind.UNPACK, h)  # 8
    step.event(Kind.HANDLE_DIE, h)  # 9
    actions = trace(step.problem(), [K, R])
    assert [(event, size) for event, _, size in actions] == [
        (0, 100),
        (2, 10), (2, 7), (2, 3), (2, -3),
        (5, -10),
        (8, 10), (8, 3), (8, -3),
        (9, -100), (9, -7), (9, -10),
    ]  # fmt: skip
    kept = trace(step.problem(), [K, K])
    assert [(event, size) for event, _, size in kept] == [(0, 100), (2, 10), (2, 3), (2, -3), (6, -100), (9, -10)]


def test_a_half_copy_block_by_block() -> None:
    size = 2 * CODEC_WORKSPACE
    problem = chain(layers=1, size=size, half=size // 2).problem()
    # x, v | its half copy and what storing takes | v goes | decoded, the gradient | both copies go | x
    sizes = [size, size, size // 2, CODEC_WORKSPACE, -CODEC_WORKSPACE, -size, size, size, -size // 2, -size, -size]
    assert [action.size for action in trace(problem, [K, H])] == sizes


def test_a_write_in_place_goes_on_in_the_same_block() -> None:
    step = Step()
    x = step.make(OUTSIDE, 1)
    g = step.enter()
    a = step.make(g, 10, (x,))
    b = step.overwrite(a)
    h = step.save(b)
    step.event(Kind.EXIT, g)
    step.die(b)
    step.event(Kind.FORWARD_END)
    step.event(Kind.UNPACK, h)
    step.event(Kind.HANDLE_DIE, h)
    actions = trace(step.problem(), [K, R, R])
    assert [action.size for action in actions] == [1, 10, -10, 10, -10]


def test_workspace_in_pieces() -> None:
    problem = chain(layers=1, size=10).problem()
    plain, split = trace(problem, [K, K]), trace(problem, [K, K], {0: (4, 5)})
    assert [action.size for action in split[:5]] == [10, 4, 5, -5, -4]
    assert [action.size for action in split[5:]] == [action.size for action in plain[1:]]
