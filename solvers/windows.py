"""Stretches of a recorded step: forwards and backwards of regions, and the gaps between."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from .problem import OUTSIDE, Kind, Problem


class Window(NamedTuple):
    """A stretch of the event list, ``start`` included and ``stop`` not.

    ``region`` is ``OUTSIDE`` in the gaps; ``backward`` tells the two windows of a region apart.
    """

    start: int
    stop: int
    region: int
    backward: bool


def packers(problem: Problem) -> dict[int, int]:
    """The region that was entered when each handle was packed, or ``OUTSIDE``."""
    found: dict[int, int] = {}
    inside = OUTSIDE
    for kind, index in problem.events:
        if kind in (Kind.ENTER, Kind.EXIT):
            inside = index if kind == Kind.ENTER else OUTSIDE
        elif kind == Kind.PACK:
            found[index] = inside
    return found


def cut(problem: Problem) -> tuple[Window, ...]:
    """Cut the events where a region's forward or backward begins or ends; the innermost region owns a stretch."""
    spans = [*forward_spans(problem), *_backward_spans(problem)]
    cuts = sorted({0, len(problem.events)} | {s.start for s in spans} | {s.stop for s in spans})
    spans.sort(key=lambda span: (span.start, -span.stop))
    found: list[Window] = []
    active: list[Window] = []
    pending = iter([*spans, None])
    upcoming = next(pending)
    for start, stop in pairwise(cuts):
        while upcoming is not None and upcoming.start <= start:
            active.append(upcoming)
            upcoming = next(pending)
        active = [span for span in active if span.stop > start]
        owner = active[-1] if active else Window(0, 0, OUTSIDE, False)
        found.append(Window(start, stop, owner.region, owner.backward))
    return tuple(found)


def forward_spans(problem: Problem) -> list[Window]:
    """From entering a region, or its first operator where no entering is recorded, to leaving it."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for at, (kind, index) in enumerate(problem.events):
        region = index if kind in (Kind.ENTER, Kind.EXIT) else OUTSIDE
        if kind == Kind.RUN:
            region = problem.operators[index].region
        if region != OUTSIDE:
            first.setdefault(region, at)
            last[region] = at
    return [Window(first[g], last[g] + 1, g, False) for g in first]


def _backward_spans(problem: Problem) -> list[Window]:
    """From the first unpack or handle death after the forward of what a region saved of its own to the last."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    packed_in = packers(problem)
    backward = False
    for at, (kind, index) in enumerate(problem.events):
        backward = backward or kind == Kind.FORWARD_END
        if backward and kind in (Kind.UNPACK, Kind.HANDLE_DIE):
            region = problem.values[problem.handles[index]].region
            if packed_in.get(index, OUTSIDE) in (OUTSIDE, region):
                first.setdefault(region, at)
                last[region] = at
    return [Window(first[g], last[g] + 1, g, True) for g in first if g != OUTSIDE]
