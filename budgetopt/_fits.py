"""Will it fit? Profile + budget → plainly, with a plan and at what cost, or not, and what would. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

from budgetopt._arguments import choices, headroom_bytes, layers
from budgetopt._errors import InfeasibleBudgetError
from budgetopt._given import Question, asked
from budgetopt._plan import Plan
from budgetopt._problem import problem_within
from budgetopt._schema import Profile, Strict
from budgetopt._solve import solve, solver_options
from budgetopt._units import parse_bytes, show_bytes, show_enough, show_ns
from budgetopt.solvers.memory import simulate
from budgetopt.solvers.problem import Choice


class Fits(Strict):
    """Whether a step fits a budget; true where it does.

    Attributes:
        answer: ``"plain"`` as it is, ``"planned"`` with a plan, or ``"no"``.
        peak_bytes, overhead, extra_ns: predicted, of the plain or planned step; None where nothing fits. Overhead is
            extra time ÷ plain step time. halves: the plan stores values in fp16, so gradients are not exact.
        minimum_bytes: the smallest feasible budget that was found, where nothing fits. set_by: what needs it.
    """

    answer: Literal["plain", "planned", "no"]
    budget_bytes: int
    headroom_bytes: int = 0
    plain_peak_bytes: int
    peak_bytes: int | None = None
    overhead: float | None = None
    extra_ns: int | None = None
    halves: bool = False
    minimum_bytes: int | None = None
    set_by: str = ""

    def __bool__(self) -> bool:
        return self.answer != "no"

    def __str__(self) -> str:
        budget = show_bytes(self.budget_bytes)
        if self.headroom_bytes:
            budget += f" less {show_bytes(self.headroom_bytes)} of headroom"
        plain = show_enough(self.plain_peak_bytes)
        if self.minimum_bytes is not None:
            return (
                f"no: nothing fits {budget}; the smallest budget is {show_enough(self.minimum_bytes)} "
                f"({self.minimum_bytes} bytes), set {self.set_by}. The plain step needs {plain}"
            )
        if self.answer == "plain":
            return f"yes: the plain step needs {plain}, the budget is {budget}"
        exact = "some activations in fp16" if self.halves else "gradients exact"
        return (
            f"yes, with a plan: about {self.overhead or 0:+.1%} step time ({show_ns(self.extra_ns or 0)}), {exact}, "
            f"predicted peak {show_bytes(self.peak_bytes or 0)} in {budget}. The plain step needs {plain}"
        )


def fits(
    profile: Profile | Plan,
    budget: int | str,
    *,
    allow: Iterable[str] | None = None,
    exclude: Iterable[str] | None = None,
    headroom: int | str | None = None,
    solver: str = "auto",
    backend: str = "auto",
    time_limit: float = 10.0,
    gap: float = 0.01,
) -> Fits:
    """Whether the step fits `budget`: as it is, with a plan and at what cost, or not. Nothing runs.

    Args:
        profile: measured or modelled (``device=``), or a plan, which holds one.
        allow, exclude, headroom: see :func:`budgetopt.solve`; by default as the plan has them, if it is one.
        solver, backend, time_limit, gap: see :func:`budgetopt.solve`; nobody is asked where the plain step fits.

    Raises:
        InvalidBudgetError: the budget or the headroom can't be read. BudgetOptError: another argument is no legal one.
    """
    options = solver_options(solver, backend, time_limit, gap)
    return answered(narrowed(asked(profile), allow, exclude, headroom), budget, options)[0]


def narrowed(
    question: Question, allow: Iterable[str] | None, exclude: Iterable[str] | None, headroom: int | str | None
) -> Question:
    """The question with what is not None in place of the plan's own."""
    paths = [path for path, _ in question.profile.fingerprint["modules"]]
    return replace(
        question,
        allow=question.allow if allow is None else choices(allow),
        exclude=question.exclude if exclude is None else layers(exclude, paths),
        headroom=question.headroom if headroom is None else headroom,
    )


def answered(question: Question, budget: int | str, options: dict[str, Any]) -> tuple[Fits, Plan | None]:
    """The answer, and the plan if there is one.

    Args:
        options: of the solver, by name.
    """
    profile, limit = question.profile, parse_bytes(budget, total=None, free=None)
    asking: dict[str, Any] = {"allow": question.allow, "exclude": question.exclude, "headroom": question.headroom}
    problem = problem_within(profile, limit, **asking)
    plain = simulate(problem, [Choice.KEEP] * len(problem.values))
    spare = headroom_bytes(question.headroom, limit)
    no = Fits(answer="no", budget_bytes=limit, headroom_bytes=spare, plain_peak_bytes=plain.peak)
    if plain.peak <= problem.budget:
        free = {"answer": "plain", "peak_bytes": plain.peak, "overhead": 0.0, "extra_ns": 0}
        return no.model_copy(update=free), None
    try:
        plan = solve(profile, limit, **asking, **options)
    except InfeasibleBudgetError as error:
        return no.model_copy(update={"minimum_bytes": error.minimum, "set_by": error.floor}), None
    return planned(plan), plan


def planned(plan: Plan) -> Fits:
    """What a plan answers for its own budget."""
    predicted = plan.predicted
    return Fits(
        answer="planned",
        budget_bytes=plan.budget_bytes,
        headroom_bytes=plan.headroom_bytes,
        plain_peak_bytes=predicted.plain_peak_bytes,
        peak_bytes=predicted.peak_bytes,
        overhead=predicted.overhead,
        extra_ns=predicted.extra_ns,
        halves=plan.halves,
    )
