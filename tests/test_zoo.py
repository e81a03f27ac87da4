"""fit on every kind of model: the budget holds on data that the plan never saw, and no bit changes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import budgetopt
from tests.oracle import assert_same
from tests.zoo import ZOO
from tests.zoo_runs import SECONDS, Case, case

BY_HAND = dict.fromkeys(
    ("mixtral eager", "gpt2 adapted", "functions", "t5", "mamba", "bert", "mixtral"), pytest.mark.slow
)
"""Dear ones whose kind others stand for."""


def fitted(made: Case, share: float) -> Any:
    model, plan = made.fitted(made.budget(share), time_limit=SECONDS)
    assert plan.drops
    return model


@pytest.mark.parametrize("share", [pytest.param(0.75, marks=pytest.mark.slow), 0.5])
@pytest.mark.parametrize("name", [pytest.param(name, marks=BY_HAND.get(name, ())) for name in ZOO])
def test_under_the_budget_bit_for_bit(name: str, share: float) -> None:
    made = case(name, "small")
    model = fitted(made, share)
    batches = made.batches()
    for batch in [made.built[1], *batches]:
        limit = made.budget(share) if batch is made.built[1] else made.allowed(made.budget(share), batch)
        assert made.peak(model, batch) <= limit
    assert_same(made.trained(made.built[0], batches), made.trained(model, batches))


def test_experts_that_no_token_reaches() -> None:
    """Another routing than the planned one dispatches other operators: exact, and less than the plain step takes.

    The budget is not promised: the two experts that get every token make larger tensors than any that were planned.
    """
    made = case("mixtral eager", "small")
    model = fitted(made, 0.5)
    alike = {name: torch.full_like(part, 7) for name, part in made.built[1].items()}
    with pytest.warns(budgetopt.BudgetOptWarning, match="other operators than planned"):
        planned = made.peak(model, alike)
    assert planned < made.peak(made.built[0], alike)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", budgetopt.BudgetOptWarning)
        assert_same(made.trained(made.built[0], [alike]), made.trained(model, [alike]))
