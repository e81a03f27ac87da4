"""Models that nobody thought of: each trains beside its plain copy, to the bit.

CI draws the same few hundred every time. By hand, thousands of others::

    GENERATED=5000 pytest -m slow tests/generated
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.generated.check import all_plans, dropped_by_lot
from tests.generated.grammar import Model
from tests.generated.strategies import models

EVERY: dict[str, Any] = {"deadline": None, "print_blob": True, "suppress_health_check": list(HealthCheck)}
BY_HAND = int(os.environ.get("GENERATED", "1000"))
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own, and that another batch runs other operators


def _by_lot(description: Model, seed: int, whole: bool) -> None:
    event("trains" if dropped_by_lot(description, seed, whole) else "fails, and so does plain")


def _all_plans(description: Model, seed: int, batch: int, share: float) -> None:
    event(all_plans(description, seed, batch, share))


COIN = st.integers(0, 1 << 16)
LOTS: dict[str, Any] = {"description": models(), "seed": COIN, "whole": st.booleans()}
PLANS: dict[str, Any] = {
    "description": models(behind=True, scale=2),
    "seed": COIN,
    "batch": st.integers(1, 6),
    "share": st.floats(0, 1),
}


@settings(max_examples=300, derandomize=True, **EVERY)
@given(**LOTS)
def test_values_dropped_by_lot(description: Model, seed: int, whole: bool) -> None:
    _by_lot(description, seed, whole)


@settings(max_examples=20, derandomize=True, **EVERY)
@given(**PLANS)
def test_plans_by_lot_in_fp16_and_solved(description: Model, seed: int, batch: int, share: float) -> None:
    _all_plans(description, seed, batch, share)


@pytest.mark.slow
@settings(max_examples=20 * BY_HAND, **EVERY)
@given(**LOTS)
def test_many_more_values_dropped_by_lot(description: Model, seed: int, whole: bool) -> None:
    _by_lot(description, seed, whole)


@pytest.mark.slow
@settings(max_examples=BY_HAND, **EVERY)
@given(**PLANS)
def test_many_more_plans(description: Model, seed: int, batch: int, share: float) -> None:
    _all_plans(description, seed, batch, share)
