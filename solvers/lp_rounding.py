"""The approximation of Jain et al., "Checkmate: breaking the memory wall with optimal rematerialization" (2020)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from time import monotonic

from .answer import claimed
from .backends import Outcome, order, run
from .errors import SolverError
from .memory import Simulation, simulate
from .problem import Choice, Problem, Solution
from .program import Program
from .stages import Stages, stages

_THRESHOLDS = (0.5, 0.3, 0.15, 0.05, 0.7, 0.9, 0.97)
"""From which share of it on a value is kept."""
_TIGHTER = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5)
"""Shares of the budget, beyond what is resident, that are left free for what rounding adds."""


def lp_rounding(problem: Problem, backend: str = "auto", time_limit: float = 10.0, gap: float = 0.01) -> Solution:
    """The program of :func:`budgetopt.solvers.ilp.ilp` with shares of values, rounded; what is dropped is made again.

    As in the paper, the program is also solved for smaller budgets, since rounding adds bytes; thresholds are several
    instead of one half, and the referee picks the cheapest that fits. ``bound_ns`` is that of the program at the full
    budget: it counts no more than the referee does, and shares cost no more than whole values. ``gap`` is unused.

    Raises:
        InfeasibleError: nothing that was rounded fits; its minimum is of choices of this kind.
        SolverError: ``backend`` is unknown.
    """
    order(backend)
    deadline, found = monotonic() + time_limit, Relaxed()
    ends = (simulate(problem, [choice] * len(problem.values)) for choice in (Choice.KEEP, Choice.RECOMPUTE))
    best = min((*ends, *relaxed(problem, backend, deadline, found)), key=lambda one: one.rank(problem.budget))
    return claimed(problem, best, f"lp_rounding, {found.engine or 'no engine answered'}", found.bound_ns)


@dataclass
class Relaxed:
    """What is known besides the choices: a lower bound of the cost of every choice that fits, and who says so."""

    bound_ns: int = 0
    engine: str = ""


def relaxed(problem: Problem, backend: str, deadline: float, found: Relaxed) -> Iterator[Simulation]:
    """Choices that relaxed programs round to, in the referee's eyes; the first program proves a bound."""
    rows = stages(problem)
    for tighter in _TIGHTER:
        program = _relaxed(problem, rows, tighter)
        if monotonic() > deadline:
            return
        try:
            outcome = run(program.close(), backend, max(0.1, deadline - monotonic()), 0.0)
        except SolverError:
            return
        found.engine = outcome.engine
        if tighter == 0.0:
            found.bound_ns = _bound_ns(program, outcome)
        if outcome.found:
            yield from _rounded(problem, program, outcome, deadline)


def _relaxed(problem: Problem, rows: Stages, tighter: float) -> Program:
    """The program, its variables from 0 to 1, with a share of what choices may use left free."""
    spare = int(tighter * max(0, problem.budget - problem.resident))
    return Program(replace(problem, budget=problem.budget - spare), rows, relaxed=True)


def _bound_ns(program: Program, outcome: Outcome) -> int:
    """What a relaxed program proves; nothing where a limit stopped the engine."""
    return program.cost_ns(float(program.pulp.objective.value() or 0.0)) if outcome.proven else 0


def _rounded(problem: Problem, program: Program, outcome: Outcome, deadline: float) -> Iterator[Simulation]:
    """The choices that thresholds make of the shares, in the referee's eyes."""
    for least in _THRESHOLDS:
        if monotonic() < deadline:
            yield simulate(problem, program.choices(outcome, least))
