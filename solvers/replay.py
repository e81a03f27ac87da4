"""Make dropped values again, on paper: which operators a replay runs, and which buffers live meanwhile.

The rules are the executor's (DESIGN §4), so a change here is a change there.
"""

from __future__ import annotations

from collections.abc import Sequence

from .problem import Choice, Kind, Problem
from .timeline import Timeline


class Replays:
    """Walks the events of handles and books what unpacking allocates.

    Attributes:
        deltas, tops: of the whole step, changed in place: bytes after, and on top of, each event.
        cost_ns: time of replays so far. counts: how often each operator was replayed.
    """

    __slots__ = (
        "_decoded",
        "_line",
        "_made",
        "_pending",
        "_problem",
        "_sizes",
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
        self.deltas, self.tops = deltas, tops
        self.cost_ns = 0
        self.counts = [0] * len(problem.operators)

    def walk(self) -> None:
        """Book every handle event of the step, in order."""
        for at, kind, value in self._line.handle_events:
            choice = self.chosen[value]
            if choice == Choice.FP16:
                self._coded(at, kind, value)
            elif choice == Choice.RECOMPUTE:
                self._dropped(at, kind, value)

    def alone(self, target: int) -> tuple[int, int]:
        """Most bytes of a replay of ``target`` above those of its result, and its time, with nothing made before."""
        spent = self.cost_ns
        deltas, tops, self.deltas, self.tops = self.deltas, self.tops, [0], [0]
        self._replay(0, target)
        self._made.discard(target)
        top = self.tops[0]
        self.deltas, self.tops = deltas, tops
        return top, self.cost_ns - spent

    def _coded(self, at: int, kind: Kind, value: int) -> None:
        """Only the decoded copy is booked here: the half copy's life is known beforehand."""
        if kind == Kind.UNPACK and value not in self._decoded:
            self._decoded.add(value)
            self.deltas[at] += self._sizes[value]
        elif kind == Kind.HANDLE_DIE and at == self._line.released_at[value] and value in self._decoded:
            self.deltas[at] -= self._sizes[value]

    def _dropped(self, at: int, kind: Kind, value: int) -> None:
        if kind == Kind.PACK:
            self._pending[value] += 1
        elif kind == Kind.UNPACK:
            if value not in self._made:
                self._replay(at, value)
        else:
            self._pending[value] -= 1
            if not self._pending[value] and value in self._made:
                self._made.remove(value)
                self.deltas[at] -= self._sizes[value]

    def _replay(self, at: int, target: int) -> None:
        operators, readers = self._needed(target)
        level = top = 0
        for i in operators:
            operator = self._problem.operators[i]
            grown, again = self._write(operator.writes, readers)
            level += grown
            top = max(top, level + operator.workspace)
            level -= self._free(i, again, readers)
            self.cost_ns += operator.time_ns
            self.counts[i] += 1
        self.deltas[at] += level
        self.tops[at] = max(self.tops[at], top - level)

    def _needed(self, target: int) -> tuple[list[int], dict[int, int]]:
        """The operators of a replay in forward order, and how many of them read each value it makes.

        The target counts one reader more: the backward pass that asked for it.
        """
        values, inner, chosen, made = self._problem.values, self._line.inner, self.chosen, self._made
        readers = {target: 1}
        operators: set[int] = set()
        waiting = [target]
        while waiting:
            i = values[waiting.pop()].operator
            if i in operators:
                continue
            operators.add(i)
            for u in inner[i]:
                if u in readers:
                    readers[u] += 1
                elif chosen[u] != Choice.KEEP and u not in made:
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
            if w in self._made or self.chosen[w] == Choice.KEEP:
                again.append(w)
            else:
                self._made.add(w)
        return grown, again

    def _free(self, i: int, again: list[int], readers: dict[int, int]) -> int:
        """Bytes that nobody needs once operator ``i`` has run."""
        done = []
        for u in self._line.inner[i]:
            if u in readers:
                readers[u] -= 1
                done.append(u)
        freed = sum(self._sizes[w] for w in again)
        for u in (*done, *self._problem.operators[i].writes):
            if u in self._made and not readers.get(u) and not self._pending[u] and u not in again:
                self._made.remove(u)
                freed += self._sizes[u]
        return freed
