"""Budgets below what layer checkpointing takes, and predictions that hold all the way down.

Two small models here; ``-m slow -s -k llama`` runs a full one and prints its rows, as ``python -m tests.floors`` does.
"""

from __future__ import annotations

import pytest

from tests.floors import BUDGETS, NAMES, floor, floor_row, point_row, points
from tests.zoo_runs import case

TOLERANCE = 0.005
"""Of the checkpointed peak, and of the budget."""


def _check(name: str, size: str, count: int, time_limit: float) -> None:
    made = case(name, size)
    found = floor(made)
    print(f"\n{floor_row(found)}")
    below = list(points(made, found.least, count, time_limit=time_limit))
    print("\n".join(point_row(name, point) for point in below))
    for point in below:
        assert not point.refused, point
        assert point.measured <= point.budget, point
        assert point.off <= TOLERANCE, point
    assert found.ratio <= 1 + TOLERANCE


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.slow), "densenet"])
def test_small(name: str) -> None:
    _check(name, "small", 4, time_limit=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_full(name: str) -> None:
    _check(name, "full", BUDGETS, time_limit=10.0)
