"""Put a model of the zoo, or a deep one, under a budget, and see from outside what its training then takes."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import budgetopt
from budgetopt import InfeasibleBudgetError, Plan, Profile
from tests.deep_models import DEEP
from tests.models import Built, gpt2
from tests.oracle import Trace, run_steps
from tests.outside_meter import peak_bytes, resident_bytes
from tests.zoo import ZOO, Entry

EXACT = ("keep", "recompute")
SECONDS, PATIENCE = 1.0, 20.0
"""For one solve; and where nothing fits, for another: a busy machine may find a smallest budget only once."""
MODELS = {
    "gpt2": Entry(
        gpt2,
        {"layers": 3, "width": 64, "vocabulary": 128, "batch": 4, "length": 32, "heads": 2},
        {"layers": 8, "width": 512, "vocabulary": 2000, "batch": 8, "length": 256},
    ),
    **ZOO,
    **DEEP,
}


@dataclass(frozen=True)
class Case:
    """A model of the zoo, never trained itself, and what a plain step of it takes, in bytes.

    Attributes:
        above: peak of a plain step above the resident bytes, by the outside meter.
        least: the error of a budget that nothing fits: it says the minimum and what sets it.
        profile: budgetopt's own.
    """

    name: str
    built: Built
    resident: int
    above: int
    least: InfeasibleBudgetError
    profile: Profile

    def budget(self, share: float) -> int:
        """The share of the activation bytes, or the refereed minimum where that is more."""
        return max(self.resident + round(share * self.above), self.least.minimum)

    def share(self, budget: int) -> float:
        """The share of the activation bytes that a budget is."""
        return (budget - self.resident) / self.above

    def fitted(self, budget: int, **options: Any) -> tuple[Any, Plan]:
        """A copy of the model under `budget` with exact choices alone, and the plan it got."""
        model = copy.deepcopy(self.built[0])
        how = {"allow": EXACT, "optimizer": None, **MODELS[self.name].how, **options}
        try:
            budgetopt.fit(model, self.built[1], budget, **how)
        except InfeasibleBudgetError:
            budgetopt.fit(model, self.built[1], budget, **{**how, "time_limit": PATIENCE})
        plan = budgetopt.plan_of(model)
        assert plan is not None
        return model, plan

    def batches(self, count: int = 3) -> list[Any]:
        """Batches that the plan was not made with."""
        return [MODELS[self.name].fresh(self.built[1], seed) for seed in range(11, 11 + count)]

    def peak(self, model: Any, batch: Any) -> int:
        """Resident bytes and the peak above them, by the outside meter, on a copy: a step moves statistics."""
        probe = copy.deepcopy(model)
        return resident_bytes(probe, batch) + peak_bytes(probe, batch, **MODELS[self.name].how)

    def allowed(self, budget: int, batch: Any) -> int:
        """What the planned step may take on a batch: the budget.

        Where the data route the operators, sizes follow the batch, and only the sample's own are promised: there,
        half of what the plan saves must be left of the plain step's peak on that batch.
        """
        if not MODELS[self.name].routed:
            return budget
        plain = self.peak(self.built[0], batch)
        return max(budget, plain - (self.resident + self.above - budget) // 2)

    def trained(self, model: Any, batches: list[Any]) -> Trace:
        """Three steps of SGD on a copy."""
        return run_steps(copy.deepcopy(model), batches, lr=0.01, **MODELS[self.name].how)


@cache
def case(name: str, size: str) -> Case:
    """Build and measure; the budgets of one model share it."""
    entry = MODELS[name]
    model, sample = entry.build(**getattr(entry, size))
    probe = copy.deepcopy(model)
    above = peak_bytes(probe, sample, **entry.how)
    profile = budgetopt.profile(copy.deepcopy(model), sample, optimizer=None, **entry.how)
    return Case(name, (model, sample), resident_bytes(model, sample), above, least(profile), profile)


def least(profile: Profile) -> InfeasibleBudgetError:
    """What budgetopt says of a budget of one byte more than what is resident."""
    try:
        budgetopt.solve(profile, profile.fixed.total + 1, allow=EXACT, time_limit=SECONDS)
    except InfeasibleBudgetError as error:
        return error
    raise AssertionError("one byte for all activations can't be enough")
