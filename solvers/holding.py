"""Until when the executor holds what: kept storages, generator states, half copies.

The rules are the executor's (DESIGN §4), so a change here is a change there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .problem import OUTSIDE, Choice, Problem
from .replay import let_go
from .segments import NONE, Late
from .timeline import Timeline


def hold(
    problem: Problem,
    line: Timeline,
    chosen: Sequence[Choice],
    deltas: list[int],
    stored: Late = NONE,
    passing: dict[float, int] | None = None,
) -> Held:
    """Book kept storages and generator states beyond the user's own use of them, in ``deltas``.

    Args:
        passing: filled with bytes that are let go when a segment's pass ends, by the time of the pass.
    """
    passing = {} if passing is None else passing
    held = holds(problem, line, chosen, stored)
    for i, end in held.states:
        book(deltas, problem.operators[i].rng_bytes, line.run_at[i], end, passing)
    for storage, end in held.until.items():
        if line.born_at[storage] < len(deltas) and end > line.die_at[storage]:
            book(deltas, problem.storages[storage], line.die_at[storage], end, passing)
    return held


class Held(NamedTuple):
    """Until when (events) the executor holds what.

    Attributes:
        until: storages, by number. states: generator states, as (operator, end). wanted: until when each value that is
            not kept, or kept late, may still be asked for; -1 where no replay can want it. halves: half copies of
            values that cross regions.
    """

    until: dict[int, float]
    states: list[tuple[int, float]]
    wanted: list[float]
    halves: dict[int, float]


def holds(problem: Problem, line: Timeline, chosen: Sequence[Choice], stored: Late = NONE) -> Held:
    """What the executor holds, and until when.

    One pass against the order of the forward: an operator may be replayed for as long as something that
    it makes, and that is not kept, may still be asked for; and what is stored late, until it is stored.
    """
    keep, level = Choice.KEEP, stored.level
    wanted: list[float] = [
        at if choice == Choice.RECOMPUTE else -1 for at, choice in zip(line.released_at, chosen, strict=True)
    ]
    until: dict[int, float] = {}
    states: list[tuple[int, float]] = []
    halves: dict[int, float] = {
        v: max(line.released_at[v], line.die_at[problem.values[v].storage])
        for v in line.shared
        if chosen[v] == Choice.FP16
    }
    for v in level:
        wanted[v] = line.released_at[v]
    for v, choice in enumerate(chosen):
        if choice == keep and line.saved[v] and v not in level:
            _extend(until, problem.values[v].storage, line.released_at[v])
    for i in line.makers:
        operator = problem.operators[i]
        end = max(wanted[w] if chosen[w] != keep else -1 for w in operator.writes)
        if level:
            storing = (min(wanted[w], stored.begins[level[w]]) for w in operator.writes if w in level)
            end = max(end, max(storing, default=-1))
        if end < 0:
            continue
        if operator.rng_bytes:
            states.append((i, end))
        for u in line.reads[i]:
            if u in level or (chosen[u] != keep and problem.values[u].region == operator.region):
                wanted[u] = max(wanted[u], end)
            elif u in halves:
                _extend(halves, u, end)
            else:
                _extend(until, problem.values[u].storage, end)
    return Held(until, states, wanted, halves)


def _extend(until: dict[int, float], storage: int, end: float) -> None:
    until[storage] = max(end, until.get(storage, -1))


def book(deltas: list[int], size: int, start: int, stop: float, passing: dict[float, int]) -> None:
    """``size`` more bytes from event ``start`` until ``stop``, an event or a pass; what is past the end is never."""
    if size and start < stop:
        deltas[start] += size
        let_go(deltas, passing, stop, size)


def half_lives(
    problem: Problem, line: Timeline, chosen: Sequence[Choice], halves: Mapping[int, float]
) -> Iterator[tuple[int, int, float]]:
    """Values in fp16, each with the event that stores it and the one that lets its half copy go."""
    for v, choice in enumerate(chosen):
        start: int = line.packed_at[v]
        if v in halves:
            start = min(start, line.left_at[problem.values[v].region])
        end = halves.get(v, line.released_at[v])
        if choice == Choice.FP16 and start < min(end, len(problem.events)):
            yield v, start, end


def users(problem: Problem, line: Timeline, chosen: Sequence[Choice]) -> set[int]:
    """Regions that make or read what crosses regions in fp16."""
    halves = {v for v in line.shared if chosen[v] == Choice.FP16}
    readers = (o.region for o, reads in zip(problem.operators, line.reads, strict=True) if halves.intersection(reads))
    return {*(readers if halves else ()), *(problem.values[v].region for v in halves)} - {OUTSIDE}
