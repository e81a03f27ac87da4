"""Patterns: what one kind of region may do, each judged exactly by the referee on the region alone.

Candidates come from small integer programs (:mod:`budgetopt.solvers.program`, of one region), in which bytes
are bounded or priced. What such a program counts is a lower bound of what the referee counts, so its own
bound is one for every pattern that exists; what a pattern really holds and needs is measured, not modelled.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import inf
from operator import mul
from time import monotonic
from typing import NamedTuple

import pulp

from .backends import run
from .errors import SolverError
from .memory import minimum, simulate
from .moments import active, cut
from .parts import Part, Span
from .problem import Choice, Problem
from .program import LE, Program, Row, binding
from .stages import Stage, Stages, stages
from .timeline import timeline, useful

_CAPS = 32  # bounds on what is held, in a sweep
_LEVELS = 6  # bounds on the peak of the backward window, in a sweep
_EVENTS = 20_000  # of all programs in one sweep together; fewer bounds for longer regions
_KEPT_CUTS = 2  # exact rows that the next small program begins with
_ROUNDS = 4  # of one small program with exact rows
_TRIED = 200_000  # events replayed by one descent at most
_PRECISE = 5e-4  # gap of one small program
_SECONDS = 2.0  # of one small program at most


class Pattern(NamedTuple):
    """One choice for one kind of region.

    Attributes:
        cost_ns: replays, codecs and recording. held: bytes between the passes, on top of what is there in any case.
        forward, backward: peaks of the two windows, in bytes of the region alone. choices: one per value of it.
    """

    cost_ns: int
    held: int
    forward: int
    backward: int
    choices: tuple[Choice, ...]


class Prices(NamedTuple):
    """What bytes are worth, in nanoseconds each: those that are held, and those of the peaks of the two windows.

    ``time`` is the worth of a nanosecond: 1, or 0 where bytes alone count.
    """

    held: float
    forward: float
    backward: float
    time: float = 1.0

    def of(self, pattern: Pattern) -> tuple[float, Pattern]:
        """What a pattern costs with its bytes; equal ones in a fixed order."""
        return self.time * pattern.cost_ns + sum(map(mul, self[:3], pattern[1:4])), pattern


class Tried(NamedTuple):
    """What one small program gave.

    Attributes:
        bound: proven, of the cost and the priced bytes of every pattern; -inf if nothing is.
        added: whether a pattern is new. choices: the last ones found, if there were any.
    """

    bound: float
    added: bool
    choices: Sequence[Choice] | None


class Workshop:
    """Makes patterns for one kind of region.

    Attributes:
        alone: the region, without the rest of the step.
        patterns: those found, none of them worse than another one in everything.
        engines: names of those that answered, each once, in that order.
        deadline: time.monotonic() after which no program is begun.
        bare: (forward, backward), the highest bytes in each window if nothing is stored or made again.
    """

    def __init__(self, part: Part, backend: str, deadline: float) -> None:
        self.alone, self._backend, self.deadline = part.alone, backend, deadline
        self._spans = part.inner_forward, part.inner_backward
        self._rows = stages(part.alone)
        self._sized = replace(part.alone, budget=max(1, *self._rows.tops()))
        forward, backward = (max(self._rows.fixed[span.start : span.stop]) for span in self._spans)
        self.bare = forward, backward
        self.patterns: list[Pattern] = []
        self.engines: dict[str, None] = {}
        self._moving = useful(part.alone)[0]
        self._slow = False  # a program with exact rows met its time limit
        self._cuts: list[int] = []  # events that had exact rows, the latest last
        self._tries = max(50, _TRIED // len(part.alone.events))

    def score(self, choices: Sequence[Choice]) -> Pattern:
        """The referee's word on one choice."""
        found = simulate(self.alone, choices)
        forward, backward = (max(found.peaks[span.start : span.stop]) for span in self._spans)
        end = self._spans[1].start - 1
        held = found.peaks[end] - self._rows.fixed[end]
        return Pattern(found.cost_ns, held, forward, backward, found.choices)

    def add(self, choices: Sequence[Choice]) -> bool:
        """Whether the choice is better than every known pattern in something."""
        pattern = self.score(choices)
        if any(_covers(known, pattern) for known in self.patterns):
            return False
        self.patterns = sorted([p for p in self.patterns if not _covers(pattern, p)] + [pattern])
        return True

    def begin(self, like: Workshop | None) -> None:
        """The first patterns: the two ends, the smallest peak, and those of one that differs little, or of a sweep."""
        for choice in Choice:
            self.add([choice] * len(self.alone.values))
        self.add(minimum(self.alone, deadline=self.deadline)[1])
        if like is None:
            self._sweep()
        for pattern in () if like is None else like.patterns:
            self.add(pattern.choices)

    def _sweep(self) -> None:
        """The cheapest under bounds on bytes."""
        most = max(p.held for p in self.patterns)
        step = most // max(4, min(_CAPS, _EVENTS // len(self.alone.events))) + 1
        cap = most - 1
        while cap >= 0:  # below what the last one holds, and by no less than a step
            choices = self._try(Prices(0.0, 0.0, 0.0), held=cap).choices
            if choices is None:
                break
            cap = min(self.score(choices).held - 1, cap - step)

    def within(self, held: int) -> bool:
        """Look for the cheapest pattern that holds no more; whether it is new."""
        return self._try(Prices(0.0, 0.0, 0.0), held).added

    def price(self, prices: Prices, exact: bool) -> Tried:
        """The cheapest pattern with its bytes, as far as that is found; the bound holds for all.

        A program without exact rows sees too little of the backward window. Where that has a price, either
        the referee improves what such a program finds, or (``exact``: slower, with a better bound) the program
        gets exact rows where it saw too little.
        """
        if prices.backward <= 0:
            return self._try(prices)
        if exact and not self._slow:
            return self._exactly(prices)
        tried = self._try(prices)
        return tried._replace(added=self._descend(prices) or tried.added)

    def _exactly(self, prices: Prices) -> Tried:
        tried = Tried(-inf, False, None)
        cuts = set(self._cuts[-_KEPT_CUTS:])
        for _ in range(_ROUNDS):
            found = self._try(prices, cuts=cuts)
            tried = Tried(max(tried.bound, found.bound), tried.added or found.added, found.choices)
            if found.choices is None:
                break
            event = self._highest(found.choices)
            if event in cuts or not active(self.alone, event):
                break
            cuts.add(event)
            self._cuts.append(event)
        return tried

    def _highest(self, choices: Sequence[Choice]) -> int:
        """The event of the backward window at which most bytes are there."""
        start, stop = self._spans[1]
        peaks = simulate(self.alone, choices).peaks
        return max(range(start, stop), key=lambda at: (peaks[at], -at))

    def _try(self, prices: Prices, held: int | None = None, cuts: Collection[int] = ()) -> Tried:
        left = min(_SECONDS, self.deadline - monotonic())
        if left <= 0:
            return Tried(-inf, False, None)
        program = _Weighed(self._sized, self._rows, self._spans, prices)
        cut(program, cuts)
        if held is not None:
            program.hold_at_most(held)
        try:
            outcome = run(program.close(), self._backend, left, _PRECISE)
        except SolverError:
            return Tried(-inf, False, None)
        self.engines[outcome.engine] = None
        self._slow |= bool(cuts) and not outcome.proven
        bound = program.cost(outcome.bound)
        if not outcome.found:
            return Tried(bound, False, None)
        choices = program.choices(outcome)
        return Tried(bound, self.add(choices), choices)

    def _descend(self, prices: Prices) -> bool:
        """Change one value at a time from the best known pattern, until nothing helps; whether that gave a new one."""
        best = min(self.patterns, key=prices.of)
        start, tries = best, self._tries
        before = None
        while best is not before and tries > 0:
            before = best
            for v in self._moving:
                for choice in self._legal(v):
                    if choice != best.choices[v] and tries > 0 and monotonic() < self.deadline:
                        tries -= 1
                        changed = (*best.choices[:v], choice, *best.choices[v + 1 :])
                        best = min(best, self.score(changed), key=prices.of)
        return best is not start and self.add(best.choices)

    def _legal(self, v: int) -> tuple[Choice, ...]:
        halves = self.alone.values[v].half_bytes and timeline(self.alone).saved[v]
        return tuple(Choice) if halves else (Choice.KEEP, Choice.RECOMPUTE)


def ends(part: Part, backend: str, deadline: float) -> Workshop:
    """A workshop with two patterns: keep everything, and nothing."""
    workshop = Workshop(part, backend, deadline)
    for choice in (Choice.KEEP, Choice.RECOMPUTE):
        workshop.add([choice] * len(part.alone.values))
    return workshop


_FIRST: dict[tuple[Problem, Problem | None, str], tuple[list[Pattern], dict[str, None]]] = {}
_MOST_FIRST = 256


def first_patterns(part: Part, backend: str, deadline: float, like: Workshop | None = None) -> Workshop:
    """A workshop with its first patterns, which are remembered if they were not cut short: equal input, equal patterns.

    Args:
        like: one with the same operators and sizes, whose patterns spare this one a sweep.
    """
    workshop = Workshop(part, backend, deadline)
    key = part.alone, None if like is None else like.alone, backend
    if key not in _FIRST:
        workshop.begin(like)
        if monotonic() > deadline:
            return workshop
        while len(_FIRST) >= _MOST_FIRST:
            del _FIRST[next(iter(_FIRST))]
        _FIRST[key] = workshop.patterns, workshop.engines
    patterns, engines = _FIRST[key]
    workshop.patterns, workshop.engines = list(patterns), dict(engines)
    return workshop


class _Weighed(Program):
    """The program of one region, in which bytes are variables that may be bounded or priced.

    Attributes:
        held: bytes between the passes.
    """

    def __init__(self, problem: Problem, rows: Stages, spans: tuple[Span, Span], prices: Prices) -> None:
        super().__init__(problem, rows)
        self.held = self.new(upper=None)
        end = rows.at(spans[1].start - 1)
        self.row({**self.bytes_at(end, {}), self.held: -1.0}, LE, 0.0)
        self._time = prices.time
        self._bytes = {self.held: prices.held / self.scale}
        self._peaks: list[tuple[Span, pulp.LpVariable]] = []
        for span, price in zip(spans, prices[1:3], strict=True):
            if price:
                self._weigh(span, price)

    def bound(self, stage: Stage, more: Row) -> None:
        """The peak of the stage's window is at least what is alive at the stage, if it has a price."""
        terms = self.bytes_at(stage, more)
        for span, peak in self._peaks:
            if span.start <= stage.start < span.stop:
                self.row({**terms, peak: -1.0}, LE, -stage.constant * self.scale)

    def close(self) -> pulp.LpProblem:
        """The program, ready for an engine; its objective is time and bytes, at their prices."""
        self.times = (self.times if self._time else {}) | {x: price for x, price in self._bytes.items() if price}
        return super().close()

    def hold_at_most(self, size: int) -> None:
        """Bound the bytes between the passes."""
        self.row({self.held: 1.0}, LE, size * self.scale)

    def _weigh(self, span: Span, price: float) -> None:
        """Put a price on the peak of a window, in nanoseconds per byte; what no choice changes is part of it."""
        peak = self.new(upper=None)
        self._bytes[peak] = price / self.scale
        self._peaks.append((span, peak))
        inside = tuple(_clipped(row, span, self.stages.fixed) for row in self.stages.rows if _meet(row, span))
        for row in binding(replace(self.stages, rows=inside), 0):
            self.bound(row, {})


def _meet(row: Stage, span: Span) -> bool:
    return row.start < span.stop and span.start < row.stop


def _clipped(row: Stage, span: Span, fixed: Sequence[int]) -> Stage:
    """The part of a row that is inside the span."""
    start, stop = max(row.start, span.start), min(row.stop, span.stop)
    more = row.constant - max(fixed[row.start : row.stop])
    return replace(row, start=start, stop=stop, constant=max(fixed[start:stop]) + more)


def _covers(better: Pattern, worse: Pattern) -> bool:
    return all(a <= b for a, b in zip(better[:4], worse[:4], strict=True))
