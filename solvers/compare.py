"""Every solver on the same step, at the same budgets; the referee says what each answer takes and costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import monotonic

from .backends import order
from .choices import count
from .errors import InfeasibleError, SolverError
from .exhaustive import MOST_CHOICES, exhaustive
from .memory import simulate
from .problem import Choice, Problem, Solution
from .solve import SOLVERS, solve

SHARES = (0.75, 0.5, 0.35, 0.25)
"""Of the bytes that keeping everything takes on top of what is resident."""

_GRACE = 1.0  # seconds that an answer may be late before it is worth a word
_EVENTS_A_SECOND = 300_000  # that the referee replays, about


@dataclass(frozen=True, slots=True)
class Row:
    """What one solver says of one budget.

    Attributes:
        solver: its name. share: of the activation bytes. budget: bytes, resident included.
        status: that of the :class:`Solution` (``"optimal"``, ``"feasible"``, ``"heuristic"``); ``"infeasible"`` where
            nothing was found that fits; ``"refused"`` where the solver doesn't answer, and ``note`` says why.
        seconds: that it took.
        peak: bytes, of the answer. cost_ns: extra time. overhead: that as a share of the step, None where the
            step's time is not known. gap: proven relative distance from the cheapest choice (of those that
            :attr:`Solution.bound_ns` speaks of), None where nothing is proven. All as the referee counts, and None
            where there is no answer.
        minimum: bytes of the smallest peak found, where nothing fits.
        note: what the solver says of its answer, and what else is worth a word.
    """

    solver: str
    share: float
    budget: int
    status: str
    seconds: float
    peak: int | None = None
    cost_ns: int | None = None
    overhead: float | None = None
    gap: float | None = None
    minimum: int | None = None
    note: str = ""


def plain_peak(problem: Problem) -> int:
    """Bytes of the step that keeps everything."""
    return simulate(problem, [Choice.KEEP] * len(problem.values)).peak


def compare(
    problem: Problem,
    shares: Sequence[float] = SHARES,
    solvers: Sequence[str] = tuple(SOLVERS),
    *,
    backend: str = "auto",
    time_limit: float = 10.0,
    gap: float = 0.01,
    told: Callable[[str, int], None] = lambda solver, budget: None,
) -> list[Row]:
    """One row per budget and solver, in the order of the arguments; the problem's own budget is of no account.

    Args:
        shares: of the activation bytes, which are those that keeping everything takes on top of what is resident.
        solvers: keys of :data:`SOLVERS`. time_limit: seconds for each answer. gap: as for :func:`solve`.
        told: called with the solver's name and the budget before each answer.

    Raises:
        SolverError: an unknown solver or backend.
    """
    _known(solvers, backend)
    activations = plain_peak(problem) - problem.resident
    rows = []
    for share in shares:
        budget = problem.resident + round(share * activations)
        asked = replace(problem, budget=budget)
        for name in solvers:
            told(name, budget)
            begin = monotonic()
            row = _answered(asked, Row(name, share, budget, "refused", 0.0), backend, time_limit, gap)
            rows.append(_timed(row, monotonic() - begin, time_limit))
    return rows


def _known(solvers: Sequence[str], backend: str) -> None:
    """An unknown name is an error, not a row for every answer."""
    order(backend)
    for name in solvers:
        if name not in SOLVERS:
            raise SolverError(f"solver {name!r} is not one of {', '.join(sorted(SOLVERS))}")


def _answered(problem: Problem, row: Row, backend: str, time_limit: float, gap: float) -> Row:
    if SOLVERS[row.solver] is exhaustive and (why := _too_many(problem, time_limit)):
        return replace(row, note=why)
    try:
        found = solve(problem, row.solver, backend, time_limit, gap)
    except InfeasibleError as error:
        return replace(row, status="infeasible", minimum=error.minimum)
    except SolverError as error:
        return replace(row, note=str(error))
    return _judged(problem, row, found)


def _too_many(problem: Problem, time_limit: float) -> str:
    """Why not every choice is tried: the exhaustive solver knows no time limit."""
    choices = count(problem)
    if choices > MOST_CHOICES:
        return f"more than {MOST_CHOICES} choices to try"
    if choices * len(problem.events) > time_limit * _EVENTS_A_SECOND:
        return f"{choices} choices take longer to try than the time limit"
    return ""


def _judged(problem: Problem, row: Row, found: Solution) -> Row:
    """The referee's word on an answer, whatever the solver says that it takes and costs."""
    seen = simulate(problem, found.choices, found.segments)
    if seen.peak > problem.budget:
        return replace(row, note=f"its answer does not fit: the referee counts {seen.peak} bytes")
    proven = found.bound_ns > 0 or seen.cost_ns == 0
    return replace(
        row,
        status=found.status,
        peak=seen.peak,
        cost_ns=seen.cost_ns,
        overhead=seen.cost_ns / problem.step_ns if problem.step_ns else None,
        gap=replace(found, cost_ns=seen.cost_ns).gap if proven else None,
        note="" if found.solver == row.solver else found.solver,
    )


def _timed(row: Row, seconds: float, time_limit: float) -> Row:
    late = seconds > time_limit + _GRACE
    notes = [row.note, f"over the time limit of {time_limit:g} s" if late else ""]
    return replace(row, seconds=seconds, note="; ".join(filter(None, notes)))
