"""The referee against steps worked out by hand; K, R, H below are KEEP, RECOMPUTE and FP16."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from budgetopt.solvers.choices import count
from budgetopt.solvers.memory import minimum, simulate
from budgetopt.solvers.problem import OUTSIDE, Choice, Kind

from .steps import Step, chain, network

K, R, H = Choice.KEEP, Choice.RECOMPUTE, Choice.FP16


def test_golden_list_freezes_what_each_event_means() -> None:
    step = Step(resident=1000)
    x = step.make(OUTSIDE, 100)  # 0 RUN   x +100                                   1100
    g = step.enter(record_ns=5)  # 1 ENTER
    a = step.make(g, 10, (x,), time=7, workspace=3)  # 2 RUN  a +10, 3 on top        1113
    h = step.save(a)  # 3 PACK: nothing for keep, nothing for recompute              1110
    b = step.make(g, 20, (a,))  # 4 RUN b +20                                       1130
    step.die(a)  # 5 DIE: a is held if kept, gone if not                             1130 / 1120
    step.event(Kind.EXIT, g)  # 6
    step.die(b)  # 7                                                                 1110 / 1100
    step.event(Kind.FORWARD_END)  # 8
    step.die(x)  # 9 DIE: held for the replay of a                                   1010 / 1100
    step.event(Kind.UNPACK, h)  # 10 replay: a +10, 3 on top                         1010 / 1113
    grad = step.backward(50, workspace=1)  # 11 RUN +50, 1 on top                    1061 / 1161
    step.event(Kind.HANDLE_DIE, h)  # 12 a freed, and x with it                      1050 / 1050
    step.event(Kind.DIE, grad)  # 13                                                 1000
    step.event(Kind.BACKWARD_END)  # 14
    problem = step.problem()
    kept = simulate(problem, [K, K, K])
    assert kept.peaks == (
        1100, 1100, 1113, 1110, 1130, 1130, 1130, 1110, 1110, 1010, 1010, 1061, 1050, 1000, 1000,
    )  # fmt: skip
    assert (kept.peak, kept.peak_event, kept.cost_ns) == (1130, 4, 0)
    dropped = simulate(problem, [K, R, R])
    assert dropped.peaks == (
        1100, 1100, 1113, 1110, 1130, 1120, 1120, 1100, 1100, 1100, 1113, 1161, 1050, 1000, 1000,
    )  # fmt: skip
    assert (dropped.peak, dropped.peak_event, dropped.cost_ns) == (1161, 11, 7 + 5)
    assert dropped.replays == (0, 1, 0, 0)


def test_keep_all_and_drop_all_of_a_chain() -> None:
    problem = chain(layers=4, size=10, time=3, record_ns=100).problem()
    # Keep: x and v1..v4 from the fourth run on; the backward adds two gradients before v4 goes: x, 4 v, 1 g;
    # then x, v1..v3, and the old and the new gradient: 60 each.
    assert simulate(problem, [K] * 5).peak == 10 + 40 + 10
    # Drop: the first unpack runs all four. v1..v4 all have waiting handles, so all stay: the same 60.
    dropped = simulate(problem, [K, R, R, R, R])
    assert dropped.peak == 60
    assert dropped.cost_ns == 4 * 3 + 100
    assert dropped.replays[:5] == (0, 1, 1, 1, 1)


def test_a_made_value_without_handles_goes_after_its_last_reader() -> None:
    step = Step()
    x = step.make(OUTSIDE, 1)
    g = step.enter()
    a = step.make(g, 100, (x,), time=2)
    b = step.make(g, 10, (a,), time=3)
    step.die(a)
    h = step.save(b)
    step.die(b)
    step.event(Kind.EXIT, g)
    step.event(Kind.FORWARD_END)
    step.event(Kind.UNPACK, h)
    step.event(Kind.HANDLE_DIE, h)
    problem = step.problem()
    dropped = simulate(problem, [K, R, R])
    # x, then a and b together in the forward and again in the replay; b alone after it; x stays for the replay.
    assert dropped.peaks == (1, 1, 101, 111, 11, 11, 1, 1, 1, 111, 1)
    assert dropped.cost_ns == 5
    # a kept although nobody saved it: held for b's replay, until b's handle dies.
    held = simulate(problem, [K, K, R])
    assert held.peaks == (1, 1, 101, 111, 111, 111, 101, 101, 101, 111, 1)
    assert held.cost_ns == 3
    # a kept and b kept: nobody would ever read a, so it is not held.
    assert simulate(problem, [K, K, K]).peaks == (1, 1, 101, 111, 11, 11, 11, 11, 11, 11, 1)


@pytest.mark.parametrize("seed", range(8))
def test_the_minimum_with_fp16_is_never_above_the_exact_one(seed: int) -> None:
    problem = network(Random(seed), 3, 20).problem()
    assert count(problem) > 1000  # not all are tried
    exact = replace(problem, values=tuple(replace(value, half_bytes=0) for value in problem.values))
    peak, choices = minimum(problem)
    assert peak <= minimum(exact)[0]
    assert simulate(problem, choices).peak == peak
