"""What the profile predicts before any planned step has run is what a step takes, elsewhere and on other data."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import budgetopt
from budgetopt import Plan, Profile
from budgetopt.solvers import Choice
from tests import models
from tests.models import Built
from tests.plans import above_resident, forced_plan, measured_elsewhere

TOLERANCE = 0.005  # of the peak above resident


@cache
def built(name: str) -> tuple[Built, Profile]:
    made: Built = getattr(models, name)()
    return made, budgetopt.profile(*made, optimizer=None)


def by_seed(seed: int, choices: tuple[Choice, ...]) -> Callable[[int], Choice]:
    return lambda value: random.Random(seed * 10_007 + value).choice(choices)


EXACT, ANY = (Choice.KEEP, Choice.RECOMPUTE), tuple(Choice)
FORCED = {
    "keep all": lambda value: Choice.KEEP,
    "drop all": lambda value: Choice.RECOMPUTE,
    "fp16 all": lambda value: Choice.FP16,
    "random 1": by_seed(1, EXACT),
    "random 2": by_seed(2, EXACT),
    "random 3": by_seed(3, EXACT),
    "random with fp16": by_seed(4, ANY),
}
BY_HAND = dict.fromkeys(("random 1", "random 2", "random 3", "fp16 all", "keep all"), pytest.mark.slow)


def check(name: str, plan: Plan, folder: Path) -> None:
    predicted = above_resident(built(name)[0], plan)
    measured = measured_elsewhere(name, (), plan, folder)
    assert abs(predicted - measured) <= TOLERANCE * measured, (predicted, measured)


@pytest.mark.parametrize("name", ["gpt2_small", "resnet_small"])
@pytest.mark.parametrize("choice", [pytest.param(name, marks=BY_HAND.get(name, ())) for name in FORCED])
def test_forced_plans(name: str, choice: str, tmp_path: Path) -> None:
    check(name, forced_plan(built(name)[1], FORCED[choice]), tmp_path)


@pytest.mark.parametrize(
    ("name", "share"),
    [pytest.param("gpt2_small", 0.75, marks=pytest.mark.slow), ("gpt2_small", 0.5), ("resnet_small", 0.9)],
)
def test_solved_plans(name: str, share: float, tmp_path: Path) -> None:
    profile = built(name)[1]
    resident = profile.fixed.total
    budget = resident + round(share * (profile.peak_bytes - resident))
    plan = budgetopt.solve(profile, budget, allow=("keep", "recompute"), time_limit=2)
    assert plan.predicted.peak_bytes <= budget
    check(name, plan, tmp_path)
