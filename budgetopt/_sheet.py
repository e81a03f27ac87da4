"""One page that says what a plan does: HTML that needs no other file, no network and no script. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from budgetopt import _figure
from budgetopt._curve import GROUPS, Curve, over_step
from budgetopt._explain import layer_rows
from budgetopt._html import render
from budgetopt._report import exactness, profile_foot
from budgetopt._schema import FrontierPoint, Profile, write_atomically
from budgetopt._units import show_bytes, show_gap, show_ns

if TYPE_CHECKING:
    from budgetopt._plan import Plan


def write_page(plan: Plan, output: Path, frontier: Iterable[FrontierPoint] = ()) -> None:
    """Write :func:`page` to a file, whole or not at all.

    Raises:
        BudgetOptError: the file can't be written. PlanMismatchError: the plan is damaged.
    """
    write_atomically(output, page(plan, frontier).encode())


def page(plan: Plan, frontier: Iterable[FrontierPoint] | None = None) -> str:
    """The page, from the plan alone: predicted and measured figures, pictures, layers, and how to use it.

    Args:
        frontier: points of :func:`budgetopt.frontier`, to be drawn as well.

    Raises:
        PlanMismatchError: the profile inside the plan can't be read.
    """
    profile = plan.profile
    curve = over_step(profile, plan.choices(profile), plan.segments(profile))
    points = list(frontier or ())
    measured = plan.measured.curve if plan.measured else ()
    figures = [_figure.memory_figure(curve, measured, plan.budget_bytes)]
    if curve.layers:
        figures.append(_figure.layers_figure(curve))
    return render(
        "page.html",
        plan=plan,
        profile=profile,
        title=f"Training step under {show_bytes(plan.budget_bytes)}",
        facts=_facts(plan, profile),
        figures=figures,
        budget_is_far=all(line.colour != "budget" for line in figures[0].lines),
        uses=_uses(curve),
        layers=layer_rows(plan, profile),
        points=points,
        frontier=_figure.frontier_figure(points, plan.budget_bytes) if points else None,
        environment=_environment(plan, profile),
        notes=profile_foot(profile),
    )


@dataclass(frozen=True)
class Fact:
    """A figure and what it is; `more` in small letters below."""

    name: str
    figure: str
    more: str = ""


def _facts(plan: Plan, profile: Profile) -> list[Fact]:
    predicted, measured = plan.predicted, plan.measured
    saved = 1 - predicted.peak_bytes / predicted.plain_peak_bytes
    headroom = f"{show_bytes(plan.headroom_bytes)} of it left free" if plan.headroom_bytes else ""
    return [
        Fact("budget", show_bytes(plan.budget_bytes), headroom),
        _measured_peak(plan),
        Fact("predicted peak", show_bytes(predicted.peak_bytes), f"{predicted.peak_bytes} bytes"),
        Fact("peak of the plain step", show_bytes(predicted.plain_peak_bytes), f"{saved:.0%} of it saved"),
        Fact(
            "extra time, predicted",
            f"{predicted.overhead:+.1%}" if predicted.extra_ns else "none",
            f"{show_ns(predicted.extra_ns)} on a plain step of {show_ns(profile.step_ns)}",
        ),
        Fact(
            "gradients",
            exactness(plan).removeprefix("gradients ") if plan.drops else "exact",
            f"{measured.values_proven} values made again, compared bit for bit"
            if measured and measured.values_proven
            else "" if plan.drops else "everything is kept, the model is not touched",
        ),
        Fact("solver", plan.solver, plan.status),
        Fact("gap", show_gap(plan.gap), "proven distance from the cheapest choice that fits"),
    ]  # fmt: skip


def _measured_peak(plan: Plan) -> Fact:
    if plan.measured is None:
        return Fact("measured peak", "not measured", "the plan was not run")
    step = f"; the step took {show_ns(plan.measured.step_ns)}"
    return Fact("measured peak", show_bytes(plan.measured.peak_bytes), f"{plan.measured.peak_bytes} bytes{step}")


@dataclass(frozen=True)
class Use:
    """Bytes of one group at the peak, their share of it, and the most that are there at any time."""

    what: str
    colour: str
    at_peak: int
    share: float
    most: int


def _uses(curve: Curve) -> list[Use]:
    peak = curve.total[curve.peak]
    return [
        Use(what, str(GROUPS.index(what)), sizes[curve.peak], sizes[curve.peak] / max(1, peak), max(sizes))
        for what, sizes in curve.groups.items()
    ]


def _environment(plan: Plan, profile: Profile) -> Sequence[tuple[str, str]]:
    found = plan.environment
    sizes = f"{profile.batch} examples" if profile.batch else "not known"
    return [
        ("device", profile.modelled or found.device),
        ("torch", found.torch),
        ("autocast", found.autocast or "off"),
        ("default dtype", found.default_dtype),
        ("batch", sizes),
        ("choices allowed", ", ".join(plan.allow)),
        ("left alone", ", ".join(plan.exclude) or "nothing"),
    ]
