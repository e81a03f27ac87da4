"""The backward pass of one region in the program: which unpack runs which operator, and what waits.

Variables, for the unpacks t of a region (the first of each value that may be made again) and operators i:

* x_it in [0, 1]: the unpack t runs operator i.
* m_vt in [0, 1]: after the unpack t, value v is there although it was not asked for yet.
* d_ie in [0, 1]: after event e, operator i may still be replayed.

All are integral by themselves once k and h are. The rules are those of :mod:`budgetopt.solvers.replay` and
of :func:`budgetopt.solvers.memory.hold`; a change there is a change here.
"""

from __future__ import annotations

from typing import NamedTuple

import pulp

from .program import GE, LE, Program, Row
from .timeline import first_unpacks

_MOST_RUNS = 10_000  # x of one region; unpacks after that are seen as the stages see them

Early = dict[int, pulp.LpVariable]
"""m of each value that may be there although it was not asked for yet."""


class Unpack(NamedTuple):
    """One modelled unpack: its event, its value, m before and after it, and x of what it may run."""

    at: int
    target: int
    before: Early
    after: Early
    runs: dict[int, pulp.LpVariable]


class Backward:
    """Adds the unpacks of ``region`` up to the event ``until`` to a program.

    Attributes:
        unpacks: those modelled, in order. saved: values of the region that wait for handles if they are made.
    """

    def __init__(self, program: Program, region: int, until: int) -> None:
        self.region, self._program, self._line = region, program, program.line
        self._values, self._operators = program.problem.values, program.problem.operators
        self._own = [i for i in program.operators if self._operators[i].region == region]
        self._again: dict[int, dict[int, pulp.LpVariable]] = {}
        self.asked = first_unpacks(program.problem)[0]
        self.saved = [v for v, value in enumerate(self._values) if value.region == region and self._remade(v)]
        self.unpacks: list[Unpack] = []
        early: Early = {}
        modelled = 0
        for at, v in sorted((self.asked[v], v) for v in self.saved):
            ops = self._ancestors(v)
            modelled += len(ops)
            if at > until or modelled > _MOST_RUNS:
                break
            runs = {i: program.new() for i in ops}
            self._run_rules(at, v, runs, early)
            after = self._wait_rules(at, v, runs, early)
            self.unpacks.append(Unpack(at, v, early, after, runs))
            early = after
        self._price()

    def waits(self, v: int, at: int) -> bool:
        """Handles of ``v`` are pending after event ``at``, so that it stays if it is made."""
        return self._remade(v) and at < self._line.released_at[v]

    def free(self, i: int) -> list[int]:
        """What operator ``i`` reads that a replay may have to make."""
        return [u for u in self._line.inner[i] if u not in self._line.kept]

    def may_run(self, event: int) -> dict[int, pulp.LpVariable]:
        """d of each operator: handles are waiting after ``event`` for something that is made from it."""
        program = self._program
        released = sum(self._line.released_at[v] <= event for v in self.saved)
        if not released:
            return {i: program.at["again", i] for i in self._own}
        if released not in self._again:
            d = self._again[released] = {i: program.new() for i in self._own}
            for i in self._own:
                for w in self._operators[i].writes:
                    if self.waits(w, event):
                        program.row({d[i]: 1.0, **program.stored(w, exact=False)}, GE, 1)
                for u in self.free(i):
                    maker = self._values[u].operator
                    program.row({d[maker]: 1.0, **program.stored(u, exact=True), d[i]: -1.0}, GE, 0)
        return self._again[released]

    def _remade(self, v: int) -> bool:
        return self._line.saved[v] and v not in self._line.kept and v not in self._line.coded

    def _ancestors(self, v: int) -> list[int]:
        found: set[int] = set()
        waiting = [v]
        while waiting:
            i = self._values[waiting.pop()].operator
            if i not in found:
                found.add(i)
                waiting += self.free(i)
        return sorted(found)

    def _run_rules(self, at: int, v: int, runs: dict[int, pulp.LpVariable], early: Early) -> None:
        """The target is stored, there or made. What runs has what it reads, kept, there or made."""
        program = self._program
        last = self._values[v].operator
        there = {**program.stored(v, exact=False), **_one(early, v)}
        program.row({runs[last]: 1.0, **there}, GE, 1)
        readers: dict[int, Row] = {}
        for i, run in runs.items():
            for u in self.free(i):
                readers.setdefault(u, {})[run] = -1.0
                terms, missing = self._there(u, at, early)
                program.row({runs[self._values[u].operator]: 1.0, **terms, run: -1.0}, GE, missing)
        purposes: dict[int, list[pulp.LpVariable]] = {i: [] for i in runs}
        for u, reading in readers.items():
            if u != v:
                purposes[self._values[u].operator].append(self._made(u, at, reading, early))
        for i, run in runs.items():
            asked = there if i == last else {}
            program.row({run: 1.0, **{made: -1.0 for made in purposes[i]}, **asked}, LE, 1 if i == last else 0)

    def _made(self, u: int, at: int, reading: Row, early: Early) -> pulp.LpVariable:
        """Whether a replay makes ``u``: at most if something that runs reads it, and it is not there."""
        made = self._program.new()
        terms, missing = self._there(u, at, early)
        self._program.row({made: 1.0, **reading}, LE, 0)
        self._program.row({made: 1.0, **terms}, LE, 1 + missing)
        return made

    def _there(self, u: int, at: int, early: Early) -> tuple[Row, float]:
        """Whether ``u`` can be read at once: terms, and what to add to the right side."""
        program = self._program
        if not self.waits(u, at):
            return program.stored(u, exact=True), 0.0
        if self.asked[u] < at:  # kept, or made and waiting: anything but fp16
            return {x: -1.0 for x in program.half(u)}, -1.0
        return {**program.stored(u, exact=True), **_one(early, u)}, 0.0

    def _wait_rules(self, at: int, v: int, runs: dict[int, pulp.LpVariable], early: Early) -> Early:
        """What is made on the way waits until it is asked for, if it is neither stored nor released."""
        program = self._program
        after = {w: m for w, m in early.items() if w != v}
        for i, run in runs.items():
            for w in self._operators[i].writes:
                if w == v or not self.waits(w, at) or self.asked[w] < at:
                    continue
                after[w] = program.new()
                stored, before = program.stored(w, exact=False), {m: -1.0 for m in _one(early, w)}
                program.row({after[w]: 1.0, **before}, GE, 0)
                program.row({after[w]: 1.0, run: -1.0, **stored}, GE, 0)
                program.row({after[w]: 1.0, run: -1.0, **before}, LE, 0)
                program.row({after[w]: 1.0, **stored}, LE, 1)
        return after

    def _price(self) -> None:
        """An operator that is replayed runs at least once, and each modelled run costs."""
        program = self._program
        sums: dict[int, Row] = {}
        for unpack in self.unpacks:
            for i, run in unpack.runs.items():
                sums.setdefault(i, {})[run] = -1.0
        for i, runs in sums.items():
            again, count = program.at["again", i], program.new(upper=None)
            program.times[count] = program.times.pop(again)
            program.row({count: 1.0, **runs}, GE, 0)
            program.row({count: 1.0, again: -1.0}, GE, 0)


def _one(early: Early, v: int) -> Row:
    return {early[v]: 1.0} if v in early else {}
