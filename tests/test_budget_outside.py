"""The budget holds, as seen by meters that know nothing of budgetopt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import budgetopt
from tests.models import Built, conv_stack, dropout_stack, gpt2_small, mlp_stack, resnet_small
from tests.outside_meter import peak_bytes, resident_bytes, rss_peak_growth

ACTIVATIONS = ("keep", "recompute")


def share_of(model_and_sample: Built, share: float) -> int:
    """The budget at a share of the activation bytes, from the outside meter alone."""
    return resident_bytes(*model_and_sample) + round(share * peak_bytes(*model_and_sample))


@pytest.mark.parametrize(
    ("build", "share"),
    [(gpt2_small, 0.7), (resnet_small, 0.9), (mlp_stack, 0.6), (dropout_stack, 0.6), (conv_stack, 0.85)],
)
def test_the_meters_agree_to_the_byte_and_the_budget_holds(build: Callable[[], Built], share: float) -> None:
    model, sample = build()
    for budget in (None, share_of((model, sample), share)):
        if budget is not None:
            budgetopt.fit(model, sample, budget, allow=ACTIVATIONS, optimizer=None, time_limit=2)
        outside = resident_bytes(model, sample) + peak_bytes(model, sample)
        inside = budgetopt.measure(model, sample, steps=1)
        assert inside.resident_bytes == resident_bytes(model, sample)
        assert inside.peak_bytes == outside
        assert budget is None or outside <= budget


def planned_mlp(budget: int, plan: str) -> Built:
    """An MLP under a budget; the second process reuses the first one's plan, for its own might differ."""
    model, sample = wide_mlp()
    budgetopt.fit(model, sample, budget, allow=ACTIVATIONS, optimizer=None, time_limit=2, plan=plan)
    return model, sample


def wide_mlp() -> Built:
    """Activations of some 100 MB, beside which pages and the interpreter are small."""
    return mlp_stack(depth=4, width=128, batch=4096)


def test_resident_memory_of_a_fresh_process_agrees(tmp_path: Path) -> None:
    budget = share_of(wide_mlp(), 0.6)
    arguments = {"budget": budget, "plan": str(tmp_path / "plan.json")}
    planned = peak_bytes(*planned_mlp(budget, str(tmp_path / "plan.json")))
    grown = rss_peak_growth("tests.test_budget_outside:planned_mlp", arguments)
    assert grown == pytest.approx(planned, rel=0.02, abs=2**19)
    assert grown < 0.65 * peak_bytes(*wide_mlp())
