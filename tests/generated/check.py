"""Train a generated model plain and under a plan, and say in what they differ."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import budgetopt
from budgetopt import InfeasibleBudgetError, OverBudgetError, Plan, Profile
from budgetopt.solvers import Choice
from tests.forced import by_lot, force
from tests.generated.functions import BEHIND, ROUTED
from tests.generated.grammar import Model
from tests.generated.steps import STEPS, Step
from tests.oracle import Trace, first_difference, run_steps
from tests.outside_meter import peak_bytes, resident_bytes
from tests.plans import forced_plan

Outcome: TypeAlias = "Trace | Exception"
EXACT = ("keep", "recompute")
SOLVING: dict[str, Any] = {"solver": "greedy", "time_limit": 1.0, "allow": EXACT}
SMALLEST = 1024
"""Bytes: budgets under this are taken for a slip."""
UNFORESEEN = frozenset({*BEHIND, *ROUTED, "Checkpointed"})
"""What only running a plan shows (bytes written or made where nobody looks): a budget may be refused after that."""
FP16_ERROR = 0.1
"""Of the gradient: a chain of ``tanh`` near 1 amplifies what half precision rounds off."""
SMALL = 100.0
"""Gradients of this size and more may owe it to activations that fp16 can't tell apart."""


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
        self.compare(self.plain(samples), trained(model, samples or self.samples, self.step), samples)

    def compare(self, plain: Outcome, planned: Outcome, samples: Sequence[Tensor] | None = None) -> None:
        """No difference, unless plain differs from itself: some operators of torch's read what nobody wrote."""
        difference = differ(plain, planned)
        assert difference is None or differ(plain, self.plain(samples)) is not None, difference

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
    paths = [""] if whole else [f"body.{name}" for name, _ in model.get_submodule("body").named_children()]
    force(model, by_lot(seed), paths, snapshot=True)
    plain = both.plain()
    both.compare(plain, trained(model, both.samples, both.step))
    return isinstance(plain, Trace)


def planned_by_lot(model: nn.Module, profile: Profile, both: Pair, seed: int, batch: int) -> None:
    """A plan of every legal choice by lot, on the profiled size of batch and on another."""
    budgetopt.apply(model, forced_plan(profile, _coins(seed)))
    both.same(copy.deepcopy(model))
    both.same(model, [both.description.sample(seed, batch) for seed in (21, 22)])


def _coins(seed: int) -> Callable[[int], Choice]:
    coin = random.Random(seed)
    return lambda value: coin.choice((Choice.KEEP, Choice.RECOMPUTE))


def fitted(profile: Profile, both: Pair, share: float) -> str:
    """A solved plan for `share` of the way from the smallest budget to plain: exact, and within it from outside.

    Returns:
        "kept" (plain fits), "planned", or the error of a budget that was refused after the plan was tried.
    """
    model, sample = both.description.build(), both.samples[0].clone()
    least, most = _least(profile), _took(both.description.build(), both)
    budget = least.budget_bytes + round(share * max(0, most - least.budget_bytes))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        least.save(path)  # and with it the profile: that is what takes time
        try:
            budgetopt.fit(model, sample, budget, step=both.step, optimizer=None, plan=path, **SOLVING)
        except (InfeasibleBudgetError, OverBudgetError) as error:
            assert both.description.names() & UNFORESEEN, error
            return type(error).__name__
    assert both.description.routed() or _took(copy.deepcopy(model), both) <= budget, "over the budget"
    both.same(model)
    plan = budgetopt.plan_of(model)
    return "planned" if plan is not None and plan.drops else "kept"


def _least(profile: Profile) -> Plan:
    """The plan for the smallest budget that is found."""
    smallest = max(profile.fixed.total + 1, SMALLEST)
    try:
        return budgetopt.solve(profile, smallest, **SOLVING)
    except InfeasibleBudgetError as error:
        return budgetopt.solve(profile, error.minimum, **SOLVING)


def _took(model: nn.Module, both: Pair) -> int:
    """Bytes of a step, by the meter that knows nothing of us, on data that no plan was made with."""
    sample = both.samples[1].clone()
    return resident_bytes(model, sample) + peak_bytes(model, sample, step=both.step)


def halved(model: nn.Module, profile: Profile, both: Pair, plain: Trace) -> None:
    """Everything that may be is stored in fp16: as finite as plain, and close where numbers are small."""
    budgetopt.apply(model, forced_plan(profile, lambda value: Choice.FP16))
    planned = trained(model, both.samples, both.step)
    assert isinstance(planned, Trace), planned
    for name, exact in plain.gradients[0].items():
        found = planned.gradients[0][name]
        assert (exact is None) is (found is None), name
        if exact is not None and found is not None:
            assert not exact.isfinite().all() or found.isfinite().all(), f"{name}: {found} for {exact}"
    error, norm = _distance(plain.gradients[0], planned.gradients[0])
    assert not norm < SMALL or error <= FP16_ERROR * (norm + 0.1), f"{error} of {norm}"


def _distance(exact: dict[str, Tensor | None], found: dict[str, Tensor | None]) -> tuple[float, float]:
    pairs = [(e, f) for e, f in zip(exact.values(), found.values(), strict=True) if e is not None and f is not None]
    error = sum(float((e - f).abs().square().sum()) for e, f in pairs)
    return error**0.5, sum(float(e.abs().square().sum()) for e, _ in pairs) ** 0.5


def all_plans(description: Model, seed: int, batch: int, share: float) -> str:
    """One profile, and every kind of plan made from it; "rejected" where plain does not train."""
    both = pair(description)
    plain = both.plain()
    if not isinstance(plain, Trace):
        return "rejected"
    model, profile = both.profile()
    if not description.names() & set(BEHIND):
        planned_by_lot(copy.deepcopy(model), profile, both, seed, batch)
        halved(copy.deepcopy(model), profile, both, plain)
    return fitted(profile, both, share)
