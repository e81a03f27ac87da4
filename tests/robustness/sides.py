"""The plain model and the same one under a plan, which may be forced or found."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
from torch import nn

import budgetopt
from budgetopt import Profile
from budgetopt._apply import installed
from budgetopt.solvers import Choice
from tests.oracle import Trace, assert_same, run_steps
from tests.plans import forced_plan

How = Literal["dropped", "halved", "solved"]
"""dropped: everything that may be made again is; halved: everything that may be is stored in fp16; solved: by `fit`,
exact, for two fifths of the activation bytes or the smallest budget."""

exactly = pytest.mark.parametrize("how", ["dropped", "solved"])
"""Both ways of planning that leave every bit as it is."""

SHARE = 0.4
EXACT = ("keep", "recompute")
SECONDS = 2.0
SLACK = 10
"""Percent of the way up to the plain peak: the next solve is short as well, and need not find quite as small a one."""


def planned(model: nn.Module, sample: Any, how: How, **options: Any) -> nn.Module:
    """The model itself, under a plan. `options`: of ``profile`` (step, loss, optimizer)."""
    profile = budgetopt.profile(model, sample, **options)
    if how == "solved":
        return budgetopt.fit(model, sample, budget(profile), allow=EXACT, time_limit=SECONDS, **options)
    choice = Choice.RECOMPUTE if how == "dropped" else Choice.FP16
    budgetopt.apply(model, forced_plan(profile, lambda v: choice))
    return model


def budget(profile: Profile, share: float = SHARE) -> int:
    """Bytes of a share of the activations, or of the smallest budget that is found."""
    resident = profile.fixed.total
    wanted = resident + round(share * (profile.peak_bytes - resident))
    try:
        budgetopt.solve(profile, wanted, allow=EXACT, time_limit=SECONDS)
    except budgetopt.InfeasibleBudgetError as error:
        return error.minimum + SLACK * max(0, profile.peak_bytes - error.minimum) // 100
    return wanted


def same_as_plain(
    model: nn.Module, sample: Any, how: How, *, options: dict[str, Any] | None = None, **steps: Any
) -> tuple[nn.Module, nn.Module, Trace]:
    """Train both side by side, and compare everything; the plain model, the planned one, and what the latter left.

    Args:
        options: as :func:`planned` takes them. steps: as ``run_steps`` takes them.
    """
    plain = copy.deepcopy(model)
    planned(model, sample, how, **(options or {}))
    trace = run_steps(model, [sample], **steps)
    assert_same(run_steps(plain, [sample], **steps), trace)
    return plain, model, trace


def replays(model: nn.Module) -> int:
    """Operators that the plan on the model has made again so far."""
    found = installed(model)
    return 0 if found is None else sum(region.counters.replayed for region in found.regions.values())
