"""Pictures of a comparison and of a frontier: overhead against budget.

No torch; matplotlib is loaded only to draw.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from budgetopt._errors import BudgetOptError
from budgetopt._schema import write_atomically
from budgetopt._units import show_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from budgetopt._comparison import Compared
    from budgetopt._schema import FrontierPoint, Profile
    from budgetopt.solvers.compare import Row

FORMATS = (".png", ".svg", ".pdf")

_WIDE = 30  # times that the largest overhead is the smallest one, from which on a logarithmic axis is read better
_ROOM = 0.09  # of the axis, that the label of a tick takes
_AROUND = 0.06  # of the budgets' range, left free on both sides
_MARKS = "osD^vPX*<>p"
_DASHES = ("-", "--", "-.", ":")


def ready(path: Path, argument: str = "--plot") -> None:
    """See before the solvers begin that their answers can be drawn; `argument`: what the path was given as.

    Raises:
        BudgetOptError: matplotlib is not installed, the name ends in no known format, or there is no such folder.
    """
    if path.suffix.lower() not in FORMATS:
        raise BudgetOptError(f"{argument} {str(path)!r}: give a name that ends in {', '.join(FORMATS)}")
    if find_spec("matplotlib") is None:
        raise BudgetOptError('a plot needs matplotlib, which is not installed: pip install "budgetopt[plot]"')
    if not path.parent.is_dir() or path.is_dir():
        raise BudgetOptError(f"can't write {str(path)!r}: choose a folder that exists, and a file in it")


def draw(compared: Compared, path: Path) -> None:
    """Write the picture of a comparison, whole or not at all.

    Raises:
        BudgetOptError: the folder can't be written to.
    """
    figure, axes = _figure()
    lines: dict[str, list[Row]] = {}
    for row in compared.rows:
        lines.setdefault(row.solver, []).append(row)
    for number, (solver, rows) in enumerate(lines.items()):
        _line(axes, number, solver, rows, len(lines))
    _scale(
        axes,
        [_height(row) for row in compared.rows if row.cost_ns is not None],
        {row.budget: row.share for row in compared.rows},
        "extra time, % of the plain step" if compared.step_ns else "extra time, ms",
    )
    axes.set_title("what each solver's answer costs at each budget")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    write(figure, path)


def draw_frontier(profile: Profile, points: Sequence[FrontierPoint], path: Path) -> None:
    """Write the picture of what :func:`budgetopt.frontier` found, whole or not at all.

    Raises:
        BudgetOptError: the folder can't be written to.
    """
    figure, axes = _figure()
    heights = [100 * point.overhead for point in points]
    axes.plot([point.budget_bytes for point in points], heights, marker="o")
    resident = profile.fixed.total
    above = max(1, profile.peak_bytes - resident)
    shares = {point.budget_bytes: (point.budget_bytes - resident) / above for point in points}
    _scale(axes, heights, shares, "extra time, % of the plain step")
    axes.set_title("what each byte of budget buys")
    write(figure, path)


def _figure() -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure  # without pyplot, which would keep the figure and choose a window system

    figure = Figure(figsize=(9.0, 5.0), layout="constrained")
    return figure, figure.add_subplot()


def write(figure: Figure, path: Path) -> None:
    """Write a figure, whole or not at all; the format is that of the file's name."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.lower()[1:], dpi=150)
    write_atomically(path, buffer.getvalue())


def _line(axes: Axes, number: int, solver: str, rows: list[Row], count: int) -> None:
    """Later lines are thinner and their marks smaller, so that equal answers show one in the other."""
    answered = [row for row in rows if row.cost_ns is not None]
    missing = len(rows) - len(answered)
    axes.plot(
        [row.budget for row in answered],
        [_height(row) for row in answered],
        label=f"{solver}\n({missing} of {len(rows)} not answered)" if missing else solver,
        color=f"C{number % 10}",
        marker=_MARKS[number % len(_MARKS)],
        linestyle=_DASHES[number % len(_DASHES)],
        linewidth=1 + 2 * (count - number) / count,
        markersize=4 + 7 * (count - number) / count,
        alpha=0.8,
    )


def _height(row: Row) -> float:
    """Percent of the step, or milliseconds where the step's time is not known."""
    return (row.cost_ns or 0) / 1e6 if row.overhead is None else 100 * row.overhead


def _scale(axes: Axes, heights: Iterable[float], shares: dict[int, float], label: str) -> None:
    """Ticks at the budgets, which `shares` has as keys; `heights`: of all points."""
    found = list(heights)
    ticks = _apart({budget: f"{show_bytes(budget)}\n{share:.3g}" for budget, share in shares.items()})
    axes.set_xticks(list(ticks), list(ticks.values()))
    around = _AROUND * (max(shares) - min(shares) or max(shares))
    axes.set_xlim(min(shares) - around, max(shares) + around)  # those, too, at which nothing fits
    axes.set_xlabel("budget, and its share of the activation bytes")
    axes.set_ylabel(label)
    if found and min(found) > 0 and max(found) > _WIDE * min(found):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda height, _: f"{height:g}")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _apart(labels: dict[int, str]) -> dict[int, str]:
    """Those from the lowest on that leave room for each other."""
    room = _ROOM * (max(labels) - min(labels))
    found: dict[int, str] = {}
    for at in sorted(labels):
        if not found or at - max(found) > room:
            found[at] = labels[at]
    return found
