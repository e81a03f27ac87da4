"""What would more memory buy? The same step under two budgets, and what changes between them. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from budgetopt._errors import BudgetOptError
from budgetopt._fits import Fits, answered, narrowed, planned
from budgetopt._given import asked
from budgetopt._plan import Plan
from budgetopt._report import add_columns, new_table, text_of
from budgetopt._schema import Profile, Strict
from budgetopt._solve import solver_options
from budgetopt._units import parse_bytes, show_bytes, show_enough, show_ns


class LayerGain(Strict):
    """Activation bytes of one call of one planned layer under the two budgets: what is recomputed, what is in fp16."""

    path: str
    call: int = 0
    recomputed_now: int = 0
    recomputed_then: int = 0
    fp16_now: int = 0
    fp16_then: int = 0


class Gain(Strict):
    """What `more_bytes` of budget buy.

    Attributes:
        now, then: the answers without and with them. saved_ns: time of a step that they save; None where nothing fits
            now (or then). layers: those that are treated otherwise, if both fit.
    """

    more_bytes: int
    now: Fits
    then: Fits
    layers: tuple[LayerGain, ...] = ()

    @property
    def saved_ns(self) -> int | None:
        """Time of a step that is saved."""
        if self.now.extra_ns is None or self.then.extra_ns is None:
            return None
        return self.now.extra_ns - self.then.extra_ns

    def __str__(self) -> str:
        head = (
            f"{show_bytes(self.more_bytes)} more ({show_bytes(self.then.budget_bytes)} instead of "
            f"{show_bytes(self.now.budget_bytes)}): {_headline(self)}"
        )
        return f"{head}\n{_table(self)}" if self.layers else head


def gain(
    profile: Profile | Plan,
    more: int | str,
    budget: int | str | None = None,
    *,
    allow: Iterable[str] | None = None,
    exclude: Iterable[str] | None = None,
    headroom: int | str | None = None,
    solver: str = "auto",
    backend: str = "auto",
    time_limit: float = 10.0,
    gap: float = 0.01,
) -> Gain:
    """What `more` memory on top of `budget` would buy: overhead now and then, and which layers it keeps. Nothing runs.

    Args:
        profile: of the step; or a plan, which then is the answer for now, unless another question is asked.
        more: bytes, text such as ``"2GB"``, or a percentage of the budget. budget: by default the plan's.
        allow, exclude, headroom, solver, backend, time_limit, gap: see :func:`budgetopt.fits`. A headroom in per cent
            is one of either budget.

    Raises:
        InvalidBudgetError: `more`, the budget or the headroom can't be read.
        BudgetOptError: a profile and no budget, or another argument is no legal one.
    """
    options = solver_options(solver, backend, time_limit, gap)
    question = asked(profile)
    size = question.budget if budget is None else budget
    if size is None:
        raise BudgetOptError("budget=None: a profile has no budget of its own, give one such as '8GB'")
    limit = parse_bytes(size, total=None, free=None)
    extra = parse_bytes(more, total=limit, free=None, argument="more")
    wanted = narrowed(question, allow, exclude, headroom)
    plan_now: Plan | None
    if isinstance(profile, Plan) and wanted == question and limit == question.budget and profile.drops:
        now, plan_now = planned(profile), profile
    else:
        now, plan_now = answered(wanted, limit, options)
    then, plan_then = answered(wanted, limit + extra, options)
    if now and then and (then.extra_ns or 0) > (now.extra_ns or 0):  # a cheaper plan for less memory serves as well
        kept = {"budget_bytes": then.budget_bytes, "headroom_bytes": then.headroom_bytes}
        then, plan_then = now.model_copy(update=kept), plan_now
    layers = _changes(plan_now, plan_then) if now and then else ()
    return Gain(more_bytes=extra, now=now, then=then, layers=layers)


def _changes(now: Plan | None, then: Plan | None) -> tuple[LayerGain, ...]:
    """Calls of layers that are treated otherwise; without a plan, all is kept."""
    before, after = _dropped(now), _dropped(then)
    found = (
        LayerGain(
            path=path,
            call=call,
            recomputed_now=before[path, call, "recompute"],
            recomputed_then=after[path, call, "recompute"],
            fp16_now=before[path, call, "fp16"],
            fp16_then=after[path, call, "fp16"],
        )
        for path, call in dict.fromkeys((path, call) for path, call, _ in [*before, *after])
    )
    return tuple(one for one in found if (one.recomputed_now, one.fp16_now) != (one.recomputed_then, one.fp16_then))


def _dropped(plan: Plan | None) -> Counter[tuple[str, int, str]]:
    """Bytes by layer, call and what becomes of them; what a segment stores late is dropped in the forward, too."""
    found: Counter[tuple[str, int, str]] = Counter()
    for region in plan.regions if plan is not None else ():
        for decision in region.decisions:
            if decision.choice in ("recompute", "late", "fp16"):
                word = "fp16" if decision.choice == "fp16" else "recompute"
                found[region.path, region.call, word] += decision.bytes
    return found


def _headline(gain: Gain) -> str:
    now, then = gain.now, gain.then
    if not then:
        return f"still nothing fits; the smallest budget is {show_enough(then.minimum_bytes or 0)}"
    plain = then.answer == "plain"
    cost = "no overhead (the plain step fits)" if plain else f"about {then.overhead or 0:+.1%} step time"
    if not now:
        return f"it fits then, at {cost}; now nothing fits"
    if now.answer == "plain":
        return "nothing, the plain step fits already"
    if not gain.saved_ns:
        return f"no time; about {now.overhead or 0:+.1%} now and then"
    return f"{cost} instead of {now.overhead or 0:+.1%}, {show_ns(gain.saved_ns)} a step less"


def _table(gain: Gain) -> str:
    table = new_table("layers that are treated otherwise")
    calls = Counter(layer.path for layer in gain.layers)
    rows = []
    for one in gain.layers:
        path = one.path or "(model)"
        label = f"{path} call {one.call}" if calls[one.path] > 1 else path
        sizes = (one.recomputed_now, one.recomputed_then, one.fp16_now, one.fp16_then)
        rows.append((label, *(show_bytes(size) for size in sizes)))
    add_columns(table, ("layer", "recomputed", "then", "fp16", "then"), rows, ())
    return text_of(table).rstrip()
