"""The whole model as one integer program, solved through PuLP and corrected by the referee.

A program's stages are linear, the step is not: who makes what when depends on the choice. So each round
shifts every stage by what the referee saw there for the best choice known, which makes the program exact
at that choice; it begins at the greedy answer. At most three rounds, then a repair or a polish by the
referee. The answer is never worse than the greedy one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from time import monotonic

from .answer import answer, infeasible
from .backends import order, run
from .errors import SolverError
from .greedy import descend, polish, search
from .memory import Simulation, simulate
from .problem import Choice, Problem, Solution
from .program import Program
from .stages import Stages, relaxed_stages, stages

_ROUNDS = 3
_BUILD_S = 150e-6  # seconds per event that building a program takes; one that cannot be solved is not begun
_UNUSED = 0.005  # share of the budget that is not worth another round


def ilp(problem: Problem, backend: str = "auto", time_limit: float = 10.0, gap: float = 0.01) -> Solution:
    """The cheapest choice that the program finds within the budget, never worse than the greedy one.

    ``time_limit`` is seconds for everything; ``gap`` the relative distance from the program's optimum at
    which an engine may stop. ``bound_ns`` is the smallest bound proven in any round, a statement about
    those programs. An answer below it (the programs forbade what the referee allows) gets the bound of the
    relaxed program instead, which holds for the step itself.

    Raises:
        InfeasibleError: neither the program nor the heuristics found a choice that the referee accepts.
        SolverError: ``backend`` is unknown.
    """
    order(backend)  # an unknown name is an error even where no program is needed
    deadline = monotonic() + time_limit
    kept = simulate(problem, [Choice.KEEP] * len(problem.values))
    if kept.peak <= problem.budget and kept.cost_ns == 0:
        return answer(problem, kept, "ilp", "optimal")
    heuristic = search(problem, monotonic() + time_limit / 3)
    rounds = _Rounds(problem, backend, gap, deadline, heuristic)
    rounds.solve()
    if rounds.best.peak > problem.budget:
        raise infeasible(problem, rounds.best)
    return _judged(problem, rounds, heuristic)


def _judged(problem: Problem, rounds: _Rounds, heuristic: Simulation) -> Solution:
    if rounds.failure and not rounds.engine:
        return answer(problem, heuristic, f"greedy ({rounds.failure})")
    found = polish(problem, rounds.best, rounds.deadline)
    bound_ns = min(rounds.bounds, default=0)
    if bound_ns > found.cost_ns:
        bound_ns = rounds.relaxed_bound()
    if not rounds.engine:
        return answer(problem, found, "greedy (no time for a program)")
    note = "; greedy answer was cheapest" if rounds.best is heuristic else ""
    solution = answer(problem, found, f"ilp, {rounds.engine}{note}", "feasible", bound_ns)
    return replace(solution, status="optimal") if solution.gap <= rounds.gap else solution


@dataclass
class _Rounds:
    """Solve, let the referee look, shift the stages by what it saw, solve again."""

    problem: Problem
    backend: str
    gap: float
    deadline: float
    best: Simulation
    bounds: list[int] = field(default_factory=list)
    engine: str = ""
    failure: str = ""

    def solve(self) -> None:
        if self.deadline - monotonic() < _BUILD_S * len(self.problem.events):
            return
        rows = stages(self.problem)
        seen = self.best
        for number in range(_ROUNDS):
            if monotonic() > self.deadline - 0.1:
                break
            shifts = _shifts(rows, seen) if number or self._fits(seen) else [0] * len(rows.rows)
            found = self._round(rows, shifts)
            if found is None and number == 0 and not self._fits(seen):
                continue  # at the edge of what is possible: once more, exact where the heuristics came closest
            if found is None or not self._again(seen, found):
                break
            seen = found

    def relaxed_bound(self) -> int:
        """A bound that holds for the step: no choice that the referee accepts costs less. 0 if time is out."""
        left = self.deadline - monotonic()
        if left < 0.2 + _BUILD_S * len(self.problem.events):
            return 0
        rows = relaxed_stages(self.problem)
        program = Program(self.problem, rows, [0] * len(rows.rows))
        try:
            return program.cost_ns(run(program.pulp, self.backend, left, self.gap).bound)
        except SolverError:
            return 0

    def _round(self, rows: Stages, shifts: list[int]) -> Simulation | None:
        program = Program(self.problem, rows, shifts)
        left = max(0.1, 0.6 * (self.deadline - monotonic()))  # the rest is for the rounds after, and the polish
        try:
            outcome = run(program.pulp, self.backend, left, self.gap)
        except SolverError as error:
            self.failure = str(error)
            return None
        self.engine = outcome.engine
        if outcome.found or outcome.bound > 0:
            self.bounds.append(program.cost_ns(outcome.bound))
        if not outcome.found:
            return None
        found = simulate(self.problem, program.choices(outcome))
        self._improve(descend(self.problem, found, self.deadline))
        return found

    def _improve(self, found: Simulation) -> None:
        if self._fits(found) and (not self._fits(self.best) or _rank(found) < _rank(self.best)):
            self.best = found

    def _fits(self, found: Simulation) -> bool:
        return found.peak <= self.problem.budget

    def _again(self, seen: Simulation, found: Simulation) -> bool:
        """Over the budget, or well under it, or much has moved: the program was not exact where it went."""
        slack = self.problem.budget - found.peak
        moved = abs(seen.cost_ns - found.cost_ns) > self.gap * found.cost_ns
        return slack < 0 or (found.cost_ns > 0 and (moved or slack > _UNUSED * self.problem.budget))


def _rank(found: Simulation) -> tuple[int, int]:
    return found.cost_ns, found.peak


def _shifts(rows: Stages, found: Simulation) -> list[int]:
    """Of each stage: what the referee saw there, less what the stage counts."""
    levels = zip(rows.rows, rows.levels(found.choices), strict=True)
    return [max(found.peaks[row.start : row.stop]) - level for row, level in levels]
