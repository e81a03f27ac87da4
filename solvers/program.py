"""The integer program of a problem and its stages, in PuLP; no engine is named here.

Variables (legend of DESIGN, after torch's ``sac_ilp``):

* k_v, h_v in {0, 1}: value v is kept, or kept in fp16.
* r_i in [0, 1]: operator i is replayed; integral by itself once k and h are.
* z_s in [0, 1]: storage s, made elsewhere, is held because a replay reads it; integral likewise.
* a_g in [0, 1]: region g is recorded; integral likewise.
* P_g >= 0: bytes that the regions up to g hold between their passes. Stages refer to it, so they stay sparse.
"""

from __future__ import annotations

from math import ceil

import pulp

from .backends import Outcome
from .problem import Choice, Kind, Problem
from .stages import Key, Stage, Stages, Terms
from .timeline import timeline, useful

_TOLERANCE = 1e-6  # of an engine's bound, in units of the objective
_SCALE = 100.0  # the budget, in units of the program: coefficients stay between 1e-6 and 1e2

Row = dict[pulp.LpVariable, float]
LE, EQ, GE = pulp.LpConstraintLE, pulp.LpConstraintEQ, pulp.LpConstraintGE


class Program:
    """One program, in PuLP. Names are x0, x1, ... because engines choke on others.

    ``tied``: regions of one kind choose alike. That is a smaller program whose bound means nothing.
    ``relaxed``: values may be stored in part.
    """

    def __init__(self, problem: Problem, rows: Stages, tied: bool = False, relaxed: bool = False) -> None:
        self._whole = not relaxed
        self.problem, self.line, self.stages = problem, timeline(problem), rows
        self.values, self.operators = useful(problem)
        self.pulp = pulp.LpProblem("budgetopt", pulp.LpMinimize)
        self.scale = _SCALE / max(1, problem.budget)
        self._count = self._rows = 0
        self._variables(_alike(problem, self.values) if tied else {})
        self._replay_rules()
        self._purpose_rules()
        self._prefix_rules()
        for row in binding(rows, problem.budget):
            self.bound(row, {})
        self.times: dict[pulp.LpVariable, float] = dict(self._times())

    def choices(self, outcome: Outcome, least: float = 0.5) -> list[Choice]:
        """The choice per value that an engine's answer means: where shares are over the least one, the larger."""
        chosen = [Choice.RECOMPUTE] * len(self.problem.values)
        shares = [least] * len(chosen)
        for (kind, index), variable in self.at.items():
            if kind in _CHOICES and outcome.values[variable.name] > shares[index]:
                chosen[index], shares[index] = _CHOICES[kind], outcome.values[variable.name]
        return chosen

    def close(self) -> pulp.LpProblem:
        """The program, ready for an engine: nothing is added after this."""
        self._unit_ns = max(1, max(self.times.values(), default=1))
        objective = {x: ns / self._unit_ns for x, ns in self.times.items() if ns}
        self.pulp.setObjective(pulp.LpAffineExpression(objective))
        return self.pulp

    def cost_ns(self, objective: float) -> int:
        """The least whole nanoseconds that a bound of the objective allows, give or take an engine's tolerance."""
        return max(0, ceil(self.cost(objective)))

    def cost(self, objective: float) -> float:
        """A bound of the objective in nanoseconds, an engine's tolerance taken off."""
        return (objective * (1 - 1e-9) - _TOLERANCE) * self._unit_ns

    def new(self, upper: float | None = 1.0, whole: bool = False) -> pulp.LpVariable:
        """One more variable, from 0 to ``upper``."""
        self._count += 1
        return self.pulp.add_variable(f"x{self._count - 1}", 0, upper, pulp.LpInteger if whole else pulp.LpContinuous)

    def row(self, terms: Row, sense: int, right: float) -> None:
        """One more row; terms of 0 are left out."""
        kept = {x: size for x, size in terms.items() if size}
        constraint = pulp.LpConstraint(pulp.LpAffineExpression(kept), sense, rhs=right)
        self._rows += 1
        self.pulp.addConstraint(constraint, f"c{self._rows}")

    def stored(self, v: int, exact: bool) -> Row:
        """k_v, and h_v unless exact bits are asked for; nothing for a value that cannot be stored."""
        kinds = ("keep",) if exact else ("keep", "half")
        return {self.at[kind, v]: 1.0 for kind in kinds if (kind, v) in self.at}

    def half(self, v: int) -> Row:
        """h_v, where there is one."""
        return {self.at["half", v]: 1.0} if ("half", v) in self.at else {}

    def bound(self, stage: Stage, more: Row) -> None:
        """What is alive at a stage, and the bytes of ``more``, fit into the budget."""
        self.row(self.bytes_at(stage, more), LE, (self.problem.budget - stage.constant) * self.scale)

    def bytes_at(self, stage: Stage, more: Row) -> Row:
        """What is alive at a stage on top of its constant, and the bytes of ``more``, in the program's unit."""
        terms = self.scaled(stage.terms)
        for x, size in more.items():
            terms[x] = terms.get(x, 0.0) + size * self.scale
        for g in stage.held:
            if g in self._prefix:
                terms[self._prefix[g]] = terms.get(self._prefix[g], 0.0) + 1.0
                if g in self._before:
                    terms[self._before[g]] = terms.get(self._before[g], 0.0) - 1.0
        return terms

    def scaled(self, terms: Terms) -> Row:
        """Terms as variables, in the program's unit of bytes."""
        sums: Row = {}
        for key, size in terms.items():
            sums[self.at[key]] = sums.get(self.at[key], 0.0) + size * self.scale
        return sums

    def _variables(self, alike: dict[int, int]) -> None:
        values, saved = self.problem.values, self.line.saved
        self.at: dict[Key, pulp.LpVariable] = {}
        for v in self.values:
            for kind in ("keep", "half") if saved[v] and values[v].half_bytes else ("keep",):
                like = kind, alike.get(v, v)
                self.at[kind, v] = self.at[like] if like in self.at else self.new(whole=self._whole)
        self.at |= {("again", i): self.new() for i in self.operators}
        self.at |= {("input", s): self.new() for s in self.stages.inputs}
        self._recorded = {values[v].region: self.new() for v in self.values if saved[v]}
        self._prefix = {g: self.new(upper=None) for g in sorted(self.stages.held)}
        self._before: dict[int, pulp.LpVariable] = {}

    def _replay_rules(self) -> None:
        """Stored at most once. Asked for: stored, or replayed if it can be. Read by a replay: kept, or replayed."""
        values, line = self.problem.values, self.line
        asked = {v for _, kind, v in line.handle_events if kind == Kind.UNPACK}
        for v, saved in enumerate(line.saved):
            if saved and v not in line.kept:
                stored = self.stored(v, exact=False)
                if len(stored) > 1:
                    self.row(stored, LE, 1)
                if v in line.coded:
                    self.row(stored, GE, 1)
                elif v in asked:
                    self.row({self.at["again", values[v].operator]: 1.0, **stored}, GE, 1)
        for i in self.operators:
            for u in line.inner[i]:
                if u not in line.kept:
                    terms = {self.at["again", values[u].operator]: 1.0, **self.stored(u, exact=True)}
                    self.row({**terms, self.at["again", i]: -1.0}, GE, 0)

    def _purpose_rules(self) -> None:
        """A region is recorded if a saved value of it is not kept. Nothing unsaved is kept in vain. Inputs are held."""
        readers: dict[int, Row] = {v: {} for v in self.values}
        for i in self.operators:
            for v in self.line.inner[i]:
                if v in readers:
                    readers[v][self.at["again", i]] = 1.0
        for v in self.values:
            if self.line.saved[v]:
                recorded = self._recorded[self.problem.values[v].region]
                self.row({recorded: 1.0, self.at["keep", v]: 1.0}, GE, 1)
            else:
                self.row({**readers[v], self.at["keep", v]: -1.0}, GE, 0)
        for storage, operators in self.stages.inputs.items():
            for i in operators:
                self.row({self.at["input", storage]: 1.0, self.at["again", i]: -1.0}, GE, 0)

    def _prefix_rules(self) -> None:
        """P_g = P of the region before + what g holds."""
        last = None
        for g, prefix in self._prefix.items():
            terms = {x: -size for x, size in self.scaled(self.stages.held[g]).items()}
            terms[prefix] = 1.0
            if last is not None:
                terms[last] = -1.0
                self._before[g] = last
            self.row(terms, EQ, 0)
            last = prefix

    def _times(self) -> dict[pulp.LpVariable, int]:
        values, operators, regions = self.problem.values, self.problem.operators, self.problem.regions
        times = {self.at["again", i]: operators[i].time_ns for i in self.operators}
        for (kind, v), x in self.at.items():
            if kind == "half":
                times[x] = times.get(x, 0) + values[v].codec_ns
        times |= {x: regions[g].record_ns for g, x in self._recorded.items()}
        return times


_CHOICES = {"keep": Choice.KEEP, "half": Choice.FP16}


def binding(rows: Stages, budget: int) -> list[Stage]:
    """The stages that can matter: some choice takes them over the budget, and no neighbour is above them."""
    found: list[Stage] = []
    for row, top in zip(rows.rows, rows.tops(), strict=True):
        if top <= budget:
            continue
        if found and _covers(found[-1], row):
            continue
        while found and _covers(row, found[-1]):
            found.pop()
        found.append(row)
    return found


def _covers(row: Stage, other: Stage) -> bool:
    """``row`` counts at least what ``other`` counts, whatever the choice."""
    if row.held != other.held or row.constant < other.constant:
        return False
    keys = row.terms.keys() | other.terms.keys()
    return all(row.terms.get(key, 0) >= other.terms.get(key, 0) for key in keys)


def _alike(problem: Problem, values: list[int]) -> dict[int, int]:
    """The value at the same place of the first region of the same kind, for every decided value."""
    line = timeline(problem)
    of: dict[int, list[int]] = {}
    for v in values:
        of.setdefault(problem.values[v].region, []).append(v)
    first: dict[object, list[int]] = {}
    alike: dict[int, int] = {}
    for g, mine in of.items():
        traits = tuple((line.saved[v], v in line.coded, bool(problem.values[v].half_bytes)) for v in mine)
        kind = problem.regions[g].kind or f"region {g}"
        alike |= dict(zip(mine, first.setdefault((kind, traits), mine), strict=True))
    return alike
