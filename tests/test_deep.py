"""fit on models of very many layers: the budget holds on data that the plan never saw, and no bit changes.

The full sizes take minutes, so they are run by hand with ``-m slow -s``; they print a row of a table per case.
"""

from __future__ import annotations

import time

import pytest

from tests.deep_models import DEEP
from tests.oracle import assert_same
from tests.zoo_runs import SECONDS, Case, case

BY_HAND = dict.fromkeys(("deep transformer", "densenet"), pytest.mark.slow)
"""The dearest; deep residual is as deep, and test_floors.py has the other."""


@pytest.mark.parametrize("share", [pytest.param(0.75, marks=pytest.mark.slow), 0.5])
@pytest.mark.parametrize("name", [pytest.param(name, marks=BY_HAND.get(name, ())) for name in DEEP])
def test_under_the_budget_bit_for_bit(name: str, share: float) -> None:
    made = case(name, "small")
    _check(made, made.budget(share), time_limit=SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.75, 0.5])
@pytest.mark.parametrize("name", DEEP)
def test_full_size(name: str, share: float) -> None:
    made = case(name, "full")
    _check(made, made.budget(share))


def _check(made: Case, budget: int, **options: float) -> None:
    start = time.perf_counter()
    model, plan = made.fitted(budget, **options)
    seconds = time.perf_counter() - start
    assert plan.drops
    batches = made.batches()
    peaks = [made.peak(model, batch) for batch in [made.built[1], *batches]]
    print(
        f"\n| {made.name} | {made.share(budget):.3f} | {budget:,} | {max(peaks):,} | {plan.predicted.peak_bytes:,} | "
        f"{len(plan.regions)} regions, {plan.solver}, +{plan.predicted.overhead:.1%}, fit {seconds:.1f} s |"
    )
    assert max(peaks) <= budget
    assert_same(made.trained(made.built[0], batches), made.trained(model, batches))
