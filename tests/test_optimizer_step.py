"""The optimizer's own step is part of the step: where it sets the peak, the prediction knows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import budgetopt
from budgetopt import Profile
from budgetopt._optimizer import Footprint, footprint
from budgetopt._problem import describe_event, keep_all
from budgetopt.solvers import Kind
from tests.models import Built, mlp_stack
from tests.outside_meter import peak_bytes, resident_bytes, state_bytes

Make = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
SGD, ADAM, ADAMW, RMSPROP = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop
OPTIMIZERS: dict[str, Make] = {
    "adamw": ADAMW,
    "adamw foreach": partial(ADAMW, foreach=True),
    "adamw for-loop": partial(ADAMW, foreach=False),
    "adam with decay": partial(ADAM, weight_decay=0.1),
    "amsgrad": partial(ADAM, amsgrad=True, maximize=True),
    "amsgrad foreach": partial(ADAM, amsgrad=True, foreach=True, weight_decay=0.1),
    "momentum": partial(SGD, lr=0.1, momentum=0.9),
    "momentum with decay": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True, foreach=False),
    "momentum foreach": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "rmsprop": RMSPROP,
    "rmsprop foreach": partial(RMSPROP, foreach=True, centered=True, momentum=0.5),
    "radam": torch.optim.RAdam,
}


def uneven_mlp() -> Built:
    """Wide layers of many sizes and one example: weights are everything, and their order matters."""
    widths = (200, 301, 720, 430, 512, 12)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [m for i, o in pairwise(widths) for m in (nn.Linear(i, o), nn.ReLU())]
        return nn.Sequential(*layers).train(), torch.randn(1, widths[0])


def bytes_of(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def largest_of(model: nn.Module) -> int:
    return max(p.numel() * p.element_size() for p in model.parameters())


def binds(profile: Profile) -> bool:
    """Whether the optimizer's step is where memory is highest."""
    return describe_event(profile, keep_all(profile).peak_event).startswith("optimizer.step")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_real_steps_take_what_is_predicted(name: str) -> None:
    model, sample = uneven_mlp()
    optimizer = OPTIMIZERS[name](model.parameters())
    before = budgetopt.profile(model, sample, optimizer=optimizer)
    resident = resident_bytes(model, sample)
    first = resident + peak_bytes(model, sample, warmup=0, optimizer=optimizer)
    after = budgetopt.profile(model, sample, optimizer=optimizer)
    state = state_bytes(optimizer)
    # RAdam's steps take most from its sixth on.
    later = resident + state + peak_bytes(model, sample, warmup=6 if name == "radam" else 0, optimizer=optimizer)
    assert binds(before) == (name != "momentum")  # which needs nothing but its state
    assert before.fixed.optimizer == after.fixed.optimizer == state
    assert before.peak_bytes == after.peak_bytes
    assert first <= later <= before.peak_bytes <= 1.005 * later


def test_the_temporaries_of_adam_by_hand() -> None:
    """The loop holds the last denominator while it makes the next, and its square root; foreach holds one of each."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    each = 256 * 256 * 4
    loop = footprint(model, ADAMW(model.parameters(), foreach=False))
    assert loop.state == 4 * (2 * each + 4)  # and the number of the step
    assert 3 * each <= loop.workspace <= 3 * each + 64
    together = footprint(model, ADAMW(model.parameters(), foreach=True))
    assert 4 * each <= together.workspace <= 4 * each + 64
    assert footprint(model, ADAMW(model.parameters(), fused=True)).workspace <= 64
    assert footprint(model, SGD(model.parameters(), lr=0.1)) == (0, 0, footprint(model, SGD(model.parameters())).kind)


def test_groups_keep_their_settings_and_types() -> None:
    wide, narrow = nn.Linear(400, 500, bias=False), nn.Linear(300, 300, bias=False).to(torch.bfloat16)
    model = nn.ModuleList([wide, narrow])
    groups = [{"params": [wide.weight], "momentum": 0.0}, {"params": [narrow.weight], "momentum": 0.9}]
    found = footprint(model, SGD(groups, lr=0.1))
    assert found.state == pytest.approx(300 * 300 * 2, rel=0.002)
    assert footprint(model, ADAMW(model.parameters())).state == 2 * (400 * 500 * 4 + 300 * 300 * 2) + 2 * 4


def test_a_name_is_its_class_with_its_defaults() -> None:
    model, _ = uneven_mlp()
    named, made = footprint(model, "AdamW"), footprint(model, ADAMW(model.parameters()))
    assert named[:2] == made[:2] and named.workspace > largest_of(model)
    assert footprint(model, None) == Footprint(0, 0, "")
    assert footprint(model, "lion")[:2] == (bytes_of(model), bytes_of(model))  # not torch's: one copy for its step


class Stubborn(torch.optim.Optimizer):
    """Not made as torch's own are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Keep one number per parameter."""
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["mean"] = p.detach().mean()


def test_what_cannot_be_tried_is_taken_to_need_a_copy() -> None:
    model, sample = uneven_mlp()
    stubborn = Stubborn(model)
    with pytest.raises(budgetopt.ProfileError, match=r"'stubborn' holds: run one step"):
        footprint(model, stubborn)
    stubborn.step()
    assert footprint(model, stubborn)[:2] == (10 * 4, bytes_of(model))
    lbfgs = torch.optim.LBFGS(model.parameters())
    lbfgs.step(lambda: _backward(model, sample).detach())  # type: ignore[no-untyped-call]
    assert footprint(model, lbfgs).workspace == bytes_of(model)


def _backward(model: nn.Module, sample: Any) -> torch.Tensor:
    loss: torch.Tensor = model(sample).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


class Steady(torch.optim.Optimizer):
    """Made as torch's own are; takes a buffer of 1000 bytes, whatever it steps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing else."""
        torch.empty(250)


class Gram(Steady):
    """Takes the products of a matrix's shorter side."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Keep a first gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p]["kept"] = p.grad.clone()
                p.grad @ p.grad.T if p.shape[0] < p.shape[1] else p.grad.T @ p.grad


def test_what_does_not_grow_is_not_scaled() -> None:
    assert footprint(uneven_mlp()[0], Steady(uneven_mlp()[0].parameters()))[:2] == (0, 1000)


@pytest.mark.parametrize("make", [torch.optim.Adafactor, torch.optim.Muon, Gram])
def test_work_on_matrices_is_not_scaled_from_small_ones(make: Any) -> None:
    """Rows, columns and products of matrices do not grow with the number of elements."""
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 512, bias=False))
    optimizer = make(model.parameters())
    _backward(model, torch.randn(1, 256))
    optimizer.step()
    assert footprint(model, optimizer)[:2] == (state_bytes(optimizer), bytes_of(model))


def test_the_users_optimizer_hooks_and_random_numbers_are_left_alone() -> None:
    model, sample = uneven_mlp()
    optimizer = ADAMW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    _backward(model, sample)
    optimizer.step()
    schedule.step()
    calls: list[str] = []
    optimizer.register_step_post_hook(lambda *_: calls.append("own"))
    everyones = register_optimizer_step_pre_hook(lambda *_: calls.append("everyone's"))
    try:
        weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        drawn = torch.get_rng_state()
        budgetopt.profile(model, sample, optimizer=optimizer)
        assert not calls and torch.equal(torch.get_rng_state(), drawn)
        now = optimizer.state_dict()
        assert now["param_groups"] == state["param_groups"]
        for index, kept in state["state"].items():
            assert all(torch.equal(now["state"][index][key], value) for key, value in kept.items())
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in weights.items())
    finally:
        everyones.remove()


def test_nothing_is_added_without_an_optimizer() -> None:
    model, sample = mlp_stack()
    nothing = budgetopt.profile(model, sample, optimizer=None)
    assert (nothing.optimizer_workspace, nothing.optimizer_kind) == (0, "")
    assert len(keep_all(nothing).peaks) == len(nothing.events)
    default = budgetopt.profile(model, sample)
    assert default.optimizer_workspace and len(keep_all(default).peaks) == len(default.events) + 1
    assert default.events == nothing.events and default.events[-1][0] == Kind.BACKWARD_END


def test_the_step_sets_the_minimum_and_the_error_says_so() -> None:
    model, sample = uneven_mlp()
    with pytest.raises(budgetopt.InfeasibleBudgetError, match=r"at optimizer\.step, after the backward pass") as caught:
        budgetopt.fit(model, sample, bytes_of(model) * 4 + largest_of(model))
    budgetopt.fit(model, sample, caught.value.minimum)
    plan = budgetopt.plan_of(model)
    assert plan is not None and plan.measured is not None
    assert plan.predicted.peak_at == "optimizer.step, after the backward pass"
    # The output lives through the optimizer's step in a loop that holds it; the verifying step lets it go before.
    assert 0 <= plan.predicted.peak_bytes - plan.measured.peak_bytes <= 12 * 4 + 2 * 4


def test_a_saved_plan_is_solved_again_for_an_optimizer_that_needs_more(tmp_path: Any) -> None:
    model, sample = uneven_mlp()
    path = tmp_path / "plan.json"
    loop, together = ADAMW(model.parameters(), foreach=False), ADAMW(model.parameters(), foreach=True)
    budget = budgetopt.profile(model, sample, optimizer=loop).peak_bytes + 8192
    budgetopt.fit(model, sample, budget, optimizer=loop, plan=path)
    with pytest.raises(budgetopt.InfeasibleBudgetError, match=r"optimizer\.step"):
        budgetopt.fit(model, sample, budget, optimizer=together, plan=path)
    budgetopt.fit(model, sample, budget + bytes_of(model), optimizer=together, plan=path)
    found = budgetopt.Plan.load(path)
    assert found.profile.optimizer_workspace == footprint(model, together).workspace
    assert found.predicted.peak_bytes == budgetopt.profile(model, sample, optimizer=together).peak_bytes
