"""The program's view of memory: one linear row per stretch of the step in which the same things are alive.

Every row is a *lower* bound of what the referee counts, for every choice that keeps nothing in vain (an
unsaved value only where a replay reads it; some cheapest choice is of that kind). So a choice that a row
forbids, the referee forbids too, and a bound proven with these rows holds for the step itself. A row sums

* what is there in any case: the user's tensors, fixed holds for their own handles, gradients, workspace;
* kept: bytes from the user's last use to its last own handle, or to the first replay that may read it;
* fp16: the half copy from pack to release, codec workspace at the pack, the decoded copy from its unpack;
* neither: made when asked for itself, until release;
* generator state of an operator that is replayed, and what it reads from outside its region, until the
  first unpack that may replay it.

What replays need beside their result, and what is made for others before it is asked for itself, depends
on more than one choice: :mod:`budgetopt.solvers.moments` adds exact rows for that where it matters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import add
from typing import NamedTuple

from .holding import hold
from .memory import CODEC_WORKSPACE
from .problem import OUTSIDE, Choice, Problem
from .timeline import Timeline, first_unpacks, timeline, useful

Key = tuple[str, int]
"""What a term hangs on: ("keep", value), ("half", value), ("again", operator) or ("input", storage)."""

Terms = dict[Key, int]
"""Bytes by key."""


class Piece(NamedTuple):
    """Bytes that count from event ``start`` up to ``stop`` if ``key`` holds, or always if it is None."""

    region: int
    key: Key | None
    size: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Stage:
    """One row, for the events from ``start`` up to ``stop``; ``held``: the regions that are between their passes."""

    start: int
    stop: int
    constant: int
    terms: Terms
    held: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stages:
    """All rows, what each region holds between its passes, and the parts they are made of.

    Attributes:
        inputs: operators that read each storage from outside their region.
        fixed: bytes at each event that no choice changes.
    """

    rows: tuple[Stage, ...]
    held: dict[int, Terms]
    moving: tuple[Piece, ...]
    between: dict[int, tuple[int, int]]
    inputs: dict[int, tuple[int, ...]]
    fixed: tuple[int, ...]

    def at(self, event: int, without: frozenset[int] = frozenset()) -> Stage:
        """The row of one event, without what moves in some regions."""
        held = tuple(g for g, (start, stop) in self.between.items() if start <= event < stop)
        alive = [p for p in self.moving if p.start <= event < p.stop and p.region not in without]
        return Stage(event, event + 1, *_sum(self.fixed[event], alive), held)

    def tops(self) -> list[int]:
        """Most bytes that each row can count for any choice."""
        held = {g: _most(terms) for g, terms in self.held.items()}
        return [row.constant + _most(row.terms) + sum(held[g] for g in row.held) for row in self.rows]


def _most(terms: Terms) -> int:
    """Of KEEP and FP16 of one value, only one can be chosen."""
    best: dict[Key, int] = {}
    for (kind, index), size in terms.items():
        key = ("keep" if kind == "half" else kind, index)
        best[key] = max(best.get(key, 0), size)
    return sum(best.values())


def _sum(constant: int, pieces: Sequence[Piece]) -> tuple[int, Terms]:
    terms: Terms = {}
    for piece in pieces:
        if piece.key is None:
            constant += piece.size
        else:
            terms[piece.key] = terms.get(piece.key, 0) + piece.size
    return constant, {key: size for key, size in terms.items() if size}


def fixed_bytes(problem: Problem) -> tuple[int, ...]:
    """Bytes at each event that no choice changes, workspace included."""
    line = timeline(problem)
    deltas = list(line.deltas)
    fixed = [
        Choice.KEEP if v in line.kept and not value.halved else Choice.FP16 for v, value in enumerate(problem.values)
    ]
    hold(problem, line, fixed, deltas)
    for start, stop, size in _halved(problem, line):
        deltas[start] += size
        if stop < len(deltas):
            deltas[stop] -= size
    return tuple(map(add, list(accumulate(deltas, initial=problem.resident))[1:], line.tops))


def _halved(problem: Problem, line: Timeline) -> Iterator[tuple[int, int, int]]:
    """Half copies of what crosses regions in fp16, and decoded ones, as (start, stop, bytes).

    Decoded as soon as a replay of another region might read it, if that is before the first handle asks for it.
    """
    halves = [v for v in line.shared if problem.values[v].halved]
    asked, first = first_unpacks(problem)
    for i, operator in enumerate(problem.operators) if halves else ():
        for v in line.reads[i]:
            if problem.values[v].halved and problem.values[v].region != operator.region:
                asked[v] = min(asked[v], *(first[w] for w in operator.writes), len(line.deltas))
    for v in halves:
        value = problem.values[v]
        start = min(line.packed_at[v], line.left_at[value.region])
        stop = max(line.released_at[v], line.die_at[value.storage])
        if start < stop:
            yield start, stop, value.half_bytes
        if asked[v] < stop:
            yield asked[v], stop, problem.storages[value.storage]


def stages(problem: Problem) -> Stages:
    """All stages of a problem."""
    line = timeline(problem)
    levels = fixed_bytes(problem)
    between = _between(line)
    held: dict[int, list[Piece]] = {g: [] for g in between}
    moving: list[Piece] = []
    read = inputs(problem)
    for piece in [*_value_pieces(problem, line), *_operator_pieces(problem, line, read)]:
        start, stop = between.get(piece.region, (0, 0))
        if start < stop and piece.start <= start and stop <= piece.stop:
            held[piece.region].append(piece)
            moving += [piece._replace(stop=start), piece._replace(start=stop)]
        else:
            moving.append(piece)
    moving = [piece for piece in moving if piece.start < piece.stop]
    rows = tuple(_rows(len(line.deltas), levels, moving, between))
    return Stages(rows, {g: _sum(0, found)[1] for g, found in held.items()}, tuple(moving), between, read, levels)


def _value_pieces(problem: Problem, line: Timeline) -> Iterator[Piece]:
    """What keeping, halving or making again one value adds."""
    asked, first = first_unpacks(problem)
    decided = set(useful(problem)[0])
    for v, value in enumerate(problem.values):
        size, saved, end = problem.storages[value.storage], line.saved[v], line.released_at[v]
        if v in decided:
            die = line.die_at[value.storage]
            yield Piece(value.region, ("keep", v), size, die, end if saved else first[v] + 1)
        if v in decided and saved and value.half_bytes:
            packed = line.packed_at[v]
            yield Piece(value.region, ("half", v), value.half_bytes, packed, end)
            yield Piece(value.region, ("half", v), min(size, CODEC_WORKSPACE), packed, packed + 1)
            yield Piece(value.region, ("half", v), size, asked[v], end)
        if saved and v not in line.kept and v not in line.coded:
            yield Piece(value.region, None, size, asked[v], end)
            for kind in ("keep", "half") if v in decided else ():
                if kind == "keep" or value.half_bytes:
                    yield Piece(value.region, (kind, v), -size, asked[v], end)


def _operator_pieces(problem: Problem, line: Timeline, inputs: dict[int, tuple[int, ...]]) -> Iterator[Piece]:
    """Generator states and what is read from outside the region."""
    first = first_unpacks(problem)[1]
    until = [min((first[w] for w in operator.writes), default=-1) + 1 for operator in problem.operators]
    for i in useful(problem)[1]:
        operator = problem.operators[i]
        yield Piece(operator.region, ("again", i), operator.rng_bytes, line.run_at[i], until[i])
    ends = _fixed_ends(problem, line)
    for storage, readers in inputs.items():
        start = max(line.die_at[storage], ends.get(storage, -1))
        regions = {problem.operators[i].region for i in readers}
        region = regions.pop() if len(regions) == 1 else OUTSIDE
        yield Piece(region, ("input", storage), problem.storages[storage], start, min(until[i] for i in readers))


def inputs(problem: Problem) -> dict[int, tuple[int, ...]]:
    """Storages that replays read and no choice frees: who reads them."""
    line = timeline(problem)
    decided = {problem.values[v].storage for v in line.decided}
    found: dict[int, list[int]] = {}
    for i in useful(problem)[1]:
        for u in line.reads[i]:
            storage = problem.values[u].storage
            inner = u in line.inner[i] and u not in line.kept
            if not inner and storage not in decided and line.born_at[storage] < len(line.deltas):
                found.setdefault(storage, []).append(i)
    return {storage: tuple(dict.fromkeys(readers)) for storage, readers in found.items()}


def _fixed_ends(problem: Problem, line: Timeline) -> dict[int, int]:
    """Until when each storage is held for handles of values that every choice keeps."""
    ends: dict[int, int] = {}
    for v in line.kept:
        storage = problem.values[v].storage
        ends[storage] = max(ends.get(storage, -1), line.released_at[v])
    return ends


def _between(line: Timeline) -> dict[int, tuple[int, int]]:
    """Of each region: end of its forward and begin of its backward window, over all pieces of both."""
    never = len(line.deltas)
    found: dict[int, tuple[int, int]] = {}
    for w in line.windows:
        if w.region != OUTSIDE:
            start, stop = found.get(w.region, (0, never))
            found[w.region] = (start, min(stop, w.start)) if w.backward else (w.stop, stop)
    return found


def _rows(
    events: int, fixed: Sequence[int], moving: list[Piece], between: dict[int, tuple[int, int]]
) -> Iterator[Stage]:
    """Between two positions at which something begins or ends, one row."""
    cuts = {0, events}
    for piece in moving:
        cuts |= {piece.start, piece.stop}
    for start, stop in between.values():
        cuts |= {start, stop}
    waiting = sorted(moving, key=lambda piece: piece.start, reverse=True)
    alive: list[Piece] = []
    for start, stop in pairwise(sorted(at for at in cuts if 0 <= at <= events)):
        while waiting and waiting[-1].start <= start:
            alive.append(waiting.pop())
        alive = [piece for piece in alive if piece.stop > start]
        held = tuple(g for g, (exit_at, back) in between.items() if exit_at <= start < back)
        yield Stage(start, stop, *_sum(max(fixed[start:stop]), alive), held)
