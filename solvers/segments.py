"""Segments: what several regions in a row keep is stored when they are run again, not in the forward.

What one region hands to the next is kept from the forward on, so a step can't fall below the sum of that. In a
*segment*, a row of regions, such values are dropped too. Before the backward pass first asks the segment for
something, the segment is run again from what was kept before it; what it keeps is stored in that one pass, and
from there on its regions are what they would be after a forward of their own. Segments may lie in each other:
the pass of the outer one stores what its inner ones start from.

So every kept value has a *level*: the innermost segment that holds its region and all regions that use it. Its
bytes are there from that segment's pass on; without such a segment, from the forward on. This is the scheme of
Chen et al., "Training deep nets with sublinear memory cost" (2016), with a choice for each value instead of each
layer, and with nested segments that of Beaumont et al. (2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .problem import OUTSIDE, Choice, Kind, Problem, Segment
from .timeline import Timeline


@dataclass(frozen=True, slots=True)
class Late:
    """What segments mean for one choice; segments are numbered outermost first, in the order of their regions.

    Attributes:
        level: the segment whose pass stores a value, for all values that one does.
        begins: when each segment's pass runs, as an event and a fraction of it that puts several passes at one
            event in order; past the end if it does not run. What only a pass reads is held until it is over.
        at: the segments whose passes run at an event, outermost first.
    """

    level: dict[int, int] = field(default_factory=dict)
    begins: tuple[float, ...] = ()
    at: dict[int, list[int]] = field(default_factory=dict)


NONE = Late()


def in_order(segments: Sequence[Segment]) -> list[Segment]:
    """Outermost first, by their regions.

    Raises:
        ValueError: two of them overlap without one lying in the other, or one ends before it begins.
    """
    ordered = sorted(set(segments), key=lambda s: (s.first, -s.last))
    chains(ordered)
    return ordered


def chains(ordered: Sequence[Segment]) -> dict[int, tuple[int, ...]]:
    """Of each region inside any: the numbers of the segments around it, outermost first.

    Raises:
        ValueError: as :func:`in_order`.
    """
    found: dict[int, tuple[int, ...]] = {}
    for number, segment in enumerate(ordered):
        around = found.get(segment.first, ())
        row = range(segment.first, segment.last + 1)
        if not row or any(found.get(region, ()) != around for region in row):
            raise ValueError(f"segment {tuple(segment)} is empty or overlaps another one")
        found |= dict.fromkeys(row, (*around, number))
    return found


def late(problem: Problem, line: Timeline, chosen: Sequence[Choice], segments: Sequence[Segment]) -> Late:
    """Which values are stored late, and when."""
    if not segments:
        return NONE
    ordered = in_order(segments)
    around = chains(ordered)
    level = {}
    for v, value in enumerate(problem.values):
        again = v in line.crossing or (value.last and v not in line.kept and v not in line.coded)
        if again and chosen[v] == Choice.KEEP:
            holding = [s for s in around.get(value.region, ()) if line.reach[v] <= ordered[s].last]
            if holding:
                level[v] = holding[-1]
    never = len(problem.events)
    begins: list[float] = [never] * len(ordered)
    at: dict[int, list[int]] = {}
    for event, kind, v in line.handle_events:
        if kind == Kind.UNPACK:
            for s in _asked(around, ordered, level, problem.values[v].region, v, chosen[v]):
                if begins[s] == never:
                    here = at.setdefault(event, [])
                    here.append(s)
                    begins[s] = event + len(here) / (len(ordered) + 1)
    return Late(level, tuple(begins), at)


def _asked(
    around: dict[int, tuple[int, ...]],
    ordered: Sequence[Segment],
    level: dict[int, int],
    region: int,
    v: int,
    choice: Choice,
) -> tuple[int, ...]:
    """The segments that must have run before a value can be had, outermost first."""
    chain = around.get(region, ()) if region != OUTSIDE else ()
    if v in level:
        return chain[: chain.index(level[v]) + 1]
    return chain if choice == Choice.RECOMPUTE else ()
