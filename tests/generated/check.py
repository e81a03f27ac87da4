"""Train a generated model plain and under a plan, and say in what they differ."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import budgetopt
from budgetopt import BudgetOptWarning, InfeasibleBudgetError, OverBudgetError, Profile
from budgetopt.solvers import Choice
from tests.forced import by_lot, force
from tests.generated.grammar import Model
from tests.generated.steps import STEPS, Step
from tests.oracle import Trace, first_difference, run_steps
from tests.outside_meter import peak_bytes, resident_bytes
from tests.plans import forced_plan

Outcome: TypeAlias = "Trace | Exception"
EXACT = ("keep", "recompute")
SOLVING: dict[str, Any] = {"solver": "greedy", "time_limit": 1.0, "allow": EXACT}
FP16_ERROR = 0.01
SMALL = 100.0
"""Gradients of this size and more may owe it to activations that fp16 can't tell apart."""


@contextmanager
def calm() -> Iterator[None]:
    """What torch and budgetopt warn of is not the question here; numerics of other threads' making neither."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def trained(model: nn.Module, samples: Sequence[Tensor], step: Step, lr: float = 0.05) -> Outcome:
    """Three steps, or the error that came first. The samples stay as they are."""
    own = [sample.clone() for sample in samples]
    try:
        return run_steps(model, own, step=step, lr=lr)
    except Exception as error:
        return error


def differ(plain: Outcome, planned: Outcome) -> str | None:
    """In words, or None: the same numbers, or the same kind of error."""
    if isinstance(plain, Trace) and isinstance(planned, Trace):
        return first_difference(plain, planned)
    if type(plain) is type(planned):
        return None
    return f"plain: {_shown(plain)}; planned: {_shown(planned)}"


def _shown(outcome: Outcome) -> str:
    return "trained" if isinstance(outcome, Trace) else f"{type(outcome).__name__}: {outcome}"


@dataclass
class Pair:
    """A model, its plain copy, and how both are trained."""

    description: Model
    samples: list[Tensor]

    @property
    def step(self) -> Step:
        return STEPS[self.description.train]

    def plain(self, samples: Sequence[Tensor] | None = None) -> Outcome:
        return trained(self.description.build(), samples or self.samples, self.step)

    def same(self, model: nn.Module, samples: Sequence[Tensor] | None = None) -> None:
        """Train both and compare; `model` is a copy of the description's with a plan on it."""
        difference = differ(self.plain(samples), trained(model, samples or self.samples, self.step))
        assert difference is None, difference

    def profile(self) -> tuple[nn.Module, Profile]:
        """A fresh model and its profile."""
        model = self.description.build()
        before = copy.deepcopy(model)
        found = budgetopt.profile(model, self.samples[0].clone(), step=self.step, optimizer=None)
        _require_untouched(before, model)
        return model, found


def pair(description: Model) -> Pair:
    """With two batches of other data."""
    return Pair(description, [description.sample(seed) for seed in (11, 12)])


def _require_untouched(before: nn.Module, after: nn.Module) -> None:
    state, now = before.state_dict(), after.state_dict()
    assert list(state) == list(now)
    assert all(torch.equal(state[name].nan_to_num(), now[name].nan_to_num()) for name in state)


def dropped_by_lot(description: Model, seed: int, whole: bool) -> bool:
    """Every value kept or made again as a coin falls, without any plan; returns whether plain trains at all.

    Args:
        whole: the model is one region, else every part of the body.
    """
    both = pair(description)
    model = description.build()
    paths = [""] if whole else [f"body.{number}" for number, _ in enumerate(model.body.children())]  # type: ignore[operator, union-attr]
    force(model, by_lot(seed), paths, snapshot=True)
    plain = both.plain()
    difference = differ(plain, trained(model, both.samples, both.step))
    assert difference is None, difference
    return isinstance(plain, Trace)


def planned_by_lot(description: Model, seed: int, batch: int) -> bool:
    """A plan of every legal choice by lot, on the profiled batch and on one of another size."""
    both = pair(description)
    if not isinstance(both.plain(), Trace):
        return False
    model, profile = both.profile()
    budgetopt.apply(model, forced_plan(profile, _coins(seed)))
    both.same(copy.deepcopy(model))
    both.same(model, [description.sample(seed, batch) for seed in (21, 22)])
    return True


def _coins(seed: int) -> Callable[[int], Choice]:
    coin = random.Random(seed)
    return lambda value: coin.choice((Choice.KEEP, Choice.RECOMPUTE))


def fitted(description: Model, share: float) -> str:
    """A solved plan for `share` of the way from the smallest budget to plain: exact, and within it from outside.

    Returns:
        what it was: "rejected" (plain does not train), "kept" (nothing to gain), or "planned".
    """
    both = pair(description)
    if not isinstance(both.plain(), Trace):
        return "rejected"
    _, profile = both.profile()
    least = _least(profile)
    budget = least + round(share * (profile.peak_bytes - least))
    model = description.build()
    try:
        budgetopt.fit(model, both.samples[0].clone(), budget, step=both.step, optimizer=None, **SOLVING)
    except (InfeasibleBudgetError, OverBudgetError) as error:
        if description.names() & {"numpy_into_empty", "numpy_over_a_result"} or description.routed():
            return f"refused: {type(error).__name__}"
        raise
    _require_within(budget, model, both)
    both.same(model)
    return "kept" if not budgetopt.plan_of(model).drops else "planned"  # type: ignore[union-attr]


def _least(profile: Profile) -> int:
    try:
        budgetopt.solve(profile, profile.fixed.total + 1, **SOLVING)
    except InfeasibleBudgetError as error:
        return error.minimum
    raise AssertionError("one byte for all activations can't be enough")


def _require_within(budget: int, model: nn.Module, both: Pair) -> None:
    """By the meter that knows nothing of us, on data that the plan was not made with."""
    if both.description.routed():
        return
    probe, sample = copy.deepcopy(model), both.samples[1].clone()
    took = resident_bytes(probe, sample) + peak_bytes(probe, sample, step=both.step)
    assert took <= budget, f"{took} bytes of {budget}"


def halved(description: Model) -> bool:
    """Everything that may be is stored in fp16: as finite as plain, and close where numbers are small."""
    both = pair(description)
    plain = both.plain()
    if not isinstance(plain, Trace):
        return False
    model, profile = both.profile()
    budgetopt.apply(model, forced_plan(profile, lambda value: Choice.FP16))
    planned = trained(model, both.samples, both.step)
    assert isinstance(planned, Trace), planned
    assert torch.equal(plain.losses[0], planned.losses[0]) or plain.losses[0].isnan(), "the first loss is exact"
    for name, exact in plain.gradients[0].items():
        found = planned.gradients[0][name]
        assert (exact is None) is (found is None), name
        if exact is not None and found is not None:
            assert not exact.isfinite().all() or found.isfinite().all(), f"{name}: {found} for {exact}"
    error, norm = _distance(plain.gradients[0], planned.gradients[0])
    assert not norm < SMALL or error <= FP16_ERROR * (norm + 0.1), f"{error} of {norm}"
    return True


def _distance(exact: dict[str, Tensor | None], found: dict[str, Tensor | None]) -> tuple[float, float]:
    pairs = [(e, f) for e, f in zip(exact.values(), found.values(), strict=True) if e is not None and f is not None]
    error = sum(float((e - f).abs().square().sum()) for e, f in pairs)
    return error**0.5, sum(float(e.abs().square().sum()) for e, _ in pairs) ** 0.5
