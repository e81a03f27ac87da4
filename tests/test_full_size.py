"""The two models of the README at full size: minutes, so run by hand with ``-m slow -s``; prints its table."""

from __future__ import annotations

import copy
import time
from functools import cache
from pathlib import Path

import pytest

import budgetopt
from budgetopt import Profile
from budgetopt._units import show_bytes
from budgetopt.solvers import Choice
from tests.models import Built, fresh_batch, gpt2, resnet50
from tests.oracle import assert_same, run_steps
from tests.outside_meter import peak_bytes, resident_bytes
from tests.plans import above_resident, forced_plan, measured_elsewhere
from tests.test_predicted import ANY, EXACT, by_seed

pytestmark = pytest.mark.slow

GPT2: tuple[object, ...] = (8, 512, 2000, 8, 256)
RESNET: tuple[object, ...] = (16, 128)
EXACTLY = ("keep", "recompute")


@cache
def built(name: str) -> Built:
    return gpt2(8, 512, 2000, 8, 256) if name == "gpt2" else resnet50(16, 128)


@cache
def profiled(name: str) -> Profile:
    model, sample = built(name)
    return budgetopt.profile(copy.deepcopy(model), sample, optimizer=None)


def budget_of(name: str, share: float) -> int:
    """The share, or the refereed minimum where that is more."""
    profile = profiled(name)
    resident = profile.fixed.total
    budget = resident + round(share * (profile.peak_bytes - resident))
    try:
        budgetopt.solve(profile, budget, allow=EXACTLY)
    except budgetopt.InfeasibleBudgetError as error:
        print(f"\n{name} at {share}: {error}")
        return error.minimum
    return budget


CASES = [("gpt2", 0.75), ("gpt2", 0.5), ("gpt2", 0.35), ("resnet50", 0.75), ("resnet50", 0.6), ("resnet50", 0.35)]


@pytest.mark.parametrize(("name", "share"), CASES)
def test_budget_held_and_bits_equal(name: str, share: float) -> None:
    model, sample = copy.deepcopy(built(name)[0]), built(name)[1]
    budget = budget_of(name, share)
    plain = copy.deepcopy(model)
    start = time.perf_counter()
    budgetopt.fit(model, sample, budget, allow=EXACTLY, optimizer=None)
    seconds = time.perf_counter() - start
    batches = [fresh_batch(sample, seed) for seed in (11, 12, 13)]
    peaks = []
    for batch in batches:
        probe = copy.deepcopy(model)
        peaks.append(resident_bytes(probe, batch) + peak_bytes(probe, batch))
    assert max(peaks) <= budget
    assert_same(run_steps(plain, batches), run_steps(model, batches))
    plan = budgetopt.plan_of(model)
    assert plan is not None
    print(
        f"\n{name} share {share}: budget {budget} B ({show_bytes(budget)}), measured on three fresh batches {peaks}, "
        f"predicted {plan.predicted.peak_bytes}, overhead {plan.predicted.overhead:.1%}, {plan.solver}, "
        f"gap {plan.gap:.2%}, fit {seconds:.1f} s, bits equal after 3 SGD steps"
    )


@pytest.mark.parametrize(("name", "share"), [("gpt2", 0.5), ("resnet50", 0.75)])
def test_fp16_within_its_limit(name: str, share: float) -> None:
    model, sample = copy.deepcopy(built(name)[0]), built(name)[1]
    budget = budget_of(name, share)
    budgetopt.fit(model, sample, budget, optimizer=None)
    plan = budgetopt.plan_of(model)
    assert plan is not None and plan.measured is not None
    error = plan.measured.grad_error
    assert error is None or error <= 1e-2
    print(f"\n{name} share {share} with fp16 allowed: peak {plan.measured.peak_bytes} of {budget}, error {error}")


@pytest.mark.parametrize("name", ["gpt2", "resnet50"])
@pytest.mark.parametrize("case", ["keep", "drop", "half", "random 1", "random 2", "random 3", "random fp16"])
def test_predicted_is_measured(name: str, case: str, tmp_path: Path) -> None:
    choose = {
        "keep": lambda value: Choice.KEEP,
        "drop": lambda value: Choice.RECOMPUTE,
        "half": lambda value: Choice.FP16,
        "random fp16": by_seed(4, ANY),
    }.get(case) or by_seed(int(case[-1:]), EXACT)
    plan = forced_plan(profiled(name), choose)
    _compare(name, case, plan, tmp_path)


@pytest.mark.parametrize(("name", "share"), CASES)
def test_predicted_is_measured_for_solved_plans(name: str, share: float, tmp_path: Path) -> None:
    plan = budgetopt.solve(profiled(name), budget_of(name, share), allow=EXACTLY)
    _compare(name, f"share {share}", plan, tmp_path)


def _compare(name: str, case: str, plan: budgetopt.Plan, folder: Path) -> None:
    predicted = above_resident(built(name), plan)
    arguments = GPT2 if name == "gpt2" else RESNET
    measured = measured_elsewhere(name, arguments, plan, folder)
    print(f"\n{name} {case}: predicted {predicted}, measured {measured}, off {predicted / measured - 1:+.5%}")
    assert abs(predicted - measured) <= 0.005 * measured
