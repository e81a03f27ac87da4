"""A picture of memory over a planned step, as a file. No torch, and matplotlib only to draw."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from budgetopt._curve import GROUPS, Curve, over_step
from budgetopt._plot import ready, write
from budgetopt._units import show_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from budgetopt._plan import Plan

_FAR = 1.6  # times the peak, from which on the budget's line would leave no room for the rest


def draw_memory(plan: Plan, path: Path) -> None:
    """Draw memory over the step, by what it is for and by layer, with the measured curve and the budget.

    Raises:
        BudgetOptError: matplotlib is not installed, the name ends in no known format, or it can't be written.
        PlanMismatchError: the profile inside the plan can't be read.
    """
    ready(path, "plot")
    from matplotlib.figure import Figure  # without pyplot, which would keep the figure and choose a window system

    profile = plan.profile
    curve = over_step(profile, plan.choices(profile), plan.segments(profile))
    figure = Figure(figsize=(10.0, 9.0), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    _memory(upper, curve, plan)
    _pile(lower, curve.layers, "bytes of activations", [f"C{number}" for number in "7012345689"])
    lower.set_xlabel("the step from its start to its end, % of the bytes that it allocates")
    for axes in (upper, lower):
        axes.axvline(100 * curve.turn, color="black", linewidth=0.8, linestyle=":")
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    upper.annotate("backward pass", (100 * curve.turn, 1.01), xycoords=("data", "axes fraction"), va="bottom")
    write(figure, path)


def _memory(axes: Axes, curve: Curve, plan: Plan) -> None:
    measured = plan.measured.curve if plan.measured else ()
    _pile(axes, curve.groups, "bytes on the device", [f"C{GROUPS.index(what)}" for what in curve.groups])
    highest = max(*curve.total, *measured)
    if measured:
        label = f"measured, {show_bytes(max(measured))} at most"
        axes.plot(_middles(len(measured)), measured, color="black", linewidth=1, label=label)
    if plan.budget_bytes <= _FAR * highest:
        axes.axhline(plan.budget_bytes, color="crimson", label=f"budget, {show_bytes(plan.budget_bytes)}")
    axes.set_title(
        f"memory over the step, predicted {show_bytes(plan.predicted.peak_bytes)} at most", loc="left", y=1.05
    )


def _pile(axes: Axes, rows: dict[str, tuple[int, ...]], beside: str, colours: list[str]) -> None:
    # An underscore in front would hide a layer's name from the legend, and dollars would be read as formulas.
    labels = [f"\u200b{name}".replace("$", r"\$") for name in rows]
    if rows:
        sizes = list(rows.values())
        axes.stackplot(_middles(len(sizes[0])), sizes, labels=labels, colors=colours, alpha=0.85)
    axes.yaxis.set_major_formatter(_bytes)
    axes.set_ylabel(beside)
    axes.set_xlim(0, 100)
    axes.set_ylim(bottom=0)


def _middles(count: int) -> list[float]:
    """Of the slices, in percent of the step."""
    return [100 * (number + 0.5) / count for number in range(count)]


def _bytes(size: float, _: object) -> str:
    return show_bytes(round(size)) if size > 0 else "0"
