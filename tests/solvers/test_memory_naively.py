"""The referee against a second one, written from the rules alone: slow, event by event, all sums from scratch."""

from __future__ import annotations

from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from budgetopt.solvers import Choice, Kind, Problem, normalise, simulate
from budgetopt.solvers.memory import CODEC_WORKSPACE

from .steps import network

K, R, H = Choice.KEEP, Choice.RECOMPUTE, Choice.FP16


class Naive:
    """One step under one choice, as the executor would live through it."""

    def __init__(self, problem: Problem, choices: list[Choice]) -> None:
        self.problem, self.choices = problem, normalise(problem, choices)
        self.alive: set[int] = set()  # storages that the user's code holds
        self.ran: set[int] = set()
        self.packed: set[int] = set()
        self.dead: set[int] = set()  # handles
        self.decoded: set[int] = set()
        self.buffers: dict[int, int] = {}  # value -> bytes of the copy made again
        self.closures = {d: self._closure(d) for d in set(problem.handles) if self.choices[d] == R}
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
            first = all(p.handles[h] != value for h in self.packed)
            self.packed.add(index)
            if self.choices[value] == H and first:
                self.cost += p.values[value].codec_ns
                return self.level() + min(self.size(value), CODEC_WORKSPACE)
        elif kind == Kind.HANDLE_DIE:
            self.dead.add(index)
            value = p.handles[index]
            if not self.waiting(value):
                self.buffers.pop(value, None)
        elif kind == Kind.UNPACK:
            value = p.handles[index]
            if self.choices[value] == H:
                self.decoded.add(value)
            elif self.choices[value] == R and value not in self.buffers:
                return self.replay(value)
        return self.level()

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
        other = self.problem.values[value].region != self.problem.operators[reader].region
        return other or self.choices[value] == K

    def _closure(self, target: int) -> tuple[set[int], set[int]]:
        """Operators that may have to run for ``target``, and the stored values that they read."""
        operators, stored = set(), set()

        def visit(value: int) -> None:
            i = self.problem.values[value].operator
            operators.add(i)
            for u in self.problem.operators[i].reads:
                if self.available(i, u):
                    stored.add(u)
                else:
                    visit(u)

        visit(target)
        return operators, stored

    def level(self) -> int:
        p = self.problem
        wanted = {d for d in self.closures if self.open(d)}
        held = {v for d in wanted for v in self.closures[d][1]}
        held |= {v for v, choice in enumerate(self.choices) if choice == K and self.open(v)}
        storages = {p.values[v].storage for v in held if p.values[v].operator in self.ran} | self.alive
        states = {i for d in wanted for i in self.closures[d][0]} & self.ran
        halves = {p.handles[h] for h in self.packed if self.choices[p.handles[h]] == H and self.open(p.handles[h])}
        return (
            p.resident
            + sum(p.storages[s] for s in storages)
            + sum(p.operators[i].rng_bytes for i in states)
            + sum(p.values[v].half_bytes for v in halves)
            + sum(self.size(v) for v in halves & self.decoded)
            + sum(self.buffers.values())
        )

    def replay(self, target: int) -> int:
        p = self.problem
        order: set[int] = set()

        def visit(value: int) -> None:
            i = p.values[value].operator
            order.add(i)
            for u in p.operators[i].reads:
                if not self.available(i, u) and u not in self.buffers:
                    visit(u)

        visit(target)
        before = set(self.buffers)
        peak, todo = 0, sorted(order)
        while todo:
            i = todo.pop(0)
            self.cost += p.operators[i].time_ns
            later = {u for j in todo for u in p.operators[j].reads} | {target}
            spare = []
            for w in p.operators[i].writes:
                q = p.values[w].previous
                if q in self.buffers and not self.waiting(q) and q not in later:
                    del self.buffers[q]
                if w in self.buffers or self.choices[w] == K:
                    spare.append(self.size(w))
                else:
                    self.buffers[w] = self.size(w)
            peak = max(peak, self.level() + sum(spare) + p.operators[i].workspace)
            for u in set(self.buffers) - before:
                if u not in later and not self.waiting(u):
                    del self.buffers[u]
        return peak


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_both_referees_agree_at_every_event(random: Random) -> None:
    problem = network(random, random.randint(1, 3), random.randint(1, 8)).problem()
    for _ in range(3):
        choices = [random.choice([K, R, H]) for _ in problem.values]
        naive, seen = Naive(problem, choices), simulate(problem, choices)
        assert list(seen.peaks) == naive.peaks
        recorded = {
            problem.values[v].region for v in problem.handles if seen.choices[v] != K and problem.values[v].region >= 0
        }
        assert seen.cost_ns == naive.cost + sum(problem.regions[g].record_ns for g in recorded)
