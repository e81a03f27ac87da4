"""The zoo at full size: minutes a model, so run by hand with ``-m slow -s``; prints a row of a table per case."""

from __future__ import annotations

import pytest

from budgetopt._units import show_bytes
from tests.oracle import assert_same
from tests.zoo import ZOO
from tests.zoo_runs import Case, case

pytestmark = pytest.mark.slow

LOW = 0.35
"""Only where it is feasible; the other shares give way to the minimum."""


@pytest.mark.parametrize("share", [0.75, 0.5, LOW])
@pytest.mark.parametrize("name", ZOO)
def test_budget_held_and_bits_equal(name: str, share: float) -> None:
    made = case(name, "full")
    budget = made.budget(share)
    if share == LOW and budget == made.least.minimum:
        pytest.skip(f"{name}: the minimum is {made.share(budget):.3f}, {made.least.floor}")
    model, plan = made.fitted(budget)
    batches = made.batches()
    peaks = [made.peak(model, batch) for batch in batches]
    _print_row(made, share, budget, max(peaks), plan.predicted.peak_bytes)
    assert plan.drops or budget >= made.resident + made.above
    assert all(peak <= made.allowed(budget, batch) for peak, batch in zip(peaks, batches, strict=True))
    assert_same(made.trained(made.built[0], batches), made.trained(model, batches))


def _print_row(made: Case, share: float, budget: int, measured: int, predicted: int) -> None:
    least = made.least
    cells = [
        made.name,
        f"{share} → {made.share(budget):.3f}",
        f"{budget:,}",
        f"{measured:,}",
        f"{predicted:,}",
        f"{least.minimum:,} ({show_bytes(least.minimum)}, {made.share(least.minimum):.3f}) {least.floor}",
    ]
    print(f"\n| {' | '.join(cells)} |")
