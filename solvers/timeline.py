"""What a recorded step says before anything is decided: who is alive when, and what may be decided.

Everything here depends on the events and the values alone, not on the budget or on a choice, so it is
worked out once per recording and shared by the hundreds of choices that a solver tries.
"""

from __future__ import annotations

from dataclasses import dataclass

from .problem import OUTSIDE, Kind, Problem
from .windows import Window, cut, packers


@dataclass(frozen=True, slots=True)
class Timeline:
    """A recording, indexed. Positions are event indices; the length of the list stands for "never".

    Attributes:
        deltas: bytes that each event adds if nothing is held for a backward pass.
        tops: workspace of each event, on top of the bytes after it.
        run_at: position of each operator's run. born_at, die_at: of each storage (born_at: "never" for
            a storage that is part of ``resident``, whose death then frees nothing either).
        saved: whether each value has a handle. packed_at: its first pack. released_at: the death of
            its last handle (-1 without handles).
        reads: what each operator reads, once each. inner: those of them made by its own region.
        makers: operators with a region that write values, in reverse order.
        handle_events: (position, kind, value) of every pack, unpack and handle death.
        reach: the last region that uses each value. crossing: kept values that a segment may store late.
        shared: those of them that may be in fp16. left_at: the end of each region's forward.
        kept: values that every choice keeps, but for shared ones. coded: values that are kept or stored in fp16, but
            never made again. decided: values that may be chosen, in order.
    """

    deltas: tuple[int, ...]
    tops: tuple[int, ...]
    run_at: tuple[int, ...]
    born_at: tuple[int, ...]
    die_at: tuple[int, ...]
    saved: tuple[bool, ...]
    packed_at: tuple[int, ...]
    released_at: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    inner: tuple[tuple[int, ...], ...]
    makers: tuple[int, ...]
    handle_events: tuple[tuple[int, Kind, int], ...]
    reach: tuple[int, ...]
    crossing: frozenset[int]
    shared: frozenset[int]
    left_at: tuple[int, ...]
    kept: frozenset[int]
    coded: frozenset[int]
    decided: tuple[int, ...]
    windows: tuple[Window, ...]


_CACHE: list[tuple[tuple[object, ...], Timeline]] = []
_CACHE_SIZE = 64


def timeline(problem: Problem) -> Timeline:
    """The index of a problem's recording, from a small cache.

    The key is the identity of the parts: hashing 30,000 events would cost more than a simulation, and
    problems that differ only in budget share their parts. The cache holds the parts, so that no other
    object can take their identity.
    """
    parts = (problem.storages, problem.values, problem.operators, problem.handles, problem.events)
    for at in range(len(_CACHE) - 1, -1, -1):  # the latest last: it is the one most often asked for
        known, line = _CACHE[at]
        if all(a is b for a, b in zip(known, parts, strict=True)):
            _CACHE.append(_CACHE.pop(at))
            return line
    line = _index(problem)
    _CACHE.append((parts, line))
    del _CACHE[:-_CACHE_SIZE]
    return line


def useful(problem: Problem) -> tuple[list[int], list[int]]:
    """Decided values that may matter, and the operators that replays may run; both in order.

    The ancestors of saved decided values, up to what is always kept.
    """
    line = timeline(problem)
    decided = set(line.decided)
    values: set[int] = set()
    operators: set[int] = set()
    waiting = [v for v, saved in enumerate(line.saved) if saved and v not in line.kept]
    while waiting:
        v = waiting.pop()
        if v in values:
            continue
        values.add(v)
        if v in line.coded:
            continue
        i = problem.values[v].operator
        operators.add(i)
        waiting += [u for u in line.inner[i] if u not in line.kept]
    return sorted(values & decided), sorted(operators)


def _index(problem: Problem) -> Timeline:
    reads = tuple(tuple(dict.fromkeys(operator.reads)) for operator in problem.operators)
    inner = tuple(
        tuple(v for v in read if operator.region != OUTSIDE and problem.values[v].region == operator.region)
        for operator, read in zip(problem.operators, reads, strict=True)
    )
    run_at, born_at, die_at = _lives(problem)
    deltas, tops = _bare_levels(problem, born_at, die_at)
    saved, packed_at, released_at = _handles(problem)
    coded = _coded(problem, inner, saved)
    kept, crossing = _kept(problem)
    kept -= coded
    free = (v for v, value in enumerate(problem.values) if value.last and v not in kept)
    makers = (i for i, operator in enumerate(problem.operators) if operator.region != OUTSIDE and operator.writes)
    return Timeline(
        deltas=deltas,
        tops=tops,
        run_at=run_at,
        born_at=born_at,
        die_at=die_at,
        saved=saved,
        packed_at=packed_at,
        released_at=released_at,
        reads=reads,
        inner=inner,
        makers=tuple(reversed(tuple(makers))),
        handle_events=_handle_events(problem),
        reach=_reach(problem),
        crossing=crossing,
        shared=frozenset(v for v in crossing if problem.values[v].half_bytes),
        left_at=_left_at(problem),
        kept=kept,
        coded=coded,
        decided=tuple(free),
        windows=cut(problem),
    )


def _lives(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    never = len(problem.events)
    run_at = [never] * len(problem.operators)
    born_at = [never] * len(problem.storages)
    die_at = [never] * len(problem.storages)
    for at, (kind, index) in enumerate(problem.events):
        if kind == Kind.RUN:
            run_at[index] = at
            for storage in problem.operators[index].births:
                born_at[storage] = at
        elif kind == Kind.DIE:
            die_at[index] = at
    return tuple(run_at), tuple(born_at), tuple(die_at)


def _bare_levels(
    problem: Problem, born_at: tuple[int, ...], die_at: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    never = len(problem.events)
    deltas, tops = [0] * never, [0] * never
    for size, born, die in zip(problem.storages, born_at, die_at, strict=True):
        if born < never:
            deltas[born] += size
            if die < never:
                deltas[die] -= size
    for at, (kind, index) in enumerate(problem.events):
        if kind == Kind.RUN:
            tops[at] = problem.operators[index].workspace
    return tuple(deltas), tuple(tops)


def _handle_events(problem: Problem) -> tuple[tuple[int, Kind, int], ...]:
    kinds = (Kind.PACK, Kind.UNPACK, Kind.HANDLE_DIE)
    return tuple((at, kind, problem.handles[index]) for at, (kind, index) in enumerate(problem.events) if kind in kinds)


def _handles(problem: Problem) -> tuple[tuple[bool, ...], tuple[int, ...], tuple[int, ...]]:
    never = len(problem.events)
    ends = [never] * len(problem.handles)
    packed_at = [never] * len(problem.values)
    for at, (kind, index) in enumerate(problem.events):
        if kind == Kind.HANDLE_DIE:
            ends[index] = at
        elif kind == Kind.PACK:
            packed_at[problem.handles[index]] = min(at, packed_at[problem.handles[index]])
    released_at = [-1] * len(problem.values)
    for value, end in zip(problem.handles, ends, strict=True):
        released_at[value] = max(released_at[value], end)
    return tuple(end >= 0 for end in released_at), tuple(packed_at), tuple(released_at)


def _reach(problem: Problem) -> tuple[int, ...]:
    """The last region that makes, reads or saves each value."""
    reach = [value.region for value in problem.values]
    for operator in problem.operators:
        if operator.region != OUTSIDE:
            for v in operator.reads:
                reach[v] = max(reach[v], operator.region)
    for handle, region in packers(problem).items():
        v = problem.handles[handle]
        reach[v] = max(reach[v], region)
    return tuple(reach)


def _left_at(problem: Problem) -> tuple[int, ...]:
    never = len(problem.events)
    left_at = [never] * len(problem.regions)
    for at, (kind, index) in enumerate(problem.events):
        if kind == Kind.EXIT:
            left_at[index] = at
    return tuple(left_at)


def _kept(problem: Problem) -> tuple[frozenset[int], frozenset[int]]:
    """What every choice keeps, and of that what a segment may store late, in the order in which values are made.

    An earlier version of a storage cannot be held, so an operator that reads one that cannot be made
    again is itself not replayable, and what it writes is kept in turn (as far as that is a last version).
    """
    kept: set[int] = set()
    crossing: set[int] = set()
    values = problem.values
    for v, value in enumerate(values):
        if value.operator == OUTSIDE or value.region == OUTSIDE:
            kept.add(v)
            continue
        operator = problem.operators[value.operator]
        # A version that is not the last is readable later only where the reader's own region makes it again.
        lost = any(not values[u].last and (u in kept or values[u].region != operator.region) for u in operator.reads)
        if lost or not operator.replayable or not value.droppable:
            kept.add(v)
            if value.crossing and value.last and operator.replayable and not lost:
                crossing.add(v)
    return frozenset(kept), frozenset(crossing)


def _coded(problem: Problem, inner: tuple[tuple[int, ...], ...], saved: tuple[bool, ...]) -> frozenset[int]:
    """Saved values that cannot be made again, but that no replay reads either: fp16 alone is open to them."""
    pairs = zip(problem.operators, inner, strict=True)
    read = {v for operator, reads in pairs if operator.replayable for v in reads}
    return frozenset(
        v
        for v, value in enumerate(problem.values)
        if saved[v] and value.half_bytes and value.last and value.droppable and v not in read
        if OUTSIDE not in (value.region, value.operator) and not problem.operators[value.operator].replayable
    )


def first_unpacks(problem: Problem) -> tuple[list[int], list[int]]:
    """Of each value: the first unpack that asks for it, and the first whose replay may make or read it."""
    line = timeline(problem)
    asked = [len(line.deltas)] * len(line.saved)
    for at, kind, v in line.handle_events:
        if kind == Kind.UNPACK:
            asked[v] = min(asked[v], at)
    first = list(asked)
    for i in line.makers:
        writes = [w for w in problem.operators[i].writes if w not in line.kept]
        at = min((first[w] for w in writes), default=len(line.deltas))
        for v in (*writes, *line.inner[i]):
            first[v] = min(first[v], at)
    return asked, first
