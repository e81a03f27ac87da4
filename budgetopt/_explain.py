"""Why a layer is treated as it is: what is kept, recomputed or in fp16 there, what it saves and costs. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from budgetopt._problem import inside, require_layers, to_problem
from budgetopt._schema import Profile
from budgetopt._units import show_bytes, show_ns
from budgetopt.solvers import memory
from budgetopt.solvers.problem import OUTSIDE, Choice

MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Row:
    """One saved value: the operator that makes it, its bytes, what became of it, what running the operator costs."""

    operator: str
    layer: str
    region: int
    size: int
    choice: Choice
    blocked: str
    ns: int

    @property
    def price(self) -> float:
        """Nanoseconds per megabyte."""
        return self.ns * MEGABYTE / max(1, self.size)


class Account:
    """A plan's decisions about saved values, with the referee's replay times.

    Attributes:
        rows: the saved values. replay_ns: per region, time of all replays of its operators in a step.
        dearest: the highest price, in ns per megabyte, among recomputed values.
    """

    def __init__(self, profile: Profile, choices: Sequence[Choice]) -> None:
        problem = to_problem(profile, 0)
        found = memory.simulate(problem, choices)
        self.replay_ns: dict[int, int] = defaultdict(int)
        for operator, count in zip(problem.operators, found.replays, strict=True):
            self.replay_ns[operator.region] += count * operator.time_ns
        self.rows = [
            _row(profile, value, found.choices[value], problem.operators[profile.values[value].operator].time_ns)
            for value in sorted(set(profile.handles))
            if profile.values[value].region != OUTSIDE and profile.values[value].operator != OUTSIDE
        ]
        self.dearest = max((row.price for row in self.rows if row.choice == Choice.RECOMPUTE), default=0.0)

    def why(self, row: Row) -> str:
        """The reason of one decision, in words."""
        price = f"{show_ns(round(row.price))} per MB"
        if row.choice == Choice.RECOMPUTE:
            return f"its operator takes {show_ns(row.ns)}, {price}"
        if row.choice == Choice.FP16:
            return "stored in half the bytes"
        if row.blocked:
            return f"can't be replayed: {row.blocked}"
        if row.price > self.dearest:
            return f"making it again would take {show_ns(row.ns)}, {price}: dearer than all that is recomputed"
        return "at hand anyway, or read by replays, or the budget does not ask for it"


def _row(profile: Profile, value: int, choice: Choice, ns: int) -> Row:
    record = profile.values[value]
    operator = profile.operators[record.operator]
    return Row(
        operator.name, operator.module, record.region, profile.storages[record.storage], choice, operator.blocked, ns
    )


def explain(profile: Profile, choices: Sequence[Choice], layer: str) -> str:
    """A paragraph on one layer, and a line for each value that autograd saves in it.

    Raises:
        BudgetOptError: the model has no layer of that name; names are those of ``named_modules()``.
    """
    require_layers(profile, [layer], "explain")
    account = Account(profile, choices)
    rows = [row for row in account.rows if inside(row.layer, [layer])]
    if not rows:
        return f"{layer}: saves nothing that a plan could drop; it runs as before."
    sizes: dict[Choice, int] = defaultdict(int)
    for row in rows:
        sizes[row.choice] += row.size
    spent = sum(account.replay_ns[region] for region in {row.region for row in rows})
    head = (
        f"{layer or 'the model'}: {show_bytes(sizes[Choice.RECOMPUTE])} recomputed, {show_bytes(sizes[Choice.KEEP])} "
        f"kept, {show_bytes(sizes[Choice.FP16])} in fp16. Replays in its regions take {show_ns(spent)} a step; the "
        f"dearest value that the plan recomputes costs {show_ns(round(account.dearest))} per MB."
    )
    words = {Choice.KEEP: "keep", Choice.RECOMPUTE: "recompute", Choice.FP16: "fp16"}
    lines = [
        f"  {words[row.choice]:9} {show_bytes(row.size):>8}  {row.operator}  {row.layer}: {account.why(row)}"
        for row in rows
    ]
    return "\n".join([head, *lines])
