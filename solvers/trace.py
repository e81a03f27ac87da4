"""A choice as the allocator sees it: which blocks the step takes and gives back, in order.

The same step as the referee's (:func:`budgetopt.solvers.memory.simulate`), block by block instead of in sums: the level
after each block that an event takes, and at its end, has the referee's peak of that event as its maximum.
An allocator that hands out blocks (:mod:`budgetopt.solvers.caching`) needs to know them one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .holding import Held, half_lives, holds
from .memory import CODEC_WORKSPACE, normalise
from .problem import Choice, Kind, Problem, Segment
from .replay import Replays
from .segments import late
from .timeline import Timeline, timeline

Name = tuple[str, int]
"""What a block is for: its kind and the number of its storage, operator or value."""


class Action(NamedTuple):
    """At an event, a block is taken (``size`` bytes, more than 0) or given back (minus its bytes)."""

    event: int
    block: int
    size: int


def trace(
    problem: Problem,
    choices: Sequence[Choice],
    pieces: Mapping[int, Sequence[int]] | None = None,
    segments: Sequence[Segment] = (),
) -> tuple[Action, ...]:
    """The blocks of a step under ``choices``, in order. What is resident is there before and not among them.

    Args:
        pieces: the blocks that an operator's workspace consists of, by operator; one block where nothing is said.
    """
    return _Tracer(problem, choices, pieces or {}, segments).actions()


def blocks(
    problem: Problem, choices: Sequence[Choice], segments: Sequence[Segment] = ()
) -> tuple[tuple[Action, ...], list[Name]]:
    """As :func:`trace`, and what each block was taken for, by the number of the block."""
    tracer = _Tracer(problem, choices, {}, segments)
    return tracer.actions(), tracer.names


def alive(problem: Problem, choices: Sequence[Choice], event: int, segments: Sequence[Segment] = ()) -> dict[Name, int]:
    """The blocks that are there when most bytes are during an event: bytes by what each was taken for."""
    actions, names = blocks(problem, choices, segments)
    there: dict[int, int] = {}
    highest: dict[int, int] = {}
    for action in actions:
        if action.event > event:
            break
        if action.size < 0:
            del there[action.block]
            continue
        there[action.block] = action.size
        if action.event == event and sum(there.values()) > sum(highest.values()):
            highest = dict(there)
    highest = max(highest, there, key=lambda blocks: sum(blocks.values()))
    found: dict[Name, int] = {}
    for block, size in highest.items():
        name = names[block]
        found[name] = found.get(name, 0) + size
    return found


class _Tracer:
    """Collects actions by event.

    Attributes:
        names: what each block was taken for.
    """

    def __init__(
        self,
        problem: Problem,
        choices: Sequence[Choice],
        pieces: Mapping[int, Sequence[int]],
        segments: Sequence[Segment],
    ) -> None:
        self._problem, self._line, self._pieces = problem, timeline(problem), pieces
        self._chosen = normalise(problem, choices)
        self._stored = late(problem, self._line, self._chosen, segments)
        self._events: list[list[Action]] = [[] for _ in problem.events]
        self._open: dict[Name, tuple[int, int]] = {}
        self.ending: dict[float, list[Name]] = {}  # what goes back when a segment's pass ends
        self.names: list[Name] = []

    def actions(self) -> tuple[Action, ...]:
        held = self._storages()
        self._halves(held)
        self._workspaces()
        replays = _LoggedReplays(self, self._problem, self._line, self._chosen)
        replays.share(held.halves, {})
        replays.store_late(self._stored, held.wanted, {})
        replays.walk()
        return tuple(action for event in self._events for action in event)

    # What lives from one event to another

    def _storages(self) -> Held:
        """Storages until the user's code and the executor have let go, generator states for as long as they are held.

        Where both happen at one event, storages come first, as they do when a closure's references are dropped."""
        never = len(self._events)
        held = holds(self._problem, self._line, self._chosen, self._stored)
        for storage, (born, died) in enumerate(zip(self._line.born_at, self._line.die_at, strict=True)):
            if born < never:
                self._life(
                    ("storage", storage), self._problem.storages[storage], born, max(died, held.until.get(storage, -1))
                )
        for i, end in held.states:
            self._life(("state", i), self._problem.operators[i].rng_bytes, self._line.run_at[i], end)
        return held

    def _halves(self, held: Held) -> None:
        """Half copies, and what storing them takes on top."""
        for v, at, end in half_lives(self._problem, self._line, self._chosen, held.halves):
            value = self._problem.values[v]
            self._life(("half", v), value.half_bytes, at, end)
            self.passing(at, [min(self._problem.storages[value.storage], CODEC_WORKSPACE)])

    def _workspaces(self) -> None:
        for at, (kind, i) in enumerate(self._problem.events):
            if kind == Kind.RUN:
                self.workspace(at, i)

    def _life(self, name: Name, size: int, start: int, stop: float) -> None:
        if start < stop:
            self.take(start, name, size)
            self.until(stop, name)

    def until(self, stop: float, name: Name) -> None:
        """The block goes back at an event or when a pass ends; never, if that is past the end."""
        if stop != int(stop):
            self.ending.setdefault(stop, []).append(name)
        elif stop < len(self._events):
            self.give(int(stop), name)

    # Single actions

    def take(self, at: int, name: Name, size: int) -> None:
        """A new block; nobody takes one of no bytes."""
        self._open[name] = len(self.names), size
        self.names.append(name)
        if size:
            self._events[at].append(Action(at, self._open[name][0], size))

    def give(self, at: int, name: Name) -> None:
        """The block of that name goes back."""
        block, size = self._open.pop(name)
        if size:
            self._events[at].append(Action(at, block, -size))

    def rename(self, old: Name, new: Name) -> None:
        """The same block, for something else."""
        self._open[new] = self._open.pop(old)

    def passing(self, at: int, sizes: Sequence[int]) -> None:
        """Blocks that are taken together and go back before anything else happens."""
        names = [("passing", number) for number, _ in enumerate(sizes)]
        for name, size in zip(names, sizes, strict=True):
            self.take(at, name, size)
        for name in reversed(names):
            self.give(at, name)

    def workspace(self, at: int, operator: int) -> None:
        """What an operator needs beside its inputs and outputs."""
        self.passing(at, self._pieces.get(operator, [self._problem.operators[operator].workspace]))


class _LoggedReplays(Replays):
    """The referee's replays, which also tell a tracer what becomes of every buffer.

    Nothing is decided here: each rule runs, and what it changed is looked up.
    """

    __slots__ = ("_at", "_tracer")

    def __init__(self, tracer: _Tracer, problem: Problem, line: Timeline, chosen: Sequence[Choice]) -> None:
        super().__init__(problem, line, chosen, list(line.deltas), list(line.tops))
        self._tracer = tracer
        self._at = 0

    def _coded(self, at: int, kind: Kind, value: int) -> None:
        before = self.deltas[at]
        super()._coded(at, kind, value)
        if self.deltas[at] < before:
            self._tracer.give(at, ("decoded", value))

    def _decode(self, at: int, value: int) -> None:
        super()._decode(at, value)
        self._tracer.take(at, ("decoded", value), self._sizes[value])
        if value in self._halves:
            self._tracer.until(self._halves[value], ("decoded", value))

    def _dropped(self, at: int, kind: Kind, value: int) -> None:
        self._at = at
        there = value in self._made
        super()._dropped(at, kind, value)
        if there and value not in self._made:
            self._tracer.give(at, ("made", value))

    def _pass(self, at: int, segment: int) -> None:
        self._at = at
        unstored = set(self._late)
        super()._pass(at, segment)
        for v in sorted(unstored - self._late):
            self._tracer.rename(("made", v), ("late", v))
            self._tracer.until(self._wanted[v], ("late", v))
        for name in self._tracer.ending.pop(self._stored.begins[segment], ()):
            self._tracer.give(at, name)

    def _write(self, writes: tuple[int, ...], readers: dict[int, int]) -> tuple[int, list[int]]:
        grown, again = 0, []
        for w in writes:
            previous = self._problem.values[w].previous
            there = previous in self._made
            size, known = super()._write((w,), readers)
            name = ("again" if known else "made", w)
            if there and previous not in self._made:
                self._tracer.rename(("made", previous), name)
            else:
                self._tracer.take(self._at, name, self._sizes[w])
            grown += size
            again += known
        return grown, again

    def _free(self, i: int, again: list[int], readers: dict[int, int]) -> int:
        self._tracer.workspace(self._at, i)
        before = set(self._made)
        freed = super()._free(i, again, readers)
        for w in again:
            self._tracer.give(self._at, ("again", w))
        for w in sorted(before - self._made):
            self._tracer.give(self._at, ("made", w))
        return freed
