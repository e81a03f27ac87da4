"""The main path: one line, a bounded step, the same numbers, and no trace where none is needed."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import budgetopt
from budgetopt import _trial, _verify
from tests.models import Built, conv_stack, dropout_stack, fresh_batch, gpt2_small, mlp_stack, resnet_small
from tests.oracle import assert_same, plain_and_planned, run_steps
from tests.outside_meter import peak_bytes, resident_bytes

EXACT = ("keep", "recompute")


def share(built: Built, part: float) -> int:
    """The budget at a share of the activation bytes; measured on a copy, since a step moves statistics."""
    model, sample = copy.deepcopy(built[0]), built[1]
    return resident_bytes(model, sample) + round(part * peak_bytes(model, sample))


@pytest.mark.parametrize(
    ("build", "part"),
    [
        (gpt2_small, 0.75),
        (gpt2_small, 0.5),
        (resnet_small, 0.9),
        (mlp_stack, 0.6),
        (dropout_stack, 0.6),
        (conv_stack, 0.85),
    ],
)
def test_trains_as_before_under_the_budget(build: Callable[[], Built], part: float) -> None:
    model, sample = build()
    plain, planned = plain_and_planned(model)
    budget = share((model, sample), part)
    assert budgetopt.fit(planned, sample, budget, allow=EXACT, optimizer=None, time_limit=2) is planned
    plan = budgetopt.plan_of(planned)
    assert plan is not None and plan.drops
    batches = [fresh_batch(sample, seed) for seed in range(3)]
    assert_same(run_steps(plain, batches), run_steps(planned, batches))
    for batch in batches:
        planned.zero_grad(set_to_none=True)
        assert resident_bytes(planned, batch) + peak_bytes(planned, batch) <= budget


def test_fp16_stays_within_its_error() -> None:
    model, sample = gpt2_small()
    budget = share((model, sample), 0.85)
    budgetopt.fit(model, sample, budget, allow=("keep", "fp16"), optimizer=None)
    plan = budgetopt.plan_of(model)
    assert plan is not None and plan.measured is not None and plan.measured.grad_error is not None
    assert 0 < plan.measured.grad_error <= 1e-2
    assert plan.measured.peak_bytes <= budget


def test_fp16_is_left_out_where_its_error_is_too_large(capsys: pytest.CaptureFixture[str]) -> None:
    model, sample = gpt2_small()
    plain, planned = plain_and_planned(model)
    budget = share((model, sample), 0.75)
    budgetopt.fit(planned, sample, budget, optimizer=None, max_grad_error=0.0)
    assert_same(run_steps(plain, [sample]), run_steps(planned, [sample]))


def test_a_model_that_fits_is_not_touched(capsys: pytest.CaptureFixture[str]) -> None:
    model, sample = gpt2_small()
    before = [(path, set(vars(module)), dict(module._forward_hooks)) for path, module in model.named_modules()]
    budgetopt.fit(model, sample, "1GB", optimizer=None)
    assert [(p, set(vars(m)), dict(m._forward_hooks)) for p, m in model.named_modules()] == before
    plan = budgetopt.plan_of(model)
    assert plan is not None and not plan.drops
    assert "not touched" in capsys.readouterr().err


def test_fit_says_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    model, sample = mlp_stack()
    budget = share((model, sample), 0.6)
    capfd.readouterr()
    budgetopt.fit(model, sample, budget, allow=EXACT, optimizer=None, time_limit=2)
    out, err = capfd.readouterr()
    assert out == ""
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("budgetopt: ") and "gradients exact" in lines[0]


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything that fit must leave alone, as values that compare."""
    return {
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": str(np.random.get_state()),
        "parameters": {n: p.detach().clone().tolist() for n, p in model.named_parameters()},
        "buffers": {n: b.detach().clone().tolist() for n, b in model.named_buffers()},
        "gradients": {n: None if p.grad is None else p.grad.tolist() for n, p in model.named_parameters()},
        "training": {n: m.training for n, m in model.named_modules()},
        "attributes": {
            n: sorted(k for k in vars(m) if k not in ("forward", "_replicate_for_data_parallel"))
            for n, m in model.named_modules()
        },
        "requires_grad": {n: p.requires_grad for n, p in model.named_parameters()},
        "grad mode": torch.is_grad_enabled(),
    }


@pytest.mark.parametrize("alive", [False, True])
def test_fit_changes_nothing_else(alive: bool) -> None:
    model, sample = conv_stack()
    if alive:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    before = snapshot(model)
    budgetopt.fit(model, sample, share((model, sample), 0.85), allow=EXACT, optimizer=None, time_limit=2)
    plan = budgetopt.plan_of(model)
    assert plan is not None and plan.drops
    assert snapshot(model) == before


class Lazy(nn.Module):
    """Sets itself up in its first forward, as models do that capture outputs, and replaces an item of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.stack, self.sample = mlp_stack()
        self.last: list[torch.Tensor | None] = [torch.ones(2)]
        self.settings = Counter(width=32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "hooked" not in vars(self):
            self.hooked = True
            for block in self.stack.children():
                block.register_forward_hook(lambda module, args, out: 1.5 * out)
        out: torch.Tensor = self.stack(x)
        self.last[0] = out.detach()
        return out


def test_what_the_first_forward_sets_up_is_not_set_up_twice() -> None:
    model = Lazy()
    plain, planned = copy.deepcopy(model), model
    before = list(planned.last)
    budgetopt.fit(
        planned, model.sample, share((model.stack, model.sample), 0.8), allow=EXACT, optimizer=None, time_limit=2
    )
    assert planned.last[0] is before[0] and planned.settings == {"width": 32}
    assert not any(module._forward_hooks for module in planned.modules())
    assert_same(run_steps(plain, [model.sample], lr=0.01), run_steps(planned, [model.sample], lr=0.01))


class Fragile(nn.Module):
    """Raises in the n-th forward."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.stack, self.sample = mlp_stack()
        self.last = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        COUNT[0] += 1
        if COUNT[0] == self.last:
            raise KeyboardInterrupt
        out: torch.Tensor = self.stack(x)
        return out


COUNT = [0]


@pytest.mark.parametrize("last", [1, 2, 3, 4, 5, 6, 7])
def test_an_interrupted_fit_leaves_no_trace(last: int, tmp_path: Path) -> None:
    model = Fragile(last)
    budget = share((model.stack, model.sample), 0.6)
    before = snapshot(model)
    COUNT[0] = 0
    with pytest.raises(KeyboardInterrupt):
        budgetopt.fit(model, model.sample, budget, allow=EXACT, optimizer=None, plan=tmp_path / "p")
    assert snapshot(model) == before
    assert budgetopt.plan_of(model) is None
    assert not list(tmp_path.iterdir())
    assert all("forward" not in vars(module) for module in model.modules())


def test_fit_runs_few_steps() -> None:
    model = Fragile(0)
    budget = share((model.stack, model.sample), 0.6)
    COUNT[0] = 0
    budgetopt.fit(model, model.sample, budget, allow=EXACT, optimizer=None, time_limit=2)
    assert COUNT[0] == 7  # survey, two smaller batches, memory, clock, proof, peak


def test_a_second_plan_replaces_the_first_and_remove_undoes_it() -> None:
    model, sample = mlp_stack()
    before = [set(vars(module)) for module in model.modules()]
    for budget in [share((model, sample), part) for part in (0.8, 0.6, 0.7)]:
        budgetopt.fit(model, sample, budget, allow=EXACT, optimizer=None, time_limit=2)
    for module in model.modules():
        forward = vars(module).get("forward")
        assert forward is None or forward._before is None
    budgetopt.remove(model)
    assert [set(vars(module)) for module in model.modules()] == before
    assert budgetopt.plan_of(model) is None
    with pytest.raises(budgetopt.BudgetOptError, match="no plan on this model"):
        budgetopt.remove(model)


def test_a_fitted_model_keeps_what_its_plan_installs_and_nothing_of_an_earlier_one() -> None:
    model, sample = mlp_stack()
    before = [set(vars(module)) for module in model.modules()]
    budgetopt.fit(model, sample, share((model, sample), 0.6), allow=EXACT, optimizer=None, time_limit=2)
    planned = [module for module in model.modules() if "forward" in vars(module)]
    assert planned and all("_replicate_for_data_parallel" in vars(module) for module in planned)
    budgetopt.fit(model, sample, "1GB", allow=EXACT, optimizer=None, time_limit=2)
    assert [set(vars(module)) for module in model.modules()] == before


def test_the_optimizer_is_reserved_by_default() -> None:
    model, sample = mlp_stack()
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    steps = 4 * len(list(model.parameters()))  # one number each
    default = budgetopt.profile(model, sample)
    nothing = budgetopt.profile(model, sample, optimizer=None)
    assert default.fixed.optimizer == 2 * parameters + steps and nothing.fixed.optimizer == 0
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert budgetopt.profile(model, sample, optimizer=momentum).fixed.optimizer == parameters
    with pytest.raises(budgetopt.ProfileError, match="does not know how much state"):
        budgetopt.profile(model, sample, optimizer="shampoo")


def test_too_small_a_budget_says_what_would_do() -> None:
    model, sample = mlp_stack()
    with pytest.raises(budgetopt.InfeasibleBudgetError) as caught:
        budgetopt.fit(model, sample, resident_bytes(model, sample) + 4096, allow=EXACT, optimizer=None, time_limit=2)
    assert budgetopt.plan_of(model) is None
    budgetopt.fit(model, sample, caught.value.minimum, allow=EXACT, optimizer=None, time_limit=2)
    with pytest.raises(budgetopt.InfeasibleBudgetError):
        budgetopt.fit(model, sample, caught.value.minimum - 8192, allow=EXACT, optimizer=None, time_limit=2)


def test_over_the_budget_in_reality_is_an_error_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sample = mlp_stack()
    real = _verify.run_once

    def larger(*arguments: Any, **named: Any) -> Any:
        run = real(*arguments, **named)
        run.peak *= 2
        return run

    monkeypatch.setattr(_trial, "run_once", larger)
    with pytest.raises((budgetopt.OverBudgetError, budgetopt.InfeasibleBudgetError)):
        budgetopt.fit(model, sample, share((model, sample), 0.9), allow=EXACT, optimizer=None, time_limit=2)
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_step_and_a_loss_of_ones_own() -> None:
    model, sample = mlp_stack()
    plain, planned = plain_and_planned(model)
    target = torch.randn(64, 1)
    budget = share((model, sample), 0.7)

    def step(model: nn.Module, sample: Any) -> torch.Tensor:
        out = model(sample) if isinstance(sample, torch.Tensor) else model(*sample)
        off: torch.Tensor = out.mean() - target
        return off.square().mean()

    budgetopt.fit(planned, sample, budget, step=step, allow=EXACT, optimizer=None, time_limit=2)
    for copy_ in (plain, planned):
        step(copy_, sample).backward()  # type: ignore[no-untyped-call]
    for p, q in zip(plain.parameters(), planned.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)


class Counting(torch.nn.Module):
    """Counts into plain tensors, which are no buffers: one of its own and one in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.body, _ = mlp_stack(3, 16, 4)
        self.total = torch.zeros(())
        self.seen = [torch.zeros((), dtype=torch.long)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        self.total += out.detach().sum()
        self.seen[0] += len(x)
        return out


def test_tensors_that_a_step_counts_into_are_put_back() -> None:
    model, sample = Counting(), torch.randn(64, 16)
    total, seen = model.total, model.seen[0]
    with torch.no_grad():
        model(sample)
    before = total.clone()
    budgetopt.fit(model, sample, 10**9, optimizer=None)
    budgetopt.measure(model, sample, steps=2)
    assert model.total is total and torch.equal(total, before) and before != 0
    assert model.seen[0] is seen and seen == len(sample)
