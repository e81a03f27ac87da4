"""Regions as problems of their own: what one region's choice does to the step, whatever the others choose.

At every event the bytes of a step are those that no choice changes plus what each region's choice adds, so a
region can be judged alone: in its *forward window*, where its operators run; in its *backward window*, from
the first to the last event of a handle that is not kept in any case; and by what it holds between the two.
Regions whose windows look the same, byte for byte and nanosecond for nanosecond, are one *kind*.

A storage that replays of several regions read, and that is held for nothing else, counts for each of them with
an equal share of its bytes: all together never count more than the referee, and as much where all hold it. The
referee, who sees the whole step, has the last word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from .problem import OUTSIDE, Event, Kind, Operator, Problem, Region, Value
from .stages import inputs
from .timeline import timeline, useful
from .windows import forward_spans

NO_LIMIT = 1 << 62
"""Budget of a part: its bytes are weighed by whoever puts parts together."""


_HANDLES = (Kind.PACK, Kind.UNPACK, Kind.HANDLE_DIE)


class Span(NamedTuple):
    """Events from ``start`` up to ``stop``."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Part:
    """One region with something to decide.

    Attributes:
        region: its number. forward, backward: its windows in the whole step.
        alone: the region as a problem of its own, with one region and nothing resident; equal for one kind.
        inner_forward, inner_backward: the same windows in ``alone``; right before the second one is the
            event FORWARD_END, at which what is held between the passes can be read.
        values: the value of the whole problem for each value of ``alone``.
    """

    region: int
    forward: Span
    backward: Span
    alone: Problem
    inner_forward: Span
    inner_backward: Span
    values: tuple[int, ...]


def parts(problem: Problem) -> list[Part] | None:
    """Every region that has something to decide, in the order of their forward windows.

    None if one of them has no two windows, the forward one first: there, regions can't be judged alone.
    """
    index = _Index(problem)
    found = [_Builder(index, g).part() for g in index.backward]
    known = [part for part in found if part is not None]
    return sorted(known, key=lambda part: part.forward) if len(known) == len(found) else None


class _Index:
    """What every builder looks up; worked out once."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.line = problem, timeline(problem)
        self.own: dict[int, list[int]] = {}
        for v, value in enumerate(problem.values):
            self.own.setdefault(value.region, []).append(v)
        self.holders: dict[int, list[int]] = {}  # of a storage: the values whose handles hold it in any case
        for v in sorted(self.line.kept):
            if self.line.saved[v]:
                self.holders.setdefault(problem.values[v].storage, []).append(v)
        self.handles: dict[int, list[tuple[int, Event]]] = {}  # of a value: its events and where they are
        for at, _, v in self.line.handle_events:
            self.handles.setdefault(v, []).append((at, problem.events[at]))
        self.forward = {w.region: Span(w.start, w.stop) for w in forward_spans(problem)}
        regions = {problem.values[v].region for v in useful(problem)[0]} - {OUTSIDE}
        self.backward = {g: self._backward(g) for g in sorted(regions)}
        self.shared = sharing(problem, {g: span.stop for g, span in self.backward.items() if span is not None})

    def _backward(self, region: int) -> Span | None:
        """Where handles of values that may be dropped or stored in fp16 are asked for and die."""
        own = (v for v in self.own[region] if v not in self.line.kept and self.line.saved[v])
        events = [at for v in own for at, event in self.handles[v] if event.kind != Kind.PACK]
        return Span(min(events), max(events) + 1) if events else None


def sharing(problem: Problem, until: Mapping[int, int]) -> dict[int, frozenset[int]]:
    """Storages that replays of several regions may hold beyond everything else, and those regions.

    Args:
        until: event after which each region replays nothing.
    """
    ends = fixed_ends(problem)
    found = {}
    for storage, readers in inputs(problem).items():
        regions = {problem.operators[i].region for i in readers}
        beyond = frozenset(g for g in regions if until.get(g, 0) > ends[storage])
        if len(beyond) > 1:
            found[storage] = beyond
    return found


def share(problem: Problem, storage: int, region: int, shared: Mapping[int, frozenset[int]]) -> int:
    """Bytes of a storage that count for one region."""
    holders = shared.get(storage, frozenset())
    return problem.storages[storage] // (len(holders) if region in holders else 1)


def fixed_ends(problem: Problem) -> list[int]:
    """Until when each storage is there whatever is chosen: for the user's code, or for handles that are kept."""
    line = timeline(problem)
    ends = list(line.die_at)
    for v in line.kept:
        storage = problem.values[v].storage
        ends[storage] = max(ends[storage], line.released_at[v])
    return ends


class _Builder:
    """Cuts one region out of the step. Numbers are given in the order in which things appear in the windows."""

    def __init__(self, index: _Index, region: int) -> None:
        self._index, self._region = index, region
        self._problem, self._line = index.problem, index.line
        self._values: dict[int, int] = {}
        self._storages: dict[int, int] = {}
        self._operators: list[Operator] = []
        self._made: dict[int, int] = {}  # of a value: who makes it
        self._handles: dict[int, tuple[int, int]] = {}  # of a handle: its own number, and its value's
        self._events: list[Event] = []

    def part(self) -> Part | None:
        backward, forward = self._index.backward[self._region], self._index.forward.get(self._region)
        if backward is None or forward is None or forward.stop > backward.start:
            return None
        self._forward, self._back = forward, backward
        self._number()
        self._before()
        inner_forward = self._window(forward)
        self._between()
        inner_backward = self._window(backward)
        self._events.append(Event(Kind.BACKWARD_END, 0))
        region = self._problem.regions[self._region]
        alone = Problem(
            budget=NO_LIMIT,
            resident=0,
            storages=tuple(share(self._problem, s, self._region, self._index.shared) for s in self._storages),
            values=tuple(self._value(v) for v in self._values),
            operators=tuple(self._operators),
            handles=tuple(v for _, v in self._handles.values()),
            regions=(Region(region.record_ns),),
            events=tuple(self._events),
        )
        return Part(self._region, forward, backward, alone, inner_forward, inner_backward, tuple(self._values))

    # Numbers

    def _number(self) -> None:
        """Everything that appears in the windows, in that order; then what holds the storages found."""
        own = {v for v in self._index.own[self._region]}
        for at in (*range(*self._forward), *range(*self._back)):
            kind, index = self._problem.events[at]
            if kind == Kind.RUN:
                self._number_operator(self._problem.operators[index])
            elif kind == Kind.DIE:
                self._storage(index)
            elif kind != Kind.ENTER and kind != Kind.EXIT and kind < Kind.FORWARD_END:
                v = self._problem.handles[index]
                if v in own or (v in self._line.kept and self._line.released_at[v] == at):
                    self._add(v)
        for storage in tuple(self._storages):
            for v in self._index.holders.get(storage, ()):
                self._add(v)

    def _number_operator(self, operator: Operator) -> None:
        if operator.region == self._region:
            for v in (*operator.reads, *operator.writes):
                self._add(v)
        for storage in operator.births:
            self._storage(storage)

    def _add(self, v: int) -> None:
        self._values.setdefault(v, len(self._values))
        self._storage(self._problem.values[v].storage)

    def _storage(self, storage: int) -> int:
        return self._storages.setdefault(storage, len(self._storages))

    # Events

    def _before(self) -> None:
        """What is there when the forward window begins."""
        self._outside(Span(0, self._forward.start))

    def _between(self) -> None:
        """What changes between the windows. Nobody looks at the order in there."""
        self._outside(Span(self._forward.stop, self._back.start))
        self._events.append(Event(Kind.FORWARD_END, 0))

    def _outside(self, span: Span) -> None:
        """Births, packs, deaths and releases, each kind together, so that equal regions look equal."""
        line, inside = self._line, range(*span)
        births = tuple(mine for s, mine in self._storages.items() if line.born_at[s] in inside)
        if births:
            self._run(Operator(births=births))
        events = [event for v in self._values for at, event in self._index.handles.get(v, ()) if at in inside]
        self._events += [self._handle(event) for event in events if event.kind == Kind.PACK]
        self._events += [Event(Kind.DIE, mine) for s, mine in self._storages.items() if line.die_at[s] in inside]
        self._events += [self._handle(event) for event in events if event.kind == Kind.HANDLE_DIE]

    def _window(self, span: Span) -> Span:
        start = len(self._events)
        for at in range(*span):
            event = self._problem.events[at]
            if event.kind == Kind.RUN:
                self._ran_at(event.index)
            elif event.kind == Kind.DIE:
                self._events.append(Event(Kind.DIE, self._storages[event.index]))
            elif event.kind in _HANDLES and self._wanted(event):
                self._events.append(self._handle(event))
        return Span(start, len(self._events))

    def _wanted(self, event: Event) -> bool:
        v = self._problem.handles[event.index]
        own = self._problem.values[v].region == self._region
        return v in self._values and (own or event.kind != Kind.UNPACK)

    def _handle(self, event: Event) -> Event:
        mine = len(self._handles), self._values[self._problem.handles[event.index]]
        return Event(event.kind, self._handles.setdefault(event.index, mine)[0])

    def _ran_at(self, i: int) -> None:
        operator = self._problem.operators[i]
        births = tuple(self._storages[s] for s in operator.births)
        if operator.region != self._region:
            if births or operator.workspace:
                self._run(Operator(births=births, workspace=operator.workspace))
            return
        self._made |= dict.fromkeys(operator.writes, len(self._operators))
        reads, writes = (tuple(self._values[v] for v in some) for some in (operator.reads, operator.writes))
        self._run(replace(operator, region=0, births=births, reads=reads, writes=writes))

    def _run(self, operator: Operator) -> None:
        self._events.append(Event(Kind.RUN, len(self._operators)))
        self._operators.append(operator)

    def _value(self, v: int) -> Value:
        """Own values as they are; the others are there, whatever is chosen, and so is in full what others use."""
        value = self._problem.values[v]
        storage = self._storages[value.storage]
        if value.region != self._region:
            return Value(storage, OUTSIDE, OUTSIDE, last=value.last, droppable=False)
        previous = self._values.get(value.previous, OUTSIDE)
        if value.crossing:
            value = replace(value, half_bytes=0, codec_ns=0, halved=False)
        return replace(value, storage=storage, region=0, operator=self._made.get(v, OUTSIDE), previous=previous)
