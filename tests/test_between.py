"""fp16 of what layers hand to each other, on live models: the predicted peak, small errors, exact where it says so."""

from __future__ import annotations

import copy
from functools import cache
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import budgetopt
from budgetopt import Plan, Profile
from budgetopt._problem import to_problem
from budgetopt.solvers import Choice, Segment
from budgetopt.solvers.timeline import timeline
from tests.models import Built
from tests.outside_meter import peak_bytes
from tests.plans import forced_plan
from tests.solvers.steps import rows
from tests.test_segments import built, gradients
from tests.zoo_models import squared_loss

TOLERANCE = 0.005  # of the peak
ROUNDED = 5e-3  # of the gradients' norm: fp16 has 11 bits
ALLOWED = 0.1  # the same, where batch norms and cut-offs at zero of many layers come after the rounding


def forced(profile: Profile, seed: int, segments: list[Segment]) -> Plan:
    """Dropped or kept by chance; what crosses regions in fp16, all of it or by chance."""
    shared = timeline(to_problem(profile, 0)).shared
    dropped, halved = (0.0, 0.5, 1.0)[seed % 3], (1.0, 0.6)[seed // 3]

    def choose(value: int) -> Choice:
        chance = Random(seed * 10_007 + value).random()
        if value in shared:
            return Choice.FP16 if chance < halved else Choice.KEEP
        return Choice.RECOMPUTE if chance < dropped else Choice.KEEP

    return forced_plan(profile, choose, segments)


@pytest.mark.parametrize("name", ["residual", "gpt2_small", "resnet_small"])
@pytest.mark.parametrize("seed", range(6))
def test_rounded_gradients_at_the_predicted_peak(name: str, seed: int) -> None:
    (model, sample), profile = built(name)
    plan = forced(profile, seed, rows(Random(seed), len(profile.regions)) if seed > 3 else [])
    assert plan.rounds_between
    plain, planned = copy.deepcopy(model), copy.deepcopy(model)
    budgetopt.apply(planned, plan)
    pairs = list(zip(gradients(plain, sample), gradients(planned, sample), strict=True))
    assert torch.equal(*pairs[0])  # the forward pass is as before
    off = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs[1:])
    norm = sum(float(a.double().square().sum()) for a, _ in pairs[1:])
    assert 0 < (off / norm) ** 0.5 < ROUNDED
    planned.zero_grad(set_to_none=True)
    measured = peak_bytes(planned, sample, squared_loss if name == "residual" else None)
    predicted = plan.predicted.peak_bytes - profile.fixed.total
    assert measured <= (1 + TOLERANCE) * predicted
    # What is handed on in fp16 does not hold a row of layers together: its parts take less than the whole row.
    assert plan.segments(profile) or measured >= (1 - TOLERANCE) * predicted


@pytest.mark.parametrize("name", ["residual", "gpt2_small", "resnet_small"])
def test_the_exact_variant_of_such_a_plan_is_exact(name: str) -> None:
    (model, sample), profile = built(name)
    planned = budgetopt.apply(copy.deepcopy(model), forced(profile, 2, []).exact())
    for one, other in zip(gradients(copy.deepcopy(model), sample), gradients(planned, sample), strict=True):
        assert torch.equal(one, other)


class Convolutions(nn.Module):
    """What it hands on is a quarter of what autograd saves of it, and dear to make again."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm1, self.norm2 = (nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.second(F.relu(self.norm1(self.first(x))))))


@cache
def convolutions() -> tuple[Built, Profile, int]:
    """A stack of them, and a budget at which some of the convolutions would have to run again."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = nn.Sequential(*(Convolutions(64) for _ in range(6))), torch.randn(4, 64, 16, 16)
    profile = budgetopt.profile(*made, loss=squared_loss, optimizer=None)
    return made, profile, round(profile.fixed.total + 0.6 * (profile.peak_bytes - profile.fixed.total))


def test_fit_stores_what_is_handed_on_in_fp16_where_that_is_cheapest() -> None:
    (model, sample), profile, budget = convolutions()
    plain, planned = copy.deepcopy(model), copy.deepcopy(model)
    for _ in range(3):  # what is cheapest is a matter of measured times, which a busy machine disturbs
        budgetopt.fit(planned, sample, budget, loss=squared_loss, optimizer=None, max_grad_error=ALLOWED)
        plan = budgetopt.plan_of(planned)
        if plan is not None and plan.rounds_between:
            break
        budgetopt.remove(planned)
    assert plan is not None
    assert plan.rounds_between
    assert "fp16 between" in plan.solver
    exact = budgetopt.solve(plan.profile, budget, allow=("keep", "recompute"))
    assert plan.predicted.extra_ns < exact.predicted.extra_ns
    marked = next(region.path for region in plan.regions for d in region.decisions if d.between)
    assert "replays of other layers read it so, too" in plan.explain(marked)
    assert plan.measured is not None
    assert plan.measured.values_proven > 0
    assert 0 < (plan.measured.grad_error or 0) < ALLOWED
    assert peak_bytes(planned, sample, squared_loss) + profile.fixed.total <= budget
    pairs = list(zip(gradients(plain, sample), gradients(planned, sample), strict=True))
    assert torch.equal(*pairs[0])


def test_a_bound_on_the_error_leaves_out_what_is_handed_on_first() -> None:
    (model, sample), _, budget = convolutions()
    planned = copy.deepcopy(model)
    budgetopt.fit(planned, sample, budget, loss=squared_loss, optimizer=None, max_grad_error=0)
    plan = budgetopt.plan_of(planned)
    assert plan is not None
    assert not plan.rounds_between
    assert all(d.choice != "fp16" for region in plan.regions for d in region.decisions)
