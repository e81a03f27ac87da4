"""A fitted model is looked at while it trains: the real peak, one warning, another plan."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import budgetopt
from budgetopt import BudgetOptWarning, _torch, _watch
from budgetopt._apply import installed
from tests.oracle import assert_same, run_steps

EXACT = ("keep", "recompute")


def layers(count: int = 5) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(count)))


def loss(out: Tensor) -> Tensor:
    return out.square().mean()


def batch(rows: int) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))


def half(model: nn.Module, sample: Tensor) -> int:
    found = budgetopt.profile(model, sample, loss=loss, optimizer="sgd")
    return found.fixed.total + (found.peak_bytes - found.fixed.total) // 2


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_watch, "EVERY", 3)


def fitted(**options: Any) -> nn.Module:
    model, sample = layers(), batch(256)
    how: dict[str, Any] = {"loss": loss, "optimizer": "sgd", "allow": EXACT, "watch": True}
    return budgetopt.fit(model, sample, half(model, sample), **(how | options))


def watch(model: nn.Module) -> _watch.Watch:
    found = installed(model)
    assert found is not None
    one = found.regions[""].watch
    assert isinstance(one, _watch.Watch)
    return one


def train(model: nn.Module, rows: int, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(batch(rows))).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def test_what_it_sees_is_what_was_predicted() -> None:
    model = fitted()
    train(model, 256, 9)
    plan = budgetopt.plan_of(model)
    assert plan is not None and len(watch(model).peaks) == 3
    predicted = plan.predicted.peak_bytes - batch(256).nbytes  # the output, which `train` lets go before backward
    assert all(predicted - 1000 <= peak <= predicted for peak in watch(model).peaks)


def test_it_changes_nothing() -> None:
    plain = layers()
    model = copy.deepcopy(plain)
    budgetopt.fit(model, batch(256), half(plain, batch(256)), loss=loss, optimizer="sgd", allow=EXACT, watch=True)
    assert_same(run_steps(plain, [batch(256)], loss=loss, steps=9), run_steps(model, [batch(256)], loss=loss, steps=9))
    assert len(watch(model).peaks) == 3 and not _torch.profiler_running()


def test_a_larger_batch_is_warned_of_once() -> None:
    model = fitted()
    train(model, 256, 3)
    with pytest.warns(BudgetOptWarning) as said:
        train(model, 900, 15)
    over = [str(one.message) for one in said if "a step took" in str(one.message)]
    assert len(over) == 1 and "over the budget of" in over[0] and "replan=True" in over[0]


def test_a_larger_batch_is_planned_anew() -> None:
    plain = layers()
    model = copy.deepcopy(plain)
    budget = half(plain, batch(256))
    budgetopt.fit(model, batch(256), budget, loss=loss, optimizer="sgd", allow=EXACT, replan=True)
    before = budgetopt.plan_of(model)
    samples = [batch(256), batch(320), batch(256)]
    with pytest.warns(BudgetOptWarning) as said:
        trace = run_steps(model, samples, loss=loss, steps=9)
    assert sum("It was planned anew" in str(one.message) for one in said) == 1
    assert_same(run_steps(plain, samples, loss=loss, steps=9), trace)
    after = budgetopt.plan_of(model)
    assert before is not None and after is not None and after.profile.batch == 320 and before.profile.batch == 256
    assert after.predicted.peak_bytes <= budget
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, 320, 9)
    assert watch(model).rounds == 1 and watch(model).peaks[-1] <= budget < max(watch(model).peaks)


def test_what_can_not_be_planned_anew_is_said_once() -> None:
    model = fitted(replan=True)
    with pytest.warns(BudgetOptWarning) as said:
        train(model, 4000, 15)
    told = [str(one.message) for one in said if "can't be planned anew" in str(one.message)]
    assert len(told) == 1 and "the smallest" in told[0]


def test_a_budget_for_everything_is_watched_as_well() -> None:
    model = layers()
    budgetopt.fit(model, batch(256), "1GB", loss=loss, watch=True)
    train(model, 256, 5)
    assert len(watch(model).peaks) == 2
    budgetopt.remove(model)
    assert "forward" not in model.__dict__


@pytest.mark.parametrize("around", [True, False])
def test_a_user_s_profiler_has_precedence(around: bool) -> None:
    model = fitted()
    train(model, 256, 1)
    if around:
        with torch.profiler.profile(profile_memory=True) as profiler:
            train(model, 256, 2)
        assert watch(model).peaks == []
    else:
        out = loss(model(batch(256)))
        with torch.profiler.profile(profile_memory=True) as profiler:
            out.backward()  # type: ignore[no-untyped-call]
            train(model, 256, 1)
    assert any(event.name == "aten::addmm" for event in profiler.events())
    assert not _torch.profiler_running()
    train(model, 256, 6)
    assert watch(model).peaks


@pytest.mark.parametrize("then", ["gone", "evaluated", "raised"])
def test_nothing_goes_on_after_the_last_step(then: str) -> None:
    model = fitted()
    train(model, 256, 1)
    out = loss(model(batch(256)))
    assert _torch.profiler_running()
    if then == "gone":
        out.backward()  # type: ignore[no-untyped-call]
        del out
    elif then == "evaluated":
        with torch.no_grad():
            model(batch(256))
    else:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.randn(4, 5))
    assert not _torch.profiler_running() and len(watch(model).peaks) == 1


def _pickled(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    pickle.dump(model, buffer)
    buffer.seek(0)
    found: nn.Module = pickle.load(buffer)
    return found


@pytest.mark.parametrize("clone", [copy.deepcopy, _pickled])
def test_a_copy_is_not_watched(clone: Callable[[nn.Module], nn.Module]) -> None:
    model = fitted()
    other = clone(model)
    train(other, 256, 5)
    assert watch(model).peaks == []


def test_neither_model_nor_optimizer_are_kept_alive() -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss(model(batch(256))).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    budgetopt.fit(model, batch(256), half(model, batch(256)), loss=loss, optimizer=optimizer, replan=True)
    train(model, 256, 3)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    freed = weakref.ref(model)
    del model
    assert freed() is None


def test_a_step_function_can_not_be_planned_anew() -> None:
    model = layers()
    with pytest.raises(budgetopt.BudgetOptError, match="replan=True"):
        budgetopt.fit(model, batch(256), "1GB", step=lambda m, x: loss(m(x)), replan=True)
    assert "forward" not in model.__dict__
