"""The commands ``problem`` and ``compare``: a question as a file, and every solver's answers to it. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from budgetopt import _given, solvers
from budgetopt._errors import BudgetOptError
from budgetopt._report import columns, new_table, text_of
from budgetopt._solve import solver_options
from budgetopt._units import show_bytes, show_enough, show_gap, show_ns
from budgetopt.solvers.compare import SHARES, Row, plain_peak
from budgetopt.solvers.problem import Problem

_ROOM = 100
"""Columns that a table with remarks needs."""


def write_problem(
    source: Path,
    output: Path,
    budget: str | None = None,
    *,
    allow: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    headroom: str | None = None,
) -> None:
    """Write the problem of a saved profile or plan; what is None is as in the plan.

    Raises:
        BudgetOptError: a file can't be read or written, or an argument is no legal one.
    """
    asked = _given.question(source)
    asked = replace(
        asked,
        allow=asked.allow if allow is None else allow,
        exclude=asked.exclude if exclude is None else exclude,
        headroom=asked.headroom if headroom is None else headroom,
    )
    size = asked.budget if budget is None else budget
    if size is None:
        raise BudgetOptError(f"{str(source)!r} is a profile, which has no budget: give --budget 8GB, say")
    problem = asked.profile.problem(size, allow=asked.allow, exclude=asked.exclude, headroom=asked.headroom)
    try:
        solvers.save_problem(problem, output)
    except solvers.ProblemFileError as error:
        raise BudgetOptError(str(error)) from error


@dataclass(frozen=True)
class Compared:
    """The rows of :func:`budgetopt.solvers.compare`, and the step that they are about.

    Attributes:
        resident: bytes. plain_peak: bytes of the step that keeps everything. step_ns: its time, 0 if not known.
    """

    resident: int
    plain_peak: int
    step_ns: int
    rows: list[Row]

    def as_json(self) -> str:
        """The figures as they are: bytes, nanoseconds, and shares of one."""
        head = {"resident_bytes": self.resident, "plain_peak_bytes": self.plain_peak, "step_ns": self.step_ns}
        return json.dumps({**head, "rows": [asdict(row) for row in self.rows]}, indent=2)

    def __str__(self) -> str:
        table = new_table("what each solver makes of each budget")
        narrow = columns() < _ROOM
        if narrow:
            table.padding, table.pad_edge = (0, 1, 0, 0), False
        for name in ("budget", "solver", "overhead", "peak", "gap", "took"):
            table.add_column(name, no_wrap=True, justify="left" if name in ("budget", "solver") else "right")
        table.add_column("remarks")
        last = None
        for row in self.rows:
            budget = "" if row.budget == last else f"{show_bytes(row.budget)} ({row.share:.3g})"
            if last is not None and budget:
                table.add_row()
            last = row.budget
            table.add_row(budget, row.solver, *_cells(row), f"{row.seconds:.2f} s", (_word if narrow else remarks)(row))
        return (
            text_of(table)
            + self._foot()
            + ("\n--json, or a wider terminal, says more of each answer" if narrow else "")
        )

    def _foot(self) -> str:
        activations = show_bytes(self.plain_peak - self.resident)
        step = f"a plain step takes {show_ns(self.step_ns)}" if self.step_ns else "the step's time is not known"
        return (
            f"budget: in brackets, the share of the {activations} that keeping everything takes on top of the "
            f"{show_bytes(self.resident)} resident\n"
            f"overhead: extra time ({step}); gap: proven distance from the cheapest choice\n"
            "peak and overhead are what the referee says of an answer"
        )


def compare(
    problem: Problem, shares: Sequence[float] | None, names: Sequence[str], options: dict[str, Any]
) -> Compared:
    """Ask every solver for every budget; on stderr, who is at work, if someone is looking.

    Args:
        shares: of the activation bytes; None for the usual ones. names: of solvers. options: `backend`, `time_limit`
            and `gap`, as :func:`checked` gives them.
    """
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        rows = solvers.compare(
            problem,
            SHARES if shares is None else shares,
            names,
            told=lambda name, budget: status.update(f"{name} at {show_bytes(budget)}"),
            **options,
        )
    return Compared(problem.resident, plain_peak(problem), problem.step_ns, rows)


def checked(
    names: Sequence[str] | None, backend: str, time_limit: float, gap: float
) -> tuple[list[str], dict[str, Any]]:
    """The names of solvers, all by default and each once, and the other arguments if they are legal ones.

    Raises:
        SolverError: unknown solver or backend. BudgetOptError: time_limit or gap is out of its range.
    """
    found = list(dict.fromkeys(solvers.SOLVERS if names is None else names))
    for name in found:
        options = solver_options(name, backend, time_limit, gap)
    del options["solver"]
    return found, options


def _word(row: Row) -> str:
    """The first words of :func:`remarks`."""
    return re.split("[:;]", remarks(row))[0]


def remarks(row: Row) -> str:
    """What there is to say of an answer in words."""
    if row.status == "infeasible":
        said = f"nothing fits: the smallest peak found is {show_enough(row.minimum or 0)}"
    elif row.status == "refused":
        said = "no answer"
    else:
        said = row.status
    return f"{said}; {row.note}" if row.note else said


def _cells(row: Row) -> tuple[str, str, str]:
    """Overhead, peak, gap."""
    if row.peak is None or row.cost_ns is None:
        return "-", "-", "-"
    overhead = show_ns(row.cost_ns) if row.overhead is None else f"{row.overhead:.2%}"
    return overhead, show_bytes(row.peak), show_gap(row.gap)
