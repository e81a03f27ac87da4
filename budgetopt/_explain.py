"""What a plan does, layer by layer and value by value, what it saves and costs, and why. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from budgetopt._arguments import layers
from budgetopt._html import render
from budgetopt._problem import inside, to_problem
from budgetopt._report import add_columns, fit_line, new_table, text_of
from budgetopt._schema import Profile
from budgetopt._units import show_bytes, show_gap, show_ns
from budgetopt.solvers import memory
from budgetopt.solvers.problem import OUTSIDE, Choice, Segment

if TYPE_CHECKING:
    from budgetopt._plan import Plan, RegionPlan

MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Row:
    """One saved value: the operator that makes it, its bytes, what became of it, what running the operator costs.

    `together`: bytes of all saved values of the operator, which one run of it makes again. `late`: it is dropped in
    the forward, and kept from when its segment is run again. `between`: other layers use it, too. `read`: replays
    read it. `spared`: nothing is dropped in its region.
    """

    operator: str
    layer: str
    region: int
    size: int
    together: int
    choice: Choice
    late: bool
    between: bool
    read: bool
    spared: bool
    blocked: str
    ns: int

    @property
    def word(self) -> str:
        """The decision, as plans name it."""
        return "late" if self.late else self.choice.name.lower()

    @property
    def price(self) -> float:
        """Nanoseconds per megabyte."""
        return self.ns * MEGABYTE / max(1, self.together)


class Account:
    """A plan's decisions about saved values, with the referee's replay times.

    Attributes:
        rows: the saved values. choices: one per value, as the executor acts on them.
        replay_ns: per region, time of all replays of its operators in a step.
        dearest: the highest price, in ns per megabyte, among recomputed values.
    """

    def __init__(self, profile: Profile, choices: Sequence[Choice], segments: Sequence[Segment]) -> None:
        self._profile, self._problem = profile, to_problem(profile, 0)
        self._found = memory.simulate(self._problem, choices, segments)
        self._ns = [n * o.time_ns for o, n in zip(self._problem.operators, self._found.replays, strict=True)]
        self.replay_ns: dict[int, int] = defaultdict(int)
        self.choices = self._found.choices
        for operator, ns in zip(self._problem.operators, self._ns, strict=True):
            self.replay_ns[operator.region] += ns
        saved = [v for v in sorted(set(profile.handles)) if OUTSIDE not in _made(profile, v)]
        self._together: dict[int, int] = defaultdict(int)
        for value in saved:
            self._together[profile.values[value].operator] += profile.storages[profile.values[value].storage]
        replayed = zip(self._problem.operators, self._found.replays, strict=True)
        self._read = {v for operator, count in replayed if count for v in operator.reads}
        dropped = (v for v in saved if self._found.choices[v] != Choice.KEEP or v in self._found.levels)
        self._touched = {profile.values[v].region for v in dropped}
        self.rows = [self._row(value) for value in saved]
        self.dearest = max((row.price for row in self.rows if row.choice == Choice.RECOMPUTE), default=0.0)

    def _row(self, value: int) -> Row:
        record = self._profile.values[value]
        operator = self._profile.operators[record.operator]
        return Row(
            operator=operator.name,
            layer=operator.module,
            region=record.region,
            size=self._profile.storages[record.storage],
            together=self._together[record.operator],
            choice=self._found.choices[value],
            late=value in self._found.levels,
            between=self._problem.values[value].crossing,
            read=value in self._read,
            spared=record.region not in self._touched,
            blocked=operator.blocked,
            ns=operator.time_ns + self._profile.replay_ns,
        )

    def replays_in(self, layer: str) -> int:
        """Time of all replays of a layer's operators in a step, in ns."""
        pairs = zip(self._profile.operators, self._ns, strict=False)  # the optimizer's step is no layer's
        return sum(ns for operator, ns in pairs if inside(operator.module, [layer]))

    def why(self, row: Row) -> str:
        """The reason of one decision, in words."""
        price = f"{show_ns(round(row.price))} per MB"
        if row.late:
            return "dropped in the forward, kept from when its segment is run again before its backward pass"
        if row.choice == Choice.RECOMPUTE:
            return f"its operator takes {show_ns(row.ns)}, {price}"
        if row.choice == Choice.FP16 and row.between:
            return "stored in half the bytes; replays of other layers read it so, too"
        if row.choice == Choice.FP16:
            return "stored in half the bytes"
        return self._why_kept(row, price)

    def _why_kept(self, row: Row, price: str) -> str:
        if row.blocked:
            return f"can't be replayed: {row.blocked}"
        if row.spared:
            return "the budget is met without dropping anything in this layer"
        if row.between:
            return "other layers use it, so it is there anyway"
        if row.price > self.dearest:
            return f"making it again would take {show_ns(row.ns)}, {price}: dearer than all that is recomputed"
        if row.read:
            return "replays start from it"
        return "the budget has room for it"


def _made(profile: Profile, value: int) -> tuple[int, int]:
    """Region and operator that make a value."""
    return profile.values[value].region, profile.values[value].operator


@dataclass(frozen=True)
class LayerRow:
    """One call of one planned layer, or of one that keeps everything: bytes by choice, and what the plan does to it.

    Attributes:
        kept, late, recomputed, half: bytes of its values (`half`: as they are before they are stored in fp16).
        saved: bytes that are not there between the passes. replay_ns: of all its replays in a step.
    """

    label: str
    planned: bool
    kept: int
    late: int
    recomputed: int
    half: int
    saved: int
    replay_ns: int

    @property
    def activations(self) -> int:
        """Bytes of all of them."""
        return self.kept + self.late + self.recomputed + self.half

    @property
    def why(self) -> str:
        """What a byte costs."""
        if not self.planned:
            return "kept whole"
        freed = self.late + self.recomputed
        return f"{show_ns(self.replay_ns * MEGABYTE // freed)} per MB freed" if freed else "stored in half the bytes"


def layer_rows(plan: Plan, profile: Profile) -> list[LayerRow]:
    """One row per call of a layer, in the order of the forward; those that keep everything, too, if they save any."""
    account = Account(profile, plan.choices(profile), plan.segments(profile))
    planned = {(region.path, region.call): region for region in plan.regions}
    kept: dict[int, int] = defaultdict(int)
    for row in account.rows:
        kept[row.region] += row.size
    halved: dict[int, int] = defaultdict(int)
    for value, choice in zip(profile.values, account.choices, strict=True):
        if choice == Choice.FP16:
            halved[value.region] += profile.storages[value.storage] - value.half_bytes
    rows = []
    for number, record in enumerate(profile.regions):
        path = record.path or "(model)"
        label = f"{path} call {record.call}" if plan.calls.get(record.path, 1) > 1 else path
        region = planned.get((record.path, record.call))
        if region is not None:
            rows.append(_planned_row(label, region, halved[number], account.replay_ns[number]))
        elif kept[number]:
            rows.append(LayerRow(label, False, kept[number], 0, 0, 0, 0, 0))
    return rows


def _planned_row(label: str, region: RegionPlan, halved: int, replay_ns: int) -> LayerRow:
    sizes: dict[str, int] = defaultdict(int)
    for decision in region.decisions:
        sizes[decision.choice] += decision.bytes
    kept, late, recomputed = sizes["keep"] + sizes["hold"], sizes["late"], sizes["recompute"]
    return LayerRow(label, True, kept, late, recomputed, sizes["fp16"], late + recomputed + halved, replay_ns)


PLAN_COLUMNS = ("layer", "kept", "late", "recomputed", "fp16", "replays", "why")


def plan_cells(plan: Plan, profile: Profile) -> list[tuple[str, ...]]:
    """A row of text for each planned layer: what is kept, recomputed, in fp16, what the replays take, and why."""
    return [
        (row.label, *map(show_bytes, (row.kept, row.late, row.recomputed, row.half)), show_ns(row.replay_ns), row.why)
        for row in layer_rows(plan, profile)
        if row.planned
    ]


def plan_table(plan: Plan) -> str:
    """One row per planned layer, and what the whole plan is predicted to do."""
    title, cells = f"plan for {show_bytes(plan.budget_bytes)}", plan_cells(plan, plan.profile)
    if not cells:
        return f"{title}: {plan_foot(plan)}"
    table = new_table(title)
    add_columns(table, PLAN_COLUMNS, cells, ("why",))
    return text_of(table) + plan_foot(plan)


def plan_html(plan: Plan) -> str:
    """What ``print(plan)`` says, as a table for notebooks."""
    head = fit_line(plan, reused=False, notes=[]).removeprefix("budgetopt: ")
    rows = plan_cells(plan, plan.profile)
    return render("table.html", head=head, columns=PLAN_COLUMNS, rows=rows, words=(0, 6), foot=[plan_foot(plan)])


def plan_foot(plan: Plan) -> str:
    """What is predicted of the whole plan."""
    predicted = plan.predicted
    size = show_bytes(predicted.reserved_bytes)
    reserved = f"the allocator reserves about {size}; " if predicted.reserved_bytes else ""
    return (
        f"what is not named is kept whole{_late(plan)}. Predicted peak {show_bytes(predicted.peak_bytes)} at "
        f"{predicted.peak_at}; plain {show_bytes(predicted.plain_peak_bytes)}; {reserved}extra time "
        f"{predicted.overhead:.1%} of a step; {plan.solver}, {plan.status}, gap {show_gap(plan.gap)}. "
        "plan.explain(layer) says why, value by value"
    )


def _late(plan: Plan) -> str:
    segments = {number for region in plan.regions for number in region.segments}
    rows = f"{len(segments)} rows of layers are" if len(segments) > 1 else "one row of layers is"
    return f"; {rows} run again as one, which stores what is late" if segments else ""


def explain(profile: Profile, choices: Sequence[Choice], layer: str, segments: Sequence[Segment], budget: int) -> str:
    """A paragraph on one layer, and a line for each value that autograd saves in it.

    Args:
        budget: bytes that the plan was made for.

    Raises:
        BudgetOptError: the model has no layer of that name; names are those of ``named_modules()``.
    """
    layers([layer], [path for path, _ in profile.fingerprint["modules"]], "layer")
    account = Account(profile, choices, segments)
    rows = [row for row in account.rows if inside(row.layer, [layer])]
    if not rows:
        return f"{layer}: saves nothing that a plan could drop; it runs as before."
    sizes: dict[Choice, int] = defaultdict(int)
    for row in rows:
        sizes[row.choice] += row.size
    head = (
        f"{layer or 'the model'}: {show_bytes(sizes[Choice.RECOMPUTE])} recomputed, {show_bytes(sizes[Choice.KEEP])} "
        f"kept, {show_bytes(sizes[Choice.FP16])} in fp16. {_reason(account, rows, layer, profile.peak_bytes, budget)}"
    )
    lines = [
        f"  {row.word:9} {show_bytes(row.size):>8}  {row.operator}  {row.layer}: {account.why(row)}" for row in rows
    ]
    return "\n".join([head, *lines])


def _reason(account: Account, rows: Sequence[Row], layer: str, plain: int, budget: int) -> str:
    """Why a layer as a whole is treated as it is."""
    asked = f"The plain step needs {show_bytes(plain)}, the budget is {show_bytes(budget)}"
    dropped = sum(row.size for row in rows if row.late or row.choice == Choice.RECOMPUTE)
    if not dropped:
        return f"{asked}: {'what is dropped elsewhere is enough' if account.dearest else 'nothing is recomputed'}."
    spent = account.replays_in(layer)
    return (
        f"{asked}, so {show_bytes(dropped)} are dropped here. Replays of its operators take {show_ns(spent)} a step, "
        f"{show_ns(spent * MEGABYTE // dropped)} per MB; the dearest value that the plan recomputes costs "
        f"{show_ns(round(account.dearest))} per MB."
    )
