"""The referee: replay a choice on the recorded step, in plain Python, and say its exact peak and cost.

Every solver's answer passes through :func:`simulate`. What is held, and until when:

* A storage counts once, from its birth until both the user's code (its ``DIE``) and the executor let go.
* A KEEP value is held until the last death among its own handles and the handles of every RECOMPUTE
  value whose replay reads it; one that neither is saved nor read by a replay is not held at all.
  A value of another region that a replay reads is held in the same way.
* An operator that may be replayed holds its ``rng_bytes`` for as long as what it reads is held.
* A value that crosses regions, stored in fp16, holds its half copy from its first pack, or the end of its region's
  forward if that is earlier, for as long as the user's code holds its storage, handles wait or replays of other
  regions may read it. The first unpack or such replay adds a decoded copy, which stays as long. Replays of its own
  region make it again.
* An FP16 value holds its half copy from its first pack to the death of its last handle; the first
  unpack adds a decoded copy. Replays want exact inputs, so one that reads it makes it again, and what
  that needs is held for the handles of the replayed value, not for those of the FP16 one.
* A KEEP value that a segment stores (:mod:`budgetopt.solvers.segments`) is held from the segment's pass on; until
  then what its operator reads is held, as for a value that is made again.
* A RECOMPUTE value is made at its first unpack (:mod:`budgetopt.solvers.replay`) and stays until its
  last handle dies; what was made on the way stays only if handles of its own are waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf
from operator import add
from time import monotonic

from .choices import count, every
from .holding import book, half_lives, hold, users
from .problem import OUTSIDE, Choice, Problem, Segment, Value
from .replay import Replays, change
from .segments import Late, late
from .timeline import Timeline, timeline
from .windows import Window

CODEC_WORKSPACE = 4 << 20
"""Most bytes that storing a value to fp16 needs on top of the value and its half copy."""

_FEW_CHOICES = 1000  # so few are all tried
_MINIMUM_EVENTS = 1_000_000  # events replayed by `minimum` at most: about a second


@dataclass(frozen=True, slots=True)
class Simulation:
    """What the referee says of one choice.

    Attributes:
        choices: normalised, one per value. peak: bytes, resident included. peak_event: its first position.
        cost_ns: replays, codecs and recording. replays: how often each operator is run again.
        peaks: highest bytes at each event, its workspace included. segments: as given. levels: the segment that
            stores a value, for all values that one does.
    """

    choices: tuple[Choice, ...]
    peak: int
    peak_event: int
    cost_ns: int
    replays: tuple[int, ...]
    peaks: tuple[int, ...]
    segments: tuple[Segment, ...] = ()
    levels: dict[int, int] = field(default_factory=dict)

    def rank(self, budget: int) -> tuple[int, int]:
        """Smaller is better: within the budget by cost, beyond it by peak."""
        return max(0, self.peak - budget), self.cost_ns


def simulate(problem: Problem, choices: Sequence[Choice], segments: Sequence[Segment] = ()) -> Simulation:
    """The exact peak and cost of ``choices`` (one per value, normalised first) on the recorded step.

    Raises:
        ValueError: segments overlap without one lying in the other.
    """
    line = timeline(problem)
    chosen = normalise(problem, choices)
    stored = late(problem, line, chosen, segments)
    deltas, tops = list(line.deltas), list(line.tops)
    passing: dict[float, int] = {}
    held = hold(problem, line, chosen, deltas, stored, passing)
    codec_ns = _store_halves(problem, half_lives(problem, line, chosen, held.halves), deltas, tops, passing)
    replays = Replays(problem, line, chosen, deltas, tops)
    if held.halves:
        replays.share(held.halves, passing)
    if stored.level:
        replays.store_late(stored, held.wanted, passing)
    replays.walk()
    levels = accumulate(deltas, initial=problem.resident)
    next(levels)
    peaks = tuple(map(add, levels, tops))
    peak = max(peaks, default=problem.resident)
    return Simulation(
        choices=chosen,
        peak=peak,
        peak_event=peaks.index(peak) if peaks else OUTSIDE,
        cost_ns=replays.cost_ns + codec_ns + _record_ns(problem, line, chosen, stored),
        replays=tuple(replays.counts),
        peaks=peaks,
        segments=tuple(segments),
        levels=stored.level,
    )


def fixed_keeps(problem: Problem) -> frozenset[int]:
    """Values that every choice keeps; worked out once per recording.

    They are: what is not droppable, what no region or no recorded operator makes, what an operator that
    is not replayable writes (unless it is saved, offered in fp16 and read by nothing replayable: then it is
    kept or stored in fp16), and what an operator writes that reads an earlier version of a storage which
    cannot be made again. Among them are earlier versions: for those KEEP means that a handle is an alias
    of the storage, as autograd's own would be.
    """
    return timeline(problem).kept


def decisions(problem: Problem) -> tuple[int, ...]:
    """Values that may be chosen, in order: last versions that :func:`fixed_keeps` leaves free."""
    return timeline(problem).decided


def windows(problem: Problem) -> tuple[Window, ...]:
    """The event list in consecutive windows: forwards and backwards of regions, and the gaps between."""
    return timeline(problem).windows


def window_peaks(problem: Problem, simulation: Simulation) -> tuple[int, ...]:
    """Highest bytes in each of :func:`windows`."""
    return tuple(max(simulation.peaks[w.start : w.stop], default=problem.resident) for w in windows(problem))


def normalise(problem: Problem, choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """The choices that the executor really acts on: what cannot be chosen gets its only legal choice."""
    line = timeline(problem)
    return tuple(
        _kept(line, v, value, choice) if v in line.kept else _legal(line, v, value, choice)
        for v, (value, choice) in enumerate(zip(problem.values, choices, strict=True))
    )


def _kept(line: Timeline, v: int, value: Value, choice: Choice) -> Choice:
    return Choice.FP16 if v in line.shared and (value.halved or choice == Choice.FP16) else Choice.KEEP


def _legal(line: Timeline, v: int, value: Value, choice: Choice) -> Choice:
    if not value.last:
        return Choice.RECOMPUTE
    if v in line.coded:
        return Choice.KEEP if choice == Choice.RECOMPUTE else choice
    if choice != Choice.FP16:
        return choice
    if not value.half_bytes:
        return Choice.KEEP
    return choice if line.saved[v] else Choice.RECOMPUTE


def _store_halves(
    problem: Problem,
    lives: Iterable[tuple[int, int, float]],
    deltas: list[int],
    tops: list[int],
    passing: dict[float, int],
) -> int:
    codec_ns = 0
    for v, at, end in lives:
        value = problem.values[v]
        change(deltas, tops, at, 0, value.half_bytes + min(problem.storages[value.storage], CODEC_WORKSPACE))
        book(deltas, value.half_bytes, at, end, passing)
        tops[at] -= value.half_bytes
        codec_ns += value.codec_ns
    return codec_ns


def _record_ns(problem: Problem, line: Timeline, chosen: Sequence[Choice], stored: Late) -> int:
    """A region is recorded as soon as one of its saved values, or what it reads, is not kept from the forward on."""
    recorded = {
        value.region
        for value, choice, saved in zip(problem.values, chosen, line.saved, strict=True)
        if saved and choice != Choice.KEEP
    }
    recorded |= {problem.values[v].region for v in stored.level}
    recorded |= users(problem, line, chosen)
    return sum(problem.regions[g].record_ns for g in recorded)


def minimum(problem: Problem, tries: int = 300, deadline: float = inf) -> tuple[int, tuple[Choice, ...]]:
    """Smallest peak (bytes) that the referee finds, and a choice that reaches it.

    Exact where a problem has no more than 1000 choices: all are tried. Else an upper bound of the true
    minimum, reached by a real choice: drop everything, then change one value at a time, alike in all regions
    of its kind, beginning with the kind where the peak is, until nothing helps. With fp16 the same from the
    best exact choice and from storing everything in fp16, so that fp16 is never worse than exact choices.

    Args:
        tries: simulations of one descent at most; fewer on long recordings. Counted, so that equal input has
            equal answers.
        deadline: ``time.monotonic()`` after which the descent stops where it is.
    """
    if count(problem) <= _FEW_CHOICES:
        best = min((simulate(problem, choices) for choices in every(problem)), key=_peak)
        return best.peak, best.choices
    tries = min(tries, max(8, _MINIMUM_EVENTS // (len(problem.events) + 1)))
    if all(not problem.values[v].half_bytes for v in decisions(problem)):
        best = _descent(problem, [Choice.RECOMPUTE] * len(problem.values), tries, deadline)
        return best.peak, best.choices
    exact = replace(problem, values=tuple(replace(value, half_bytes=0) for value in problem.values))
    halves = [Choice.FP16 if value.half_bytes else Choice.RECOMPUTE for value in problem.values]
    starts = (minimum(exact, tries, deadline)[1], halves)
    best = min((_descent(problem, start, tries // 2, deadline) for start in starts), key=_peak)
    return best.peak, best.choices


def _descent(problem: Problem, start: Sequence[Choice], tries: int, deadline: float) -> Simulation:
    """Passes over all moves, until one changes nothing or the tries are used up."""
    best, before = simulate(problem, start), None
    left = tries - 1
    while best is not before and left > 0:
        before = best
        for values, choice in _moves(problem, best):
            if left <= 0 or monotonic() > deadline:
                return best
            if all(best.choices[v] == choice for v in values):
                continue
            changed = list(best.choices)
            for v in values:
                changed[v] = choice
            left -= 1
            best = min(best, simulate(problem, changed), key=_peak)
    return best


def _peak(simulation: Simulation) -> int:
    return simulation.peak


def _moves(problem: Problem, start: Simulation) -> Iterable[tuple[list[int], Choice]]:
    """Values at the same place of all regions of one kind, each with each legal choice; the peak's kind first."""
    names = [region.kind or f"region {g}" for g, region in enumerate(problem.regions)]
    alike: dict[tuple[str, int], list[int]] = {}
    seen = [0] * len(problem.regions)
    for v in decisions(problem):
        region = problem.values[v].region
        alike.setdefault((names[region], seen[region]), []).append(v)
        seen[region] += 1
    at = next((w.region for w in windows(problem) if w.start <= start.peak_event < w.stop), OUTSIDE)
    first = "" if at == OUTSIDE else names[at]
    for _, values in sorted(alike.items(), key=lambda item: item[0][0] != first):
        for choice in Choice:
            if choice != Choice.FP16 or problem.values[values[0]].half_bytes:
                yield values, choice
