"""Exact rows for single events of the backward pass: what the stages leave out, in full.

At a moment, a region that is between its first and its last unpack holds what it keeps for as long as a
handle or a replay may want it, what it has made and not released, and, inside an unpack, what the replay
itself needs. One row stands for the time after the event, one for every operator that the unpack may run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import pulp

from .backward import Backward, Early, Unpack
from .problem import OUTSIDE, Problem
from .program import GE, Program, Row
from .timeline import timeline


def active(problem: Problem, event: int) -> tuple[int, ...]:
    """Regions whose backward has begun at an event and has not ended."""
    spans: dict[int, tuple[int, int]] = {}
    for w in timeline(problem).windows:
        if w.backward and w.region != OUTSIDE:
            spans[w.region] = (spans.get(w.region, (w.start, 0))[0], w.stop)
    return tuple(g for g, (start, stop) in spans.items() if start <= event < stop)


def cut(program: Program, events: Collection[int]) -> None:
    """Exact rows for ``events``, and what of the backwards they need; once per program."""
    regions: dict[int, Backward] = {}
    for event in sorted(events):
        here = active(program.problem, event)
        for g in here:
            if g not in regions:
                regions[g] = Backward(program, g, max(events))
        if here:
            _cut(program, event, [regions[g] for g in here])


def _cut(program: Program, event: int, regions: Sequence[Backward]) -> None:
    """Exact rows for one event, at which the backwards of ``regions`` are under way."""
    stage = program.stages.at(event, frozenset(region.region for region in regions))
    moments = [_Moment(program, region, event) for region in regions]
    after = [moment.after() for moment in moments]
    states = [after]
    for number, moment in enumerate(moments):
        states += [[*after[:number], state, *after[number + 1 :]] for state in moment.during()]
    held: Row = {}
    for moment in moments:
        _add(held, moment.held())
    for state in states:
        terms = dict(held)
        for more, _ in state:
            _add(terms, more)
        program.bound(replace(stage, constant=stage.constant + sum(size for _, size in state)), terms)


def _add(terms: Row, more: Row) -> None:
    for x, size in more.items():
        terms[x] = terms.get(x, 0) + size


class _Moment:
    """One region at one event, in bytes by variable, and a constant where there is one."""

    def __init__(self, program: Program, region: Backward, event: int) -> None:
        self._program, self._region, self._event = program, region, event
        self._line, self._values, self._operators = program.line, program.problem.values, program.problem.operators
        self._may_run = region.may_run(event)
        done = [unpack for unpack in region.unpacks if unpack.at <= event]
        self._last: Unpack | None = done[-1] if done else None

    def _size(self, v: int) -> int:
        return self._program.problem.storages[self._values[v].storage]

    # What is stored

    def held(self) -> Row:
        """Kept and halved values, generator states, and inputs from outside."""
        terms: Row = {d: self._operators[i].rng_bytes for i, d in self._may_run.items()}
        readers: dict[int, list[pulp.LpVariable]] = {}
        for i, d in self._may_run.items():
            for u in self._region.free(i):
                readers.setdefault(u, []).append(d)
        for v in self._program.values:
            if self._values[v].region == self._region.region:
                _add(terms, self._kept(v, readers.get(v, [])))
                _add(terms, self._halved(v))
        for storage, ops in self._program.stages.inputs.items():
            if all(i in self._may_run for i in ops) and not self._there_anyway(storage):
                alive = self._any([{self._may_run[i]: 1.0} for i in ops])
                _add(terms, {alive: self._program.problem.storages[storage]})
        return terms

    def _kept(self, v: int, readers: Sequence[pulp.LpVariable]) -> Row:
        """A kept value is there until its own release, or for as long as a replay may read it."""
        keep = self._program.at["keep", v]
        if self._event < self._line.die_at[self._values[v].storage]:
            return {}
        if self._line.saved[v] and self._event < self._line.released_at[v]:
            return {keep: self._size(v)}
        return {self._any([{keep: 1.0, d: 1.0} for d in readers]): self._size(v)} if readers else {}

    def _halved(self, v: int) -> Row:
        if not self._line.packed_at[v] <= self._event < self._line.released_at[v]:
            return {}
        decoded = self._size(v) if self._region.asked[v] <= self._event else 0
        return {half: self._values[v].half_bytes + decoded for half in self._program.half(v)}

    def _there_anyway(self, storage: int) -> bool:
        held = (v for v in self._line.kept if self._values[v].storage == storage)
        return self._event < self._line.die_at[storage] or any(self._event < self._line.released_at[v] for v in held)

    def _any(self, cases: Sequence[Row]) -> pulp.LpVariable:
        """A variable that is 1 as soon as all of one case are (0 or 1 each); a single one stands for itself."""
        if len(cases) == 1 and list(cases[0].values()) == [1.0]:
            return next(iter(cases[0]))
        alive = self._program.new()
        for case in cases:
            self._program.row({alive: 1.0, **{x: -sign for x, sign in case.items()}}, GE, _negated(case))
        return alive

    # What is made

    def after(self) -> tuple[Row, int]:
        """What was made, once the event is over."""
        return self._waiting(self._last.after if self._last else {}, OUTSIDE)

    def during(self) -> list[tuple[Row, int]]:
        """What was made, while each operator runs that the unpack at this event may run."""
        unpack = self._last
        if unpack is None or unpack.at != self._event:
            return []
        return [self._running(i, unpack) for i in unpack.runs]

    def _waiting(self, early: Early, without: int) -> tuple[Row, int]:
        """Values that wait for their release. Those that were asked for are there unless stored."""
        terms: Row = {}
        constant = 0
        for v in self._region.saved:
            if v == without or not self._region.waits(v, self._event):
                continue
            if self._region.asked[v] <= self._event:
                constant += self._size(v)
                _add(terms, {x: -self._size(v) for x in self._program.stored(v, exact=False)})
            elif v in early:
                terms[early[v]] = self._size(v)
        return terms, constant

    def _running(self, i: int, unpack: Unpack) -> tuple[Row, int]:
        """While operator ``i`` runs: its outputs and workspace, what the replay has made, and what waits."""
        operator, target = self._operators[i], unpack.target
        made = {w for j in unpack.runs if j < i for w in self._operators[j].writes}
        early = {v: m for v, m in unpack.before.items() if v not in made}
        early |= {v: m for v, m in unpack.after.items() if v in made}
        terms, constant = self._waiting(early, target)
        own = operator.workspace + sum(self._size(w) for w in operator.writes)
        _add(terms, {unpack.runs[i]: own})
        if target in unpack.before:
            _add(terms, {unpack.before[target]: self._size(target)})
        for w in sorted(made - {target} - self._line.kept):
            _add(terms, self._passing(w, i, unpack))
        return terms, constant

    def _passing(self, w: int, i: int, unpack: Unpack) -> Row:
        """A value that does not wait is there until its last reader has run; a write in place may take its buffer."""
        rest = [j for j in unpack.runs if j >= i and w in self._region.free(j)]
        overwritten = {self._values[new].previous for new in self._operators[i].writes}
        runs = [unpack.runs[j] for j in rest if j != i or w not in overwritten]
        keeps = self._program.stored(w, exact=True)
        if self._region.waits(w, self._event):
            cases: list[Row] = [{run: 1.0, half: 1.0} for run in runs for half in self._program.half(w)]
        else:
            cases = [{run: 1.0, **{keep: -1.0 for keep in keeps}} for run in runs]
        return {self._any(cases): self._size(w)} if cases else {}


def _negated(case: Row) -> float:
    """alive >= sum of the positive - (their number - 1) - sum of the negative."""
    return 1.0 - sum(sign > 0 for sign in case.values())
