"""Whether a problem makes sense: what the solvers take for granted of a recorded step, checked one by one.

A recorder cannot break these rules, but a file that was edited, cut or made by another program can, and a solver
that follows a wrong index answers nonsense, or dies far from the cause.
"""

from __future__ import annotations

from collections.abc import Iterator

from .problem import OUTSIDE, Kind, Problem

MOST = 1 << 53
"""All bytes of a problem add up to less than this, and so do its nanoseconds: solvers reckon in 64 bits, and every
reader of JSON knows such numbers exactly."""

_COUNTED = {
    Kind.RUN: "operators",
    Kind.DIE: "storages",
    Kind.PACK: "handles",
    Kind.HANDLE_DIE: "handles",
    Kind.UNPACK: "handles",
    Kind.ENTER: "regions",
    Kind.EXIT: "regions",
}


def faults(problem: Problem) -> Iterator[str]:
    """What is wrong, each with its place; only the first is sure to make sense."""
    yield from _indices(problem)
    yield from _amounts(problem)
    yield from _values(problem)
    yield from _operators(problem)
    yield from _lives(problem)
    yield from _visits(problem)


def _indices(problem: Problem) -> Iterator[str]:
    """Every index is that of something, or OUTSIDE where that is allowed."""
    values, operators, regions = len(problem.values), len(problem.operators), len(problem.regions)
    for v, value in enumerate(problem.values):
        yield from _index(f"values.storage[{v}]", value.storage, "storages", len(problem.storages))
        yield from _index(f"values.region[{v}]", value.region, "regions", regions, OUTSIDE)
        yield from _index(f"values.operator[{v}]", value.operator, "operators", operators, OUTSIDE)
        yield from _index(f"values.previous[{v}]", value.previous, "values", values, OUTSIDE)
    for i, operator in enumerate(problem.operators):
        yield from _index(f"operators.region[{i}]", operator.region, "regions", regions, OUTSIDE)
        for storage in operator.births:
            yield from _index(f"operators.births[{i}]", storage, "storages", len(problem.storages))
        for v in operator.reads:
            yield from _index(f"operators.reads[{i}]", v, "values", values)
        for v in operator.writes:
            yield from _index(f"operators.writes[{i}]", v, "values", values)
    for h, v in enumerate(problem.handles):
        yield from _index(f"handles[{h}]", v, "values", values)
    counts = {name: len(getattr(problem, name)) for name in _COUNTED.values()}
    for at, (kind, index) in enumerate(problem.events):
        if kind in _COUNTED:
            yield from _index(f"events.index[{at}]", index, _COUNTED[kind], counts[_COUNTED[kind]])


def _index(place: str, index: int, name: str, count: int, least: int = 0) -> Iterator[str]:
    if not least <= index < count:
        yield f"{place}: {index} is none of the {count} {name}"


def _amounts(problem: Problem) -> Iterator[str]:
    """The sums are small enough to reckon with."""
    sizes = problem.resident + sum(problem.storages) + sum(value.half_bytes for value in problem.values)
    sizes += sum(operator.workspace + operator.rng_bytes for operator in problem.operators)
    times = problem.step_ns + sum(value.codec_ns for value in problem.values)
    times += sum(operator.time_ns for operator in problem.operators) + sum(r.record_ns for r in problem.regions)
    for name, total in (("bytes", sizes), ("nanoseconds", times)):
        if total >= MOST:
            yield f"all {name} together: {total} is {MOST} or more"


def _values(problem: Problem) -> Iterator[str]:
    """A value is one version of one storage, written by one operator."""
    for v, value in enumerate(problem.values):
        if value.operator == OUTSIDE:
            if value.region != OUTSIDE:
                yield f"values.region[{v}]: no operator makes the value, so no region does"
        elif v not in problem.operators[value.operator].writes:
            yield f"values.operator[{v}]: operator {value.operator} does not write value {v}"
        elif value.region != problem.operators[value.operator].region:
            yield f"values.region[{v}]: operator {value.operator}, which makes it, runs in another region"
        if value.previous != OUTSIDE:
            yield from _overwrites(problem, v)


def _overwrites(problem: Problem, v: int) -> Iterator[str]:
    value, before = problem.values[v], problem.values[problem.values[v].previous]
    if value.previous >= v or before.storage != value.storage or before.last:
        yield f"values.previous[{v}]: value {value.previous} is no earlier version of storage {value.storage}"


def _operators(problem: Problem) -> Iterator[str]:
    """An operator reads what is there already, and writes values of its own; a storage is born once."""
    born: set[int] = set()
    for i, operator in enumerate(problem.operators):
        for v in operator.reads:
            if problem.values[v].operator >= i:
                yield f"operators.reads[{i}]: value {v} is not made before operator {i}"
        for v in operator.writes:
            if problem.values[v].operator != i:
                yield f"operators.writes[{i}]: value {v} is not made by operator {i}"
        if len(set(operator.writes)) < len(operator.writes):
            yield f"operators.writes[{i}]: a value is named twice"
        for storage in operator.births:
            if storage in born:
                yield f"operators.births[{i}]: storage {storage} is born twice"
            born.add(storage)


_NEEDS = {Kind.HANDLE_DIE: Kind.PACK, Kind.UNPACK: Kind.PACK, Kind.EXIT: Kind.ENTER}
_ENDS = (Kind.FORWARD_END, Kind.BACKWARD_END)


def _lives(problem: Problem) -> Iterator[str]:
    """Everything happens once (but a handle is asked for as often as one likes), and after what it needs."""
    seen: dict[Kind, set[int]] = {kind: set() for kind in Kind}
    for at, (kind, index) in enumerate(problem.events):
        what = 0 if kind in _ENDS else index
        if kind != Kind.UNPACK and what in seen[kind]:
            yield f"events[{at}]: a second {kind.name} of {index}"
        if kind in _NEEDS and index not in seen[_NEEDS[kind]]:
            yield f"events[{at}]: {kind.name} of {index} before its {_NEEDS[kind].name}"
        if kind == Kind.UNPACK and index in seen[Kind.HANDLE_DIE]:
            yield f"events[{at}]: UNPACK of handle {index}, which has died"
        if kind == Kind.RUN and not seen[Kind.DIE].isdisjoint(problem.operators[index].births):
            yield f"events[{at}]: RUN of operator {index}, but a storage that it makes has died"
        seen[kind].add(what)


def _visits(problem: Problem) -> Iterator[str]:
    """Operators run in their order, and regions are entered one after the other."""
    last, inside = OUTSIDE, OUTSIDE
    for at, (kind, index) in enumerate(problem.events):
        if kind == Kind.RUN:
            if index < last:
                yield f"events[{at}]: RUN of operator {index} after operator {last}"
            last = index
        elif kind == Kind.ENTER:
            if inside != OUTSIDE:
                yield f"events[{at}]: ENTER of region {index} inside region {inside}"
            inside = index
        elif kind == Kind.EXIT:
            if inside != index:
                yield f"events[{at}]: EXIT of region {index}, which is not the one that was entered last"
            inside = OUTSIDE
