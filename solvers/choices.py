"""Every choice of a small problem, for those who try them all."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

from .problem import Choice, Problem
from .timeline import timeline, useful


def count(problem: Problem) -> int:
    """How many choices :func:`every` yields."""
    return prod(len(_options(problem, v)) for v in useful(problem)[0])


def every(problem: Problem) -> Iterator[list[Choice]]:
    """Every choice that differs in what the executor does; the values that cannot matter are recomputed."""
    values = useful(problem)[0]
    for picked in product(*(_options(problem, v) for v in values)):
        choices = [Choice.RECOMPUTE] * len(problem.values)
        for v, choice in zip(values, picked, strict=True):
            choices[v] = choice
        yield choices


def _options(problem: Problem, v: int) -> tuple[Choice, ...]:
    if v in timeline(problem).coded:
        return Choice.KEEP, Choice.FP16
    halves = problem.values[v].half_bytes and timeline(problem).saved[v]
    return (Choice.KEEP, Choice.RECOMPUTE, Choice.FP16) if halves else (Choice.KEEP, Choice.RECOMPUTE)
