"""The page of a plan as a file, with what other budgets would buy. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from budgetopt._errors import BudgetOptError
from budgetopt._frontier import frontier
from budgetopt._sheet import page as page
from budgetopt._sheet import write_page

if TYPE_CHECKING:
    from budgetopt._plan import Plan


def write_report(plan: Plan, output: Path, frontier_points: int = 0) -> None:
    """Write :func:`page` to a file, whole or not at all.

    Args:
        frontier_points: 2 or more: solve for so many other budgets first, and show what each byte buys; 0: don't.

    Raises:
        BudgetOptError: the file can't be written, or there is to be one point. PlanMismatchError: the plan is damaged.
    """
    if not output.parent.is_dir() or output.is_dir():  # before the solvers begin
        raise BudgetOptError(f"can't write {str(output)!r}: choose a folder that exists, and a file in it")
    points = []
    if frontier_points:
        points = frontier(plan.profile, points=frontier_points, allow=plan.allow, exclude=plan.exclude)
    write_page(plan, output, points)
