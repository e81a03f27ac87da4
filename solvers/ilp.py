"""The whole model as one integer program, solved through PuLP and corrected by the referee.

Variables (legend of DESIGN, after torch's ``sac_ilp``):

* k_v, h_v in {0, 1}: value v is kept, or kept in fp16.
* r_i in [0, 1]: operator i is replayed; integral by itself once k and h are.
* a_g in [0, 1]: region g is recorded; integral likewise.
* P_g >= 0: bytes that the regions up to g hold between their passes. Stages refer to it, so they stay sparse.

The program's stages are not the step (see :mod:`budgetopt.solvers.stages`), so up to three rounds are
solved, each with the stages of a window shifted by what the referee saw there; then a repair or a polish
by the referee, and the greedy answer if that is cheaper.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from time import monotonic

import pulp

from .answer import answer, infeasible
from .backends import Outcome, run
from .errors import SolverError
from .greedy import descend, polish, search
from .memory import Simulation, simulate, window_peaks
from .problem import Choice, Problem, Solution
from .stages import Stage, Stages, stages, useful
from .timeline import timeline

_ROUNDS = 3
_SCALE = 100.0  # the budget, in units of the program: coefficients stay between 1e-6 and 1e2
_UNUSED = 0.005  # share of the budget that is not worth another round


def ilp(problem: Problem, backend: str = "auto", time_limit: float = 10.0, gap: float = 0.01) -> Solution:
    """The cheapest choice that the program finds within the budget, never worse than the greedy one.

    ``time_limit`` is seconds for everything; ``gap`` the relative distance from the program's optimum at
    which an engine may stop. ``bound_ns`` is the smallest bound proven in any round, that is, for whichever
    of the rounds' programs is the least tight.

    Raises:
        InfeasibleError: neither the program nor the heuristics found a choice that the referee accepts.
        SolverError: ``backend`` is unknown.
    """
    deadline = monotonic() + time_limit
    kept = simulate(problem, [Choice.KEEP] * len(problem.values))
    if kept.peak <= problem.budget and kept.cost_ns == 0:
        return answer(problem, kept, "ilp", "optimal")
    heuristic = search(problem, monotonic() + time_limit / 3)
    rounds = _Rounds(problem, backend, gap, deadline)
    rounds.solve()
    best = _cheapest(problem, [rounds.best, heuristic])
    if best is None:
        raise infeasible(problem)
    return _judged(problem, polish(problem, best, deadline), rounds, gap, best is heuristic)


def _judged(problem: Problem, best: Simulation, rounds: _Rounds, gap: float, by_heuristic: bool) -> Solution:
    name = f"ilp, {rounds.engine}" if rounds.engine else "ilp"
    if rounds.note:
        return answer(problem, best, f"greedy ({rounds.note})")
    solution = answer(problem, best, f"{name}; greedy answer was cheaper" if by_heuristic else name, "feasible")
    solution = replace(solution, bound_ns=min(rounds.bound_ns or 0, best.cost_ns))
    return replace(solution, status="optimal") if solution.gap <= gap else solution


def _cheapest(problem: Problem, found: Iterable[Simulation | None]) -> Simulation | None:
    fitting = [s for s in found if s is not None and s.peak <= problem.budget]
    return min(fitting, key=lambda s: (s.cost_ns, s.peak), default=None)


@dataclass
class _Rounds:
    """Solve, let the referee look, shift the stages of each window by what it saw, solve again."""

    problem: Problem
    backend: str
    gap: float
    deadline: float
    best: Simulation | None = None
    bound_ns: int | None = None
    engine: str = ""
    note: str = ""
    shifts: dict[int, int] = field(default_factory=dict)

    def solve(self) -> None:
        rows = stages(self.problem)
        for _ in range(_ROUNDS):
            if monotonic() > self.deadline - 0.1:
                break
            found = self._round(rows)
            if found is None or not self._again(found):
                break
            for w, seen, counted in _windows(self.problem, rows, found):
                self.shifts[w] = seen - counted

    def _round(self, rows: Stages) -> Simulation | None:
        # The deadline leaves a tenth for what follows the engine: reading, referee, repair.
        program = Program(self.problem, rows, self.shifts)
        left = 0.9 * (self.deadline - monotonic())
        try:
            outcome = run(program.program, self.backend, max(0.1, left), self.gap)
        except SolverError as error:
            self.note = str(error)
            return None
        self.engine = outcome.engine
        self._bound(program.cost_ns(outcome.bound))
        if not outcome.found:
            return None
        found = simulate(self.problem, program.choices(outcome))
        self._improve(found)
        return found

    def _bound(self, bound_ns: int) -> None:
        self.bound_ns = bound_ns if self.bound_ns is None else min(self.bound_ns, bound_ns)

    def _improve(self, found: Simulation) -> None:
        fitting = descend(self.problem, found, self.deadline)
        if fitting.peak <= self.problem.budget:
            self.best = _cheapest(self.problem, [self.best, fitting])

    def _again(self, found: Simulation) -> bool:
        """Over the budget, or well under it at a cost: the constants were wrong."""
        slack = self.problem.budget - found.peak
        return slack < 0 or (slack > _UNUSED * self.problem.budget and found.cost_ns > 0)


def _windows(problem: Problem, rows: Stages, found: Simulation) -> Iterable[tuple[int, int, int]]:
    """Of each window: what the referee saw, and what the stages count, unshifted."""
    counted: dict[int, int] = {}
    for row, level in zip(rows.rows, rows.levels(found.choices), strict=True):
        counted[row.window] = max(counted.get(row.window, 0), level)
    seen = window_peaks(problem, found)
    return [(w, seen[w], level) for w, level in counted.items()]


class Program:
    """One round's program, in PuLP. Names are x0, x1, ... because engines choke on others."""

    def __init__(self, problem: Problem, rows: Stages, shifts: dict[int, int]) -> None:
        self._problem, self._line = problem, timeline(problem)
        self._values, self._operators = useful(problem)
        self.program = pulp.LpProblem("budgetopt", pulp.LpMinimize)
        self._count = self._rows = 0
        self._variables(rows)
        self._replay_rules()
        self._record_rules()
        self._stage_rules(rows, shifts)
        self._objective()

    def choices(self, outcome: Outcome) -> list[Choice]:
        """The choice per value that an engine's answer means."""
        chosen = [Choice.RECOMPUTE] * len(self._problem.values)
        for (v, choice), variable in self._store.items():
            if outcome.values[variable.name] > 0.5:
                chosen[v] = choice
        return chosen

    def cost_ns(self, objective: float) -> int:
        """Nanoseconds of a value of the objective, rounded down so that a bound stays one."""
        return int(objective * self._unit_ns * (1 - 1e-9))

    def _new(self, upper: float | None = 1.0, whole: bool = False) -> pulp.LpVariable:
        self._count += 1
        return self.program.add_variable(
            f"x{self._count - 1}", 0, upper, pulp.LpInteger if whole else pulp.LpContinuous
        )

    def _row(self, terms: dict[pulp.LpVariable, float], sense: int, right: float) -> None:
        row = pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, rhs=right)
        self._rows += 1
        self.program.addConstraint(row, f"c{self._rows}")

    def _variables(self, rows: Stages) -> None:
        values, saved = self._problem.values, self._line.saved
        self._store = {(v, Choice.KEEP): self._new(whole=True) for v in self._values}
        self._store |= {
            (v, Choice.FP16): self._new(whole=True) for v in self._values if saved[v] and values[v].half_bytes
        }
        self._replayed = {i: self._new() for i in self._operators}
        self._recorded = {values[v].region: self._new() for v in self._values if saved[v]}
        self._prefix = {g: self._new(upper=None) for g in sorted(rows.held)}

    def _stored(self, v: int, exact: bool) -> dict[pulp.LpVariable, float]:
        """k_v, and h_v unless exact bits are asked for; nothing for a value that cannot be stored."""
        choices = (Choice.KEEP,) if exact else (Choice.KEEP, Choice.FP16)
        return {self._store[v, choice]: 1.0 for choice in choices if (v, choice) in self._store}

    def _replay_rules(self) -> None:
        """Stored at most once. Saved, not stored: replayed. Read by a replay, not kept: replayed."""
        values, line = self._problem.values, self._line
        for v, saved in enumerate(line.saved):
            if saved and v not in line.kept:
                stored = self._stored(v, exact=False)
                if len(stored) > 1:
                    self._row(stored, pulp.LpConstraintLE, 1)
                self._row({self._replayed[values[v].operator]: 1.0, **stored}, pulp.LpConstraintGE, 1)
        for i in self._operators:
            for u in line.inner[i]:
                if u not in line.kept:
                    terms = {self._replayed[values[u].operator]: 1.0, **self._stored(u, exact=True)}
                    self._row({**terms, self._replayed[i]: -1.0}, pulp.LpConstraintGE, 0)

    def _record_rules(self) -> None:
        """A region is recorded if one of its saved values is not kept."""
        for v in self._values:
            if self._line.saved[v]:
                recorded = self._recorded[self._problem.values[v].region]
                self._row({recorded: 1.0, self._store[v, Choice.KEEP]: 1.0}, pulp.LpConstraintGE, 1)

    def _stage_rules(self, rows: Stages, shifts: dict[int, int]) -> None:
        """What is alive at a stage fits into the budget. P_g = P of the region before + what g holds."""
        scale = _SCALE / max(1, self._problem.budget)
        before: dict[int, pulp.LpVariable] = {}
        last = None
        for g, prefix in self._prefix.items():
            terms = {self._store[key]: -size * scale for key, size in rows.held[g].items()}
            terms[prefix] = 1.0
            if last is not None:
                terms[last] = -1.0
                before[g] = last
            self._row(terms, pulp.LpConstraintEQ, 0)
            last = prefix
        for row in binding(rows, shifts, self._problem.budget):
            terms = {self._store[key]: size * scale for key, size in row.terms.items()}
            for g in row.held:
                terms[self._prefix[g]] = terms.get(self._prefix[g], 0.0) + 1.0
                if g in before:
                    terms[before[g]] = terms.get(before[g], 0.0) - 1.0
            free = self._problem.budget - row.constant - shifts.get(row.window, 0)
            self._row({x: size for x, size in terms.items() if size}, pulp.LpConstraintLE, free * scale)

    def _objective(self) -> None:
        values, operators, regions = self._problem.values, self._problem.operators, self._problem.regions
        times = {x: operators[i].time_ns for i, x in self._replayed.items()}
        times |= {x: values[v].codec_ns for (v, choice), x in self._store.items() if choice == Choice.FP16}
        times |= {x: regions[g].record_ns for g, x in self._recorded.items()}
        self._unit_ns = max(1, max(times.values(), default=1))
        self.program.setObjective(pulp.LpAffineExpression({x: ns / self._unit_ns for x, ns in times.items() if ns}))


def binding(rows: Stages, shifts: dict[int, int], budget: int) -> list[Stage]:
    """The stages that can matter: not those that no choice takes over the budget, nor those below a neighbour."""
    tops = zip(rows.rows, rows.tops(), strict=True)
    tight = [row for row, top in tops if top + shifts.get(row.window, 0) > budget]
    found: list[Stage] = []
    for row in tight:
        if found and _covers(found[-1], row):
            continue
        while found and _covers(row, found[-1]):
            found.pop()
        found.append(row)
    return found


def _covers(row: Stage, other: Stage) -> bool:
    """``row`` counts at least what ``other`` counts, whatever the choice (of the same window only)."""
    if row.window != other.window or row.constant < other.constant:
        return False
    keys = row.terms.keys() | other.terms.keys()
    return all(row.terms.get(key, 0) >= other.terms.get(key, 0) for key in keys)
