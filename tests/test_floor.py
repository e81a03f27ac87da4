"""What sets a peak: the parts that are told add up to the referee's bytes, and say the right things."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import nn

import budgetopt
from budgetopt._floor import composition, explain_peak
from budgetopt._problem import to_problem
from budgetopt._units import show_bytes
from budgetopt.solvers import Choice, minimum, simulate
from tests.models import gpt2_small, resnet_small


@pytest.mark.parametrize("build", [gpt2_small, resnet_small])
def test_the_parts_add_up_at_every_event(build: object) -> None:
    model, sample = build()  # type: ignore[operator]
    profile = budgetopt.profile(model, sample)
    problem = to_problem(profile, 0)
    random = Random(0)
    for choices in (
        [Choice.KEEP] * len(problem.values),
        [Choice.RECOMPUTE] * len(problem.values),
        [Choice.FP16] * len(problem.values),
        [random.choice(list(Choice)) for _ in problem.values],
    ):
        found = simulate(problem, choices)
        for event in {found.peak_event, *random.sample(range(len(problem.events)), 40)}:
            parts = composition(profile, problem, choices, event)
            assert sum(parts.values()) == found.peaks[event]
            assert "unknown" not in parts and min(parts.values()) > 0


def test_an_infeasible_budget_says_what_sets_the_minimum() -> None:
    model, sample = gpt2_small()
    profile = budgetopt.profile(model, sample, optimizer="adamw")
    with pytest.raises(budgetopt.InfeasibleBudgetError) as error:
        budgetopt.solve(profile, profile.fixed.total, time_limit=2)
    floor = error.value.floor
    for part in (
        f"{show_bytes(profile.fixed.parameter)} parameters",
        f"{show_bytes(profile.fixed.optimizer)} the optimizer's state",
    ):
        assert part in floor
    assert floor in str(error.value)


class Vocabulary(nn.Module):
    """Almost everything is the loss over a large vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 2000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(self.head(self.inner(x)), -1)


def test_the_loss_over_the_vocabulary_is_named() -> None:
    model, x = Vocabulary(), torch.randn(64, 8)
    profile = budgetopt.profile(model, x, optimizer=None)
    problem = to_problem(profile, 0, allow=("keep", "recompute"))
    floor = explain_peak(profile, problem, minimum(problem)[1])
    assert "_log_softmax_backward_data, the backward pass" in floor.replace(".default", "")
    assert f"{show_bytes(64 * 2000 * 4)} the operator's own output" in floor


def test_gradients_that_pile_up_are_named() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    profile = budgetopt.profile(model, torch.randn(2, 256), optimizer=None)
    problem = to_problem(profile, 0, allow=("keep", "recompute"))
    parts = composition(profile, problem, *_at_the_peak(problem))
    assert max(parts, key=lambda what: parts[what]) == "parameters"
    assert parts["gradients of parameters"] >= 5 * 256 * 256 * 4


def _at_the_peak(problem: budgetopt.solvers.Problem) -> tuple[tuple[Choice, ...], int]:
    choices = minimum(problem)[1]
    return choices, simulate(problem, choices).peak_event
