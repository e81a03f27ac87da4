"""The referee against a second one, written from the rules alone: slow, event by event, all sums from scratch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from budgetopt.solvers import Choice, Kind, Problem, Segment, normalise, simulate
from budgetopt.solvers.memory import CODEC_WORKSPACE

from .steps import network, rows

K, R, H = Choice.KEEP, Choice.RECOMPUTE, Choice.FP16


class Naive:
    """One step under one choice, as the executor would live through it."""

    def __init__(self, problem: Problem, choices: list[Choice], segments: Sequence[Segment] = ()) -> None:
        self.problem, self.choices = problem, normalise(problem, choices)
        self.alive: set[int] = set()  # storages that the user's code holds
        self.ran: set[int] = set()
        self.packed: set[int] = set()
        self.dead: set[int] = set()  # handles
        self.decoded: set[int] = set()
        self.halved: set[int] = set()
        self.buffers: dict[int, int] = {}  # value -> bytes of the copy made again
        self.segments = segments
        self.late = self._late()  # value -> the segment that has not stored it yet
        self.stored: set[int] = set()
        self.passed: set[Segment] = set()
        self.known: dict[tuple[int, int], tuple[set[int], set[int]]] = {}
        self.cost = 0
        self.peaks = [self._live(*event) for event in problem.events]

    def _live(self, kind: Kind, index: int) -> int:
        p = self.problem
        if kind == Kind.RUN:
            self.alive |= set(p.operators[index].births)
            self.ran.add(index)
            return self.level() + p.operators[index].workspace
        if kind == Kind.DIE:
            self.alive.discard(index)
        elif kind == Kind.PACK:
            value = p.handles[index]
            self.packed.add(index)
            if self.choices[value] == H and value not in self.halved:
                return self.halve(value)
        elif kind == Kind.EXIT:
            return max([self.halve(v) for v in range(len(p.values)) if self.leaves(v, index)], default=self.level())
        elif kind == Kind.HANDLE_DIE:
            self.dead.add(index)
            value = p.handles[index]
            if not self.waiting(value):
                self.buffers.pop(value, None)
        elif kind == Kind.UNPACK:
            return self._unpack(p.handles[index])
        return self.level()

    def _unpack(self, value: int) -> int:
        peak = 0
        if self.choices[value] == R:
            region = self.problem.values[value].region
            peak = self.ready([s for s in self.segments if s.first <= region <= s.last])
        elif value in self.late:
            peak = self.ready([s for s in self.segments if self._inside(self.late[value], s)])
        if self.choices[value] == H:
            self.decoded.add(value)
        elif self.choices[value] == R and value not in self.buffers:
            return max(peak, self.replay([value]))
        return max(peak, self.level())

    def _inside(self, inner: Segment, outer: Segment) -> bool:
        return outer.first <= inner.first and inner.last <= outer.last

    def shared(self, value: int) -> bool:
        """Other regions read it, too, and they read what is stored in fp16."""
        return self.choices[value] == H and self.problem.values[value].crossing

    def leaves(self, value: int, region: int) -> bool:
        """Whether the end of the region's forward is the time to store the value in fp16."""
        mine = self.problem.values[value]
        there = mine.storage in self.alive or self.open(value)
        return self.shared(value) and mine.region == region and there and value not in self.halved

    def halve(self, value: int) -> int:
        self.halved.add(value)
        self.cost += self.problem.values[value].codec_ns
        return self.level() + min(self.size(value), CODEC_WORKSPACE)

    # Segments

    def _late(self) -> dict[int, Segment]:
        p = self.problem
        found = {}
        for v, value in enumerate(p.values):
            users = {value.region} | {o.region for o in p.operators if o.region >= 0 and v in o.reads}
            region = -1
            for kind, index in p.events:
                if kind in (Kind.ENTER, Kind.EXIT):
                    region = index if kind == Kind.ENTER else -1
                elif kind == Kind.PACK and p.handles[index] == v:
                    users.add(region)
            holding = [s for s in self.segments if all(s.first <= g <= s.last for g in users)]
            if holding and self._may_be_late(v):
                found[v] = min(holding, key=lambda s: s.last - s.first)
        return found

    def _may_be_late(self, v: int) -> bool:
        value = self.problem.values[v]
        if self.choices[v] != K or not value.last or value.operator < 0 or value.region < 0:
            return False
        return (value.droppable or value.crossing) and self._again(v)

    def _again(self, v: int) -> bool:
        """Whether its operator is replayable, and so are those of the earlier versions that it reads."""
        operator = self.problem.operators[self.problem.values[v].operator]
        earlier = [u for u in operator.reads if not self.problem.values[u].last]
        own = all(self.problem.values[u].region == operator.region for u in earlier)
        return operator.replayable and own and all(self._again(u) for u in earlier)

    def ready(self, segments: Iterable[Segment]) -> int:
        peak = 0
        for segment in sorted(segments, key=lambda s: (s.first, -s.last)):
            if segment not in self.passed:
                self.passed.add(segment)
                reached = self.reached()
                targets = [v for v, s in self.late.items() if s == segment and v in reached[1]]
                peak = max(peak, self.replay(targets, stay=False))
                for v in targets:
                    del self.late[v]
                    self.stored.add(v)
        return peak

    def size(self, value: int) -> int:
        return self.problem.storages[self.problem.values[value].storage]

    def waiting(self, value: int) -> bool:
        """A dropped value that autograd may still ask for; only what is packed by now."""
        mine = {h for h in self.packed if self.problem.handles[h] == value}
        return self.choices[value] == R and bool(mine - self.dead)

    def open(self, value: int) -> bool:
        """Some handle of the value, packed by now or later, is not dead yet."""
        return any(v == value and h not in self.dead for h, v in enumerate(self.problem.handles))

    def available(self, reader: int, value: int) -> bool:
        if value in self.late:
            return False
        other = self.problem.values[value].region != self.problem.operators[reader].region
        return other or self.choices[value] == K

    def reached(self) -> tuple[set[int], set[int]]:
        """Operators that may have to run for open handles, and the values that are reached on the way."""
        key = len(self.dead), len(self.late)  # all that it depends on, and neither ever grows back
        if key in self.known:
            return self.known[key]
        operators, values = self.known[key] = set(), set()

        def visit(value: int) -> None:
            i = self.problem.values[value].operator
            if value in values and i in operators:
                return
            values.add(value)
            operators.add(i)
            for u in self.problem.operators[i].reads:
                if self.available(i, u):
                    values.add(u)
                else:
                    visit(u)

        for value in set(self.problem.handles):
            if self.open(value) and (self.choices[value] == R or value in self.late):
                visit(value)
        return operators, values

    def level(self) -> int:
        p = self.problem
        operators, reached = self.reached()
        kept = {v for v, choice in enumerate(self.choices) if choice == K and self.open(v)}
        late = self.stored | set(self.late)
        held = (reached | kept) - late
        across = {v for v in held if self._read_across(v, operators)}
        held = {v for v in held if self.choices[v] == K or (v in across and not self.shared(v))}
        storages = {p.values[v].storage for v in held if p.values[v].operator in self.ran} | self.alive
        states = operators & self.ran
        halves = {v for v in self.halved if self.open(v)}
        halves |= {v for v in self.halved if self.shared(v) and (v in across or p.values[v].storage in self.alive)}
        return (
            p.resident
            + sum(p.storages[s] for s in storages)
            + sum(p.operators[i].rng_bytes for i in states)
            + sum(p.values[v].half_bytes for v in halves)
            + sum(self.size(v) for v in halves & self.decoded)
            + sum(self.buffers.values())
            + sum(self.size(v) for v in self.stored & (reached | kept))
        )

    def _read_across(self, value: int, operators: set[int]) -> bool:
        readers = (i for i in operators if value in self.problem.operators[i].reads)
        return any(self.available(i, value) for i in readers)

    def replay(self, targets: list[int], stay: bool = True) -> int:
        p = self.problem
        order: set[int] = set()

        def visit(value: int) -> None:
            i = p.values[value].operator
            order.add(i)
            for u in p.operators[i].reads:
                if not self.available(i, u) and u not in self.buffers:
                    visit(u)

        for target in targets:
            visit(target)
        self.decoded |= {u for i in order for u in p.operators[i].reads if self.shared(u) and self.available(i, u)}
        before = set(self.buffers)
        peak, todo = 0, sorted(order)
        while todo:
            i = todo.pop(0)
            self.cost += p.operators[i].time_ns
            later = {u for j in todo for u in p.operators[j].reads} | set(targets)
            spare = []
            for w in p.operators[i].writes:
                q = p.values[w].previous
                waits = stay and self.waiting(q)
                if q in self.buffers and not waits and q not in later:
                    del self.buffers[q]
                if w in self.buffers or (self.choices[w] == K and w not in self.late):
                    spare.append(self.size(w))
                else:
                    self.buffers[w] = self.size(w)
            peak = max(peak, self.level() + sum(spare) + p.operators[i].workspace)
            for u in set(self.buffers) - before:
                if u not in later and not (stay and self.waiting(u)):
                    del self.buffers[u]
        if not stay:
            for target in targets:
                self.buffers.pop(target)
        return peak


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_both_referees_agree_at_every_event(random: Random) -> None:
    problem = network(random, random.randint(1, 3), random.randint(1, 8)).problem()
    for _ in range(3):
        check(problem, [random.choice([K, R, H]) for _ in problem.values])


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_with_segments(random: Random) -> None:
    problem = network(random, random.randint(2, 6), random.randint(1, 5)).problem()
    for _ in range(3):
        choices = [random.choice([K, K, R, H]) for _ in problem.values]
        check(problem, choices, rows(random, len(problem.regions)))


def check(problem: Problem, choices: list[Choice], segments: Sequence[Segment] = ()) -> None:
    naive, seen = Naive(problem, choices, segments), simulate(problem, choices, segments)
    assert list(seen.peaks) == naive.peaks
    recorded = {
        problem.values[v].region for v in problem.handles if seen.choices[v] != K and problem.values[v].region >= 0
    }
    recorded |= {problem.values[v].region for v in (*naive.late, *naive.stored)}
    between = {v for v in range(len(problem.values)) if naive.shared(v)}
    recorded |= {problem.values[v].region for v in between}
    recorded |= {o.region for o in problem.operators if o.region >= 0 and between & {*o.reads}}
    assert seen.cost_ns == naive.cost + sum(problem.regions[g].record_ns for g in recorded)
