"""The integer program of a problem and its stages, in PuLP; no engine is named here.

Variables (legend of DESIGN, after torch's ``sac_ilp``):

* k_v, h_v in {0, 1}: value v is kept, or kept in fp16.
* r_i in [0, 1]: operator i is replayed; integral by itself once k and h are.
* a_g in [0, 1]: region g is recorded; integral likewise.
* P_g >= 0: bytes that the regions up to g hold between their passes. Stages refer to it, so they stay sparse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pulp

from .backends import Outcome
from .problem import Choice, Kind, Problem
from .stages import Stage, Stages
from .timeline import timeline, useful

_SCALE = 100.0  # the budget, in units of the program: coefficients stay between 1e-6 and 1e2


class Program:
    """One round's program, in PuLP. Names are x0, x1, ... because engines choke on others."""

    def __init__(self, problem: Problem, rows: Stages, shifts: Sequence[int]) -> None:
        self._problem, self._line = problem, timeline(problem)
        self._values, self._operators = useful(problem)
        self.pulp = pulp.LpProblem("budgetopt", pulp.LpMinimize)
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
        return self.pulp.add_variable(f"x{self._count - 1}", 0, upper, pulp.LpInteger if whole else pulp.LpContinuous)

    def _row(self, terms: dict[pulp.LpVariable, float], sense: int, right: float) -> None:
        row = pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, rhs=right)
        self._rows += 1
        self.pulp.addConstraint(row, f"c{self._rows}")

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
        """Stored at most once. Asked for: stored, or replayed if it can be. Read by a replay: kept, or replayed."""
        values, line = self._problem.values, self._line
        asked = {v for _, kind, v in line.handle_events if kind == Kind.UNPACK}
        for v, saved in enumerate(line.saved):
            if saved and v not in line.kept:
                stored = self._stored(v, exact=False)
                if len(stored) > 1:
                    self._row(stored, pulp.LpConstraintLE, 1)
                if v in line.coded:
                    self._row(stored, pulp.LpConstraintGE, 1)
                elif v in asked:
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

    def _stage_rules(self, rows: Stages, shifts: Sequence[int]) -> None:
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
            free = self._problem.budget - row.constant
            self._row({x: size for x, size in terms.items() if size}, pulp.LpConstraintLE, free * scale)

    def _objective(self) -> None:
        values, operators, regions = self._problem.values, self._problem.operators, self._problem.regions
        times = {x: operators[i].time_ns for i, x in self._replayed.items()}
        times |= {x: values[v].codec_ns for (v, choice), x in self._store.items() if choice == Choice.FP16}
        times |= {x: regions[g].record_ns for g, x in self._recorded.items()}
        self._unit_ns = max(1, max(times.values(), default=1))
        self.pulp.setObjective(pulp.LpAffineExpression({x: ns / self._unit_ns for x, ns in times.items() if ns}))


def binding(rows: Stages, shifts: Sequence[int], budget: int) -> list[Stage]:
    """The shifted stages that can matter: some choice takes them over the budget, and no neighbour is above them."""
    found: list[Stage] = []
    for row, top, shift in zip(rows.rows, rows.tops(), shifts, strict=True):
        if top + shift <= budget:
            continue
        shifted = replace(row, constant=row.constant + shift)
        if found and _covers(found[-1], shifted):
            continue
        while found and _covers(shifted, found[-1]):
            found.pop()
        found.append(shifted)
    return found


def _covers(row: Stage, other: Stage) -> bool:
    """``row`` counts at least what ``other`` counts, whatever the choice (of the same window only)."""
    if row.window != other.window or row.constant < other.constant:
        return False
    keys = row.terms.keys() | other.terms.keys()
    return all(row.terms.get(key, 0) >= other.terms.get(key, 0) for key in keys)
