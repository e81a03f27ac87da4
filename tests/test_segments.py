"""Rows of layers that are run again as one, on live models: the same bits, the predicted peak, budgets met."""

from __future__ import annotations

import copy
from functools import cache
from random import Random

import pytest
import torch

import budgetopt
from budgetopt import InfeasibleBudgetError, Profile
from budgetopt.solvers import Choice, Segment
from budgetopt.solvers.segments import in_order
from tests import models
from tests.deep_models import deep_residual
from tests.models import Built
from tests.outside_meter import peak_bytes
from tests.plans import forced_plan
from tests.solvers.steps import rows
from tests.zoo_models import squared_loss

TOLERANCE = 0.005  # of the peak


@cache
def built(name: str) -> tuple[Built, Profile]:
    made: Built = deep_residual(12, 32, 4, 64) if name == "residual" else getattr(models, name)()
    loss = squared_loss if name == "residual" else None
    return made, budgetopt.profile(*made, loss=loss, optimizer=None)


def gradients(model: torch.nn.Module, sample: object, twice: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(5)
    out = model(**sample) if isinstance(sample, dict) else model(sample)
    loss = squared_loss(out) if isinstance(out, torch.Tensor) else out.loss
    loss.backward(retain_graph=twice)
    if twice:
        loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", ["residual", "gpt2_small", "resnet_small"])
@pytest.mark.parametrize("seed", range(6))
def test_any_segments_give_the_same_bits_at_the_predicted_peak(name: str, seed: int) -> None:
    (model, sample), profile = built(name)
    rng = Random(seed)
    dropped = rng.choice((0, 0.3, 0.7, 1))
    chosen = rows(rng, len(profile.regions)) if seed else [Segment(0, len(profile.regions) - 1)]
    plan = forced_plan(
        profile,
        lambda value: Choice.RECOMPUTE if Random(seed * 10_007 + value).random() < dropped else Choice.KEEP,
        chosen,
    )
    plain, planned = copy.deepcopy(model), copy.deepcopy(model)
    budgetopt.apply(planned, plan)
    for one, other in zip(gradients(plain, sample), gradients(planned, sample), strict=True):
        assert torch.equal(one, other)
    planned.zero_grad(set_to_none=True)
    measured = peak_bytes(planned, sample, squared_loss if name == "residual" else None)
    predicted = plan.predicted.peak_bytes - profile.fixed.total
    assert abs(measured - predicted) <= TOLERANCE * predicted
    assert plan.segments(profile) == tuple(in_order(chosen))


def test_a_second_backward_through_a_segment() -> None:
    (model, sample), profile = built("residual")
    plan = forced_plan(profile, lambda value: Choice.KEEP, [Segment(0, 7), Segment(1, 4)])
    planned = budgetopt.apply(copy.deepcopy(model), plan)
    pairs = zip(gradients(copy.deepcopy(model), sample, True), gradients(planned, sample, True), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_fit_below_the_smallest_budget_of_single_regions() -> None:
    model, sample = deep_residual(40, 16, 8, 128)
    plain = copy.deepcopy(model)
    profile = budgetopt.profile(model, sample, loss=squared_loss, optimizer=None)
    budget = profile.fixed.total + round(0.15 * (profile.peak_bytes - profile.fixed.total))
    with pytest.raises(InfeasibleBudgetError) as raised:
        budgetopt.solve(profile, budget, solver="regions")
    exact = ("keep", "recompute")
    budgetopt.fit(model, sample, budget, loss=squared_loss, optimizer=None, allow=exact, solver="segments")
    plan = budgetopt.plan_of(model)
    assert plan is not None
    assert budget < raised.value.minimum
    assert plan.segments(plan.profile)
    assert plan.predicted.peak_bytes <= budget
    assert "run again as one" in str(plan)
    assert "  late " in plan.explain("20")
    for seed in range(3):
        batch = torch.randn(sample.shape, generator=torch.Generator().manual_seed(seed))
        assert peak_bytes(model, batch, squared_loss) + profile.fixed.total <= budget
        for one, other in zip(gradients(plain, batch), gradients(model, batch), strict=True):
            assert torch.equal(one, other)
        for each in (plain, model):
            each.zero_grad(set_to_none=True)
