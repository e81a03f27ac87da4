"""The whole model as one integer program, solved through PuLP and corrected by the referee.

The program begins with stages that count no more than the referee does (:mod:`budgetopt.solvers.stages`).
Where the referee finds an answer over the budget, the program gets exact rows for what happens there
(:mod:`budgetopt.solvers.moments`), and is solved again. So every program allows whatever the referee
allows, the largest bound of any round holds for the step itself, and an answer that fits is as good as
its program says. What does not fit is repaired and polished by the referee, and so is the greedy answer,
which the result is never worse than. Where equal regions are over the budget, a small program in which they
choose alike gives an answer, not a bound, before the one in which each chooses for itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from time import monotonic

from .answer import answer
from .backends import order, run
from .errors import SolverError
from .greedy import descend, polish, search
from .memory import Simulation, simulate
from .moments import active, cut
from .problem import Choice, Problem, Solution
from .program import Program
from .stages import Stages, stages
from .timeline import timeline

_ROUNDS = 12
_BUILD_S = 150e-6  # seconds per event that building a program takes; one that cannot be solved is not begun
_LOOSE = 3  # an answer that is likely to be over the budget again need not be better than this many gaps
_TOLERANCE = 1e-7  # of the budget: ten times what engines take for nothing where a row's right side is 100
_CBC_SHARE = 0.2  # of the time limit, for one solve: CBC finds early what it cannot prove late


def ilp(problem: Problem, backend: str = "auto", time_limit: float = 10.0, gap: float = 0.01) -> Solution:
    """The cheapest choice that the program finds within the budget, never worse than the greedy one.

    ``time_limit`` is seconds for everything; ``gap`` the relative distance from the best choice at which it
    is good enough. ``bound_ns`` is the largest bound proven in any round; it holds for every choice that the
    referee accepts, because no program forbids one of the cheapest of those.

    Raises:
        InfeasibleError: neither the program nor the heuristics found a choice that the referee accepts.
        SolverError: ``backend`` is unknown.
    """
    order(backend)  # an unknown name is an error even where no program is needed
    deadline = monotonic() + time_limit
    kept = simulate(problem, [Choice.KEEP] * len(problem.values))
    if kept.peak <= problem.budget and kept.cost_ns == 0:
        return answer(problem, kept, "ilp", "optimal")
    building = _BUILD_S * len(problem.events)
    heuristic = search(problem, deadline if building > time_limit / 2 else deadline - time_limit / 2)
    rounds = _Rounds(problem, backend, time_limit, gap, deadline, heuristic)
    rounds.solve()
    return _judged(problem, rounds, heuristic)


def _judged(problem: Problem, rounds: _Rounds, heuristic: Simulation) -> Solution:
    if not rounds.engine:
        why = rounds.failure or "no time for a program"
        return answer(problem, heuristic, f"greedy ({why})", deadline=rounds.deadline)
    if rounds.best.peak > problem.budget:
        return answer(problem, rounds.best, "smallest peak", deadline=rounds.deadline)
    note = "; greedy answer was cheapest" if rounds.best is heuristic else ""
    solution = answer(problem, rounds.best, f"ilp, {rounds.engine}{note}", "feasible", rounds.bound_ns)
    return replace(solution, status="optimal") if solution.gap <= rounds.gap else solution


@dataclass
class _Rounds:
    """Solve, let the referee look, add exact rows where it was over the budget, solve again.

    Attributes:
        cuts: events that have exact rows. bound_ns: the largest proven bound. tied: whether equal regions
            were made to choose alike. engine: the engines that answered. failure: why none did. spare: bytes of the
            budget that programs may not use.
    """

    problem: Problem
    backend: str
    time_limit: float
    gap: float
    deadline: float
    best: Simulation
    cuts: set[int] = field(default_factory=set)
    bound_ns: int = 0
    engine: str = ""
    failure: str = ""
    tied: bool = False
    spare: int = 0

    def solve(self) -> None:
        if self.deadline - monotonic() < _BUILD_S * len(self.problem.events):
            return
        rows = stages(self.problem)
        loose = _LOOSE
        for _ in range(_ROUNDS):
            if monotonic() > self.deadline - 0.1:
                break
            found = self._round(rows, loose * self.gap, self.cuts)
            if found is None or self._done():
                break
            if not self._fits(found):
                if not self._cut(found) and not self._tighten(found):
                    break
                self._tie(rows)
                loose = 1 if len(self.cuts) == 1 else _LOOSE
            elif loose == 1:
                break
            else:
                loose = 1

    def _tie(self, rows: Stages) -> None:
        """Where equal regions are over the budget, one choice for all of them is found sooner than one for each."""
        regions = [self.problem.regions[g].kind for event in self.cuts for g in active(self.problem, event)]
        if self.tied or len(set(regions) - {""}) == len(regions):
            return
        self.tied = True
        cuts: set[int] = set()
        for _ in range(_ROUNDS):
            found = self._round(rows, _LOOSE * self.gap, cuts, tied=True)
            if found is None or self._fits(found) or found.peak_event in cuts:
                break
            cuts.add(found.peak_event)

    def _round(self, rows: Stages, gap: float, cuts: set[int], tied: bool = False) -> Simulation | None:
        program = Program(replace(self.problem, budget=self.problem.budget - self.spare), rows, tied)
        cut(program, cuts)
        # The rest is for the rounds after, and the polish.
        left = max(0.1, (0.2 if tied else 0.6) * (self.deadline - monotonic()))
        if order(self.backend)[0] == "cbc":
            left = min(left, _CBC_SHARE * self.time_limit)
        try:
            outcome = run(program.close(), self.backend, left, gap)
        except SolverError as error:
            self.failure = str(error)
            return None
        if outcome.engine not in self.engine:
            self.engine = " and ".join(filter(None, (self.engine, outcome.engine)))
        if not tied and not self.spare:
            self.bound_ns = max(self.bound_ns, program.cost_ns(outcome.bound))
        if not outcome.found:
            return None
        found = simulate(self.problem, program.choices(outcome))
        repaired = descend(self.problem, found, self.deadline)
        self._improve(polish(self.problem, repaired, self.deadline))
        return found

    def _cut(self, found: Simulation) -> bool:
        """Choose the events for more exact rows: the highest of each window that is over the budget."""
        before = len(self.cuts)
        for window in timeline(self.problem).windows:
            event = max(range(window.start, window.stop), key=lambda at: (found.peaks[at], -at))
            if found.peaks[event] > self.problem.budget and active(self.problem, event):
                self.cuts.add(event)
        return len(self.cuts) > before

    def _tighten(self, found: Simulation) -> bool:
        """Whether an engine took a few bytes over the budget for nothing. From here on nothing more is proven."""
        tolerance = round(_TOLERANCE * self.problem.budget)
        if self.spare or found.peak - self.problem.budget > tolerance:
            return False
        self.spare = tolerance
        return True

    def _improve(self, found: Simulation) -> None:
        if self._fits(found) and (not self._fits(self.best) or _rank(found) < _rank(self.best)):
            self.best = found

    def _fits(self, found: Simulation) -> bool:
        return found.peak <= self.problem.budget

    def _done(self) -> bool:
        return self._fits(self.best) and self.best.cost_ns - self.bound_ns <= self.gap * self.best.cost_ns


def _rank(found: Simulation) -> tuple[int, int]:
    return found.cost_ns, found.peak
