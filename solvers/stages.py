"""The program's view of memory: one linear row per stretch of the step in which the same things are alive.

A stage bounds ``constant + sum of terms + what earlier regions hold``. Its constant is what the referee
counts when every free value is dropped (user's tensors, fixed holds for as long as any choice needs
them, gradients, workspace); its terms are what keeping, halving or making again adds:

* kept: its bytes from the user's last use to the last handle that may read it;
* fp16: the half copy from pack to release, codec workspace at the pack, the decoded copy from its unpack;
* neither: made at the first unpack whose replay can make it, until release ("coarse"), and at its own
  unpack whatever its replay needs beside it if all other saved values are there.

So a stage may be too high or too low by what replays share. The referee measures that for a choice, and
:mod:`budgetopt.solvers.ilp` shifts every stage by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import add
from typing import NamedTuple

from .memory import CODEC_WORKSPACE, hold
from .problem import OUTSIDE, Choice, Kind, Problem
from .replay import Replays
from .timeline import Timeline, Window, timeline, useful

Terms = dict[tuple[int, Choice], int]
"""Bytes by (value, KEEP or FP16)."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One row, for the events from ``start`` up to ``stop``; ``held``: the regions that are between their passes."""

    start: int
    stop: int
    window: int
    constant: int
    terms: Terms
    held: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stages:
    """All rows, and what each region holds between its forward and its backward window."""

    rows: tuple[Stage, ...]
    held: dict[int, Terms]

    def levels(self, choices: tuple[Choice, ...]) -> list[int]:
        """Bytes that each row counts for ``choices``."""
        held = {g: _count(terms, choices) for g, terms in self.held.items()}
        return [row.constant + _count(row.terms, choices) + sum(held[g] for g in row.held) for row in self.rows]

    def tops(self) -> list[int]:
        """Most bytes that each row can count for any choice."""
        held = {g: _most(terms) for g, terms in self.held.items()}
        return [row.constant + _most(row.terms) + sum(held[g] for g in row.held) for row in self.rows]


def _count(terms: Terms, choices: tuple[Choice, ...]) -> int:
    return sum(size for (v, choice), size in terms.items() if choices[v] == choice)


def _most(terms: Terms) -> int:
    best: dict[int, int] = {}
    for (v, _), size in terms.items():
        best[v] = max(best.get(v, 0), size)
    return sum(best.values())


class Life(NamedTuple):
    """When one value is where; positions as in the timeline. ``beside``: extra bytes of its own replay."""

    value: int
    size: int
    half: int
    die: int
    kept_until: int
    packed: int
    first_made: int
    unpacked: int
    released: int
    beside: int

    def at(self, t: int) -> tuple[int, int, int]:
        """Bytes at event ``t``: in any case, and what KEEP and FP16 add to that."""
        keep = self.size if self.die <= t < self.kept_until else 0
        halved = made = 0
        if self.half and self.packed <= t < self.released:
            halved = self.half + (self.size if self.unpacked <= t else 0)
            halved += min(self.size, CODEC_WORKSPACE) if t == self.packed else 0
        if self.first_made <= t < self.released:
            made = self.size + (self.beside if t == self.unpacked else 0)
        return made, keep - made, halved - made

    def relaxed(self) -> Life:
        """The same value where it takes least: held for its own handles only, made again when asked for itself."""
        return self._replace(
            kept_until=self.released if self.packed <= self.released else self.die,
            first_made=self.unpacked,
            beside=0,
        )

    def breaks(self) -> tuple[int, ...]:
        """Positions from which :meth:`at` may differ from the event before."""
        packed = (self.packed, self.packed + 1) if self.half else ()
        return (self.die, self.kept_until, *packed, self.first_made, self.unpacked, self.unpacked + 1, self.released)


def stages(problem: Problem) -> Stages:
    """All stages of a problem as well as they are known before the referee has seen a choice."""
    line = timeline(problem)
    deltas = list(line.deltas)
    dropped = [_dropped(line, v) for v in range(len(line.saved))]
    wanted = hold(problem, line, dropped, deltas)
    return _stages(problem, deltas, list(_lives(problem, line, wanted)))


def _dropped(line: Timeline, v: int) -> Choice:
    if v in line.kept:
        return Choice.KEEP
    return Choice.FP16 if v in line.coded else Choice.RECOMPUTE


def relaxed_stages(problem: Problem) -> Stages:
    """Stages that never count more than the referee does, for any choice: what they forbid, it forbids."""
    line = timeline(problem)
    deltas = list(line.deltas)
    fixed = [Choice.KEEP if v in line.kept else Choice.FP16 for v in range(len(line.saved))]
    wanted = hold(problem, line, fixed, deltas)
    return _stages(problem, deltas, [life.relaxed() for life in _lives(problem, line, wanted)])


def _stages(problem: Problem, deltas: list[int], all_lives: list[Life]) -> Stages:
    line = timeline(problem)
    fixed = list(map(add, list(accumulate(deltas, initial=problem.resident))[1:], line.tops))
    lives: dict[int, list[Life]] = {}
    for life in all_lives:
        lives.setdefault(problem.values[life.value].region, []).append(life)
    spans = _spans(line)
    held = {g: _terms([life.at(spans[g][1] - 1) for life in lives[g]], lives[g]) for g in lives}
    rows = tuple(row for w in range(len(line.windows)) for row in _rows(line, w, fixed, lives, spans))
    return Stages(rows, held)


def _lives(problem: Problem, line: Timeline, wanted: list[int]) -> Iterator[Life]:
    never = len(problem.events)
    unpacked = [never] * len(problem.values)
    for at, kind, v in line.handle_events:
        if kind == Kind.UNPACK:
            unpacked[v] = min(unpacked[v], at)
    first = _first_made(problem, line, unpacked)
    saved_kept = [
        Choice.KEEP if v in line.kept or (line.saved[v] and value.last) else Choice.RECOMPUTE
        for v, value in enumerate(problem.values)
    ]
    scratch = Replays(problem, line, saved_kept, [0], [0])
    for v in useful(problem)[0]:
        value, saved = problem.values[v], line.saved[v]
        yield Life(
            value=v,
            size=problem.storages[value.storage],
            half=value.half_bytes if saved else 0,
            die=line.die_at[value.storage],
            kept_until=max(wanted[v], line.released_at[v]),
            packed=line.packed_at[v] if saved else never,
            first_made=first[v] if saved else never,
            unpacked=unpacked[v],
            released=line.released_at[v] if saved else wanted[v],
            beside=_beside(scratch, saved_kept, v) if unpacked[v] < never and v not in line.coded else 0,
        )


def _beside(scratch: Replays, chosen: list[Choice], v: int) -> int:
    """Bytes that the replay of ``v`` needs beside it where all other saved values are there."""
    before, chosen[v] = chosen[v], Choice.RECOMPUTE
    top, _ = scratch.alone(v)
    chosen[v] = before
    return top


def _first_made(problem: Problem, line: Timeline, unpacked: list[int]) -> list[int]:
    """The first unpack whose replay can make each value: its own, or that of something made from it."""
    first = list(unpacked)
    for i in line.makers:
        writes = [w for w in problem.operators[i].writes if w not in line.kept]
        at = min((first[w] for w in writes), default=len(problem.events))
        for v in (*writes, *line.inner[i]):
            first[v] = min(first[v], at)
    return first


def _spans(line: Timeline) -> dict[int, tuple[int, int, int]]:
    """Of each region: end of its forward, begin and end of its backward window.

    A window in the middle of another region's is cut, so ends are taken over all pieces.
    """
    never = len(line.deltas)
    spans: dict[int, tuple[int, int, int]] = {}
    for w in line.windows:
        if w.region != OUTSIDE:
            exit_at, start, stop = spans.get(w.region, (0, never, never))
            if w.backward:
                spans[w.region] = (exit_at, min(start, w.start), w.stop)
            else:
                spans[w.region] = (w.stop, start, stop)
    return spans


def _rows(
    line: Timeline,
    w: int,
    fixed: list[int],
    lives: dict[int, list[Life]],
    spans: dict[int, tuple[int, int, int]],
) -> Iterator[Stage]:
    """The stages of one window: active regions value by value, regions between their passes as a whole."""
    window = line.windows[w]
    held = tuple(g for g in sorted(lives) if spans[g][0] <= window.start and window.stop <= spans[g][1])
    between = set(held)
    active = [life for g in lives if g not in between for life in lives[g] if not _past(life, window)]
    # A value that the user still holds, or that is released early, is not yet, or no more, as the region's sum says.
    odd = [
        life
        for g in held
        for life in lives[g]
        if life.die > window.start or life.kept_until < spans[g][1] or life.released < spans[g][1]
    ]
    usual = {life.value: life.at(spans[g][1] - 1) for g in held for life in lives[g]} if odd else {}
    moving = active + odd
    cuts = {at for life in moving for at in life.breaks() if window.start < at < window.stop}
    for start, stop in pairwise([window.start, *sorted(cuts), window.stop]):
        levels = [_minus(life.at(start), usual.get(life.value)) for life in moving]
        made = sum(level[0] for level in levels)
        yield Stage(start, stop, w, max(fixed[start:stop]) + made, _terms(levels, moving), held)


def _past(life: Life, window: Window) -> bool:
    """Nothing of this value can be alive in the window: not born yet, or gone."""
    if life.kept_until <= window.start and life.released <= window.start:
        return True
    return life.die >= window.stop and life.packed >= window.stop and life.first_made >= window.stop


def _minus(level: tuple[int, int, int], usual: tuple[int, int, int] | None) -> tuple[int, int, int]:
    if usual is None:
        return level
    return level[0] - usual[0], level[1] - usual[1], level[2] - usual[2]


def _terms(levels: list[tuple[int, int, int]], lives: list[Life]) -> Terms:
    terms: Terms = {}
    for (_, keep, half), life in zip(levels, lives, strict=True):
        if keep:
            terms[life.value, Choice.KEEP] = keep
        if half and life.half:
            terms[life.value, Choice.FP16] = half
    return terms
