"""Other batch sizes: predicted from two profiled ones, compared with real steps; the largest that fits."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import budgetopt
from budgetopt import Plan, Profile
from budgetopt._cli import main
from budgetopt._sample import batch_of, first
from tests.models import Built, gpt2, resnet_small
from tests.outside_meter import peak_bytes, resident_bytes

EXACT = ("keep", "recompute")


def _gpt2(batch: int) -> Built:
    return gpt2(2, 32, 64, batch, 16, heads=2)


def _resnet(batch: int) -> Built:
    model, sample = resnet_small()
    return model, {name: part.repeat(3, *[1] * (part.dim() - 1))[:batch].clone() for name, part in sample.items()}


BUILDERS: dict[str, Callable[[int], Built]] = {"gpt2": _gpt2, "resnet": _resnet}


@cache
def profiled(name: str) -> Profile:
    return budgetopt.profile(*BUILDERS[name](4), optimizer=None)


@cache
def planned(name: str) -> Plan:
    profile = profiled(name)
    resident = profile.fixed.total
    return budgetopt.solve(profile, resident + (profile.peak_bytes - resident) * 9 // 10, allow=EXACT, time_limit=2)


@pytest.mark.parametrize("batch", [2, 3, 6, 8])
@pytest.mark.parametrize("name", sorted(BUILDERS))
@pytest.mark.filterwarnings("ignore:budgetopt. the input is larger")
def test_predicted_is_measured_at_other_batches(name: str, batch: int) -> None:
    plan = planned(name)
    model, sample = BUILDERS[name](batch)
    budgetopt.apply(model, plan)
    measured = resident_bytes(model, sample) + peak_bytes(model, sample)
    assert abs(plan.peak_at(batch) - measured) <= 0.005 * measured


def test_the_planned_size_is_the_plans_prediction() -> None:
    plan = planned("gpt2")
    assert plan.peak_at(4) == plan.predicted.peak_bytes


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_largest_batch_fits_and_a_third_more_does_not(name: str) -> None:
    plan = planned(name)
    found = plan.largest_batch()
    assert found >= 4

    def solve(batch: int) -> None:
        profile = budgetopt.profile(*BUILDERS[name](batch), optimizer=None)
        budgetopt.solve(profile, plan.budget_bytes, allow=EXACT)

    solve(found)
    with pytest.raises(budgetopt.InfeasibleBudgetError):
        solve(-(-found * 4 // 3))


def test_largest_batch_under_this_plan_and_under_a_tiny_budget() -> None:
    plan = planned("gpt2")
    found = plan.largest_batch(replan=False)
    assert plan.peak_at(found) <= plan.budget_bytes < plan.peak_at(found + 1)
    assert plan.largest_batch() >= found
    assert plan.largest_batch("40kB") == 0


def test_the_command_prints_the_number_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    planned("gpt2").save(path)
    assert main(["largest-batch", str(path), "--budget", "10MB"]) == 0
    assert capsys.readouterr().out == f"{planned('gpt2').largest_batch('10MB')}\n"
    assert main(["largest-batch", str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err


def test_one_size_only_says_why() -> None:
    model, _ = gpt2(2, 32, 64, 1, 16, heads=2)
    profile = budgetopt.profile(model, {"input_ids": torch.zeros(1, 16, dtype=torch.long)}, optimizer=None)
    plan = budgetopt.solve(profile, "1GB")
    assert profile.smaller is None
    with pytest.raises(budgetopt.BudgetOptError, match="first dimension of two or more"):
        plan.peak_at(2)
    with pytest.raises(budgetopt.BudgetOptError, match="one batch size only"):
        plan.largest_batch()


def test_a_step_that_rejects_other_sizes_is_profiled_all_the_same() -> None:
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x.view(4, 8)).sum()
        return loss

    profile = budgetopt.profile(torch.nn.Linear(8, 8), torch.randn(4, 8), step=step, optimizer=None)
    assert profile.batch == 4 and profile.smaller is None and "does not run on 2 examples" in profile.one_size


def test_a_larger_batch_warns_once_with_the_predicted_peak() -> None:
    plan = planned("gpt2")
    model, sample = BUILDERS["gpt2"](8)
    budgetopt.apply(model, plan)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            model(**sample).loss.backward()
    assert len(seen) == 1
    message = str(seen[0].message)
    assert "8 × 16 × 32 after 4 × 16 × 32" in message and budgetopt._units.show_bytes(plan.peak_at(8)) in message
    assert "over the budget" in message


def test_the_planned_batch_and_smaller_ones_do_not_warn() -> None:
    model, sample = BUILDERS["gpt2"](4)
    budgetopt.apply(model, planned("gpt2"))
    model(**sample).loss.backward()
    model(**first(sample, 3)).loss.backward()


def test_cutting_a_sample() -> None:
    x = torch.randn(6, 2, requires_grad=True)
    sample = {"x": x, "rest": [torch.zeros(6), ("name", torch.ones(6, 1))]}
    assert batch_of(sample) == 6 and batch_of({**sample, "y": torch.zeros(5)}) == 0 and batch_of("none") == 0
    cut = first(sample, 2)
    assert batch_of(cut) == 2 and cut["rest"][1][0] == "name" and cut["x"].is_leaf and cut["x"].requires_grad
    assert torch.equal(cut["x"], x[:2]) and batch_of(copy.deepcopy(sample)) == 6
    with pytest.raises(TypeError, match="Holder"):
        first(Holder(torch.zeros(3)), 1)


class Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
