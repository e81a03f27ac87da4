"""Make dropped values again, on paper: which operators a replay runs, and which buffers live meanwhile.

The rules are the executor's (DESIGN §4), so a change here is a change there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .problem import OUTSIDE, Choice, Kind, Problem
from .segments import NONE, Late
from .timeline import Timeline


class Replays:
    """Walks the events of handles and books what unpacking allocates.

    Attributes:
        deltas, tops: of the whole step, changed in place: bytes after, and on top of, each event.
        cost_ns: time of replays so far. counts: how often each operator was replayed.
    """

    __slots__ = (
        "_coded_inputs",
        "_decoded",
        "_halves",
        "_inner",
        "_late",
        "_line",
        "_made",
        "_passing",
        "_pending",
        "_problem",
        "_sizes",
        "_stored",
        "_wanted",
        "chosen",
        "cost_ns",
        "counts",
        "deltas",
        "tops",
    )

    def __init__(
        self, problem: Problem, line: Timeline, chosen: Sequence[Choice], deltas: list[int], tops: list[int]
    ) -> None:
        self._problem, self._line, self.chosen = problem, line, chosen
        self._sizes = [problem.storages[value.storage] for value in problem.values]
        self._made: set[int] = set()
        self._decoded: set[int] = set()
        self._pending = [0] * len(problem.values)
        self._late: set[int] = set()  # to be stored by the pass of a segment that has not come yet
        self._inner = line.inner
        self._stored: Late = NONE
        self._wanted: list[float] = []
        self._passing: dict[float, int] = {}
        self._halves: Mapping[int, float] = {}
        self._coded_inputs: dict[int, list[int]] = {}
        self.deltas, self.tops = deltas, tops
        self.cost_ns = 0
        self.counts = [0] * len(problem.operators)

    def share(self, halves: Mapping[int, float], passing: dict[float, int]) -> None:
        """Let replays read values of other regions in fp16.

        Args:
            halves: until when each such value is held. passing: see :meth:`store_late`.
        """
        self._halves, self._passing = halves, passing
        regions = [value.region for value in self._problem.values]
        for i, (operator, reads) in enumerate(zip(self._problem.operators, self._line.reads, strict=True)):
            coded = [u for u in reads if u in halves and regions[u] != operator.region]
            if coded:
                self._coded_inputs[i] = coded

    def store_late(self, stored: Late, wanted: list[float], passing: dict[float, int]) -> None:
        """Let :meth:`walk` run the passes of segments.

        Args:
            wanted: until when each value may be asked for. passing: bytes that are let go when a pass ends.
        """
        self._stored, self._wanted, self._passing = stored, wanted, passing
        self._late = set(stored.level)
        regions = [value.region for value in self._problem.values]
        self._inner = tuple(
            tuple(u for u in reads if operator.region != OUTSIDE and (regions[u] == operator.region or u in self._late))
            for operator, reads in zip(self._problem.operators, self._line.reads, strict=True)
        )

    def walk(self) -> None:
        """Book every handle event of the step, in order."""
        passes = self._stored.at
        for at, kind, value in self._line.handle_events:
            for segment in passes.get(at, ()) if passes else ():
                self._pass(at, segment)
            choice = self.chosen[value]
            if choice == Choice.FP16:
                self._coded(at, kind, value)
            elif choice == Choice.RECOMPUTE:
                self._dropped(at, kind, value)

    def alone(self, target: int) -> tuple[int, int]:
        """Most bytes of a replay of ``target`` above those of its result, and its time, with nothing made before."""
        spent = self.cost_ns
        deltas, tops, self.deltas, self.tops = self.deltas, self.tops, [0], [0]
        self._replay(0, (target,))
        self._made.discard(target)
        top = self.tops[0]
        self.deltas, self.tops = deltas, tops
        return top, self.cost_ns - spent

    def _coded(self, at: int, kind: Kind, value: int) -> None:
        """Only the decoded copy is booked here: the half copy's life is known beforehand."""
        if kind == Kind.UNPACK and value not in self._decoded:
            self._decode(at, value)
        elif kind == Kind.HANDLE_DIE and value in self._decoded - self._halves.keys():
            self.deltas[at] -= self._sizes[value] if at == self._line.released_at[value] else 0

    def _decode(self, at: int, value: int) -> None:
        self._decoded.add(value)
        self._change(at, self._sizes[value], self._sizes[value])
        if value in self._halves:
            self._let_go(self._halves[value], self._sizes[value])

    def _dropped(self, at: int, kind: Kind, value: int) -> None:
        if kind == Kind.PACK:
            self._pending[value] += 1
        elif kind == Kind.UNPACK:
            if value not in self._made:
                self._replay(at, (value,))
        else:
            self._pending[value] -= 1
            if not self._pending[value] and value in self._made:
                self._made.remove(value)
                self.deltas[at] -= self._sizes[value]

    def _pass(self, at: int, segment: int) -> None:
        """Run a segment again: what it stores stays, and nothing else that is made on the way does."""
        now = self._stored.begins[segment]
        targets = [v for v, level in self._stored.level.items() if level == segment and self._wanted[v] >= now]
        waiting, self._pending = self._pending, [0] * len(self._pending)
        self._replay(at, targets)
        self._pending = waiting
        self._made.difference_update(targets)
        self._late.difference_update(targets)
        for v in targets:
            self._let_go(self._wanted[v], self._sizes[v])
        self._change(at, -self._passing.pop(now, 0), 0)

    def _replay(self, at: int, targets: Sequence[int]) -> None:
        operators, readers = self._needed(targets)
        for i in operators if self._coded_inputs else ():
            for u in self._coded_inputs.get(i, ()):
                if u not in self._decoded:
                    self._decode(at, u)
        level = top = 0
        for i in operators:
            operator = self._problem.operators[i]
            grown, again = self._write(operator.writes, readers)
            level += grown
            top = max(top, level + operator.workspace)
            level -= self._free(i, again, readers)
            self.cost_ns += operator.time_ns
            self.counts[i] += 1
        self._change(at, level, top)

    def _change(self, at: int, level: int, top: int) -> None:
        change(self.deltas, self.tops, at, level, top)

    def _let_go(self, end: float, size: int) -> None:
        let_go(self.deltas, self._passing, end, size)

    def _needed(self, targets: Sequence[int]) -> tuple[list[int], dict[int, int]]:
        """The operators of a replay in forward order, and how many of them read each value it makes.

        A target counts one reader more: whoever asked for it.
        """
        values, inner, chosen, made, late = self._problem.values, self._inner, self.chosen, self._made, self._late
        readers = dict.fromkeys(targets, 1)
        operators: set[int] = set()
        waiting = list(targets)
        while waiting:
            i = values[waiting.pop()].operator
            if i in operators:
                continue
            operators.add(i)
            for u in inner[i]:
                if u in readers:
                    readers[u] += 1
                elif (chosen[u] != Choice.KEEP or u in late) and u not in made:
                    readers[u] = 1
                    waiting.append(u)
        return sorted(operators), readers

    def _write(self, writes: tuple[int, ...], readers: dict[int, int]) -> tuple[int, list[int]]:
        """Bytes that the operator's outputs add, and those outputs that were there already.

        A write in place goes on in the buffer of the previous version if nobody else wants that one.
        """
        grown = 0
        again = []
        for w in writes:
            previous = self._problem.values[w].previous
            if readers.get(previous) == 1 and previous in self._made and not self._pending[previous]:
                self._made.remove(previous)
            else:
                grown += self._sizes[w]
            if w in self._made or (self.chosen[w] == Choice.KEEP and w not in self._late):
                again.append(w)
            else:
                self._made.add(w)
        return grown, again

    def _free(self, i: int, again: list[int], readers: dict[int, int]) -> int:
        """Bytes that nobody needs once operator ``i`` has run."""
        done = []
        for u in self._inner[i]:
            if u in readers:
                readers[u] -= 1
                done.append(u)
        freed = sum(self._sizes[w] for w in again)
        for u in (*done, *self._problem.operators[i].writes):
            if u in self._made and not readers.get(u) and not self._pending[u] and u not in again:
                self._made.remove(u)
                freed += self._sizes[u]
        return freed


def change(deltas: list[int], tops: list[int], at: int, level: int, top: int) -> None:
    """Book bytes that an event adds, and most of them on the way; it may have added others before."""
    deltas[at] += level
    tops[at] = max(tops[at], top) - level


def let_go(deltas: list[int], passing: dict[float, int], end: float, size: int) -> None:
    """Book bytes that go at an event, when a segment's pass ends, or never, if that is past the end."""
    if end != int(end):
        passing[end] = passing.get(end, 0) + size
    elif end < len(deltas):
        deltas[int(end)] -= size
