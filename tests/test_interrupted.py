"""An error or Ctrl-C anywhere in `fit`: nothing has changed, no plan is installed, and the next fit works."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

import budgetopt
from budgetopt import (
    _apply,
    _device,
    _fit,
    _fixed,
    _profile,
    _regions,
    _schema,
    _solve,
    _state,
    _step,
    _torch,
    _verify,
)
from budgetopt._torch import TorchDispatchMode as Mode
from tests.test_bad_input import EXACT, built, tight
from tests.untouched import everything, refused

PATH = (_apply, _device, _fit, _fixed, _profile, _regions, _schema, _solve, _state, _step, _verify)


class AtOperator(Mode):  # type: ignore[misc]  # untyped in torch
    """Raises at the n-th operator that is dispatched."""

    def __init__(self, n: int, error: BaseException) -> None:
        super().__init__()
        self.count, self.n, self.error = 0, n, error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.n:
            raise self.error
        return func(*args, **(kwargs or {}))


class AtCall:
    """Raises at the n-th time that a function of the main path is entered or left."""

    def __init__(self, n: int, error: BaseException) -> None:
        self.count, self.n, self.error = 0, n, error
        self.patched = pytest.MonkeyPatch()
        self.wrapped: dict[FunctionType, Any] = {}

    def __enter__(self) -> AtCall:
        for module in PATH:
            for name, found in list(vars(module).items()):
                if isinstance(found, FunctionType) and found.__module__.startswith("budgetopt.") and name != "fit":
                    self.patched.setattr(module, name, self.wrapped.setdefault(found, self.counting(found)))
        return self

    def __exit__(self, *error: Any) -> None:
        self.patched.undo()

    def counting(self, function: FunctionType) -> Any:
        @functools.wraps(function)
        def counted(*arguments: Any, **named: Any) -> Any:
            self.step()
            result = function(*arguments, **named)
            if function.__name__ != "write_atomically":  # the file is there: too late to have done nothing
                self.step()
            return result

        return counted

    def step(self) -> None:
        self.count += 1
        if self.count == self.n:
            raise self.error


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, int]:
    """How many operators and calls one undisturbed fit has."""
    found: dict[Any, int] = {}
    kinds: tuple[Any, ...] = (AtOperator, AtCall)
    for kind in kinds:
        model, sample = built()
        budget = tight(model, sample)
        with kind(0, KeyboardInterrupt()) as bomb:
            fit(model, sample, budget, tmp_path_factory.mktemp("plans") / "plan.json")
        found[kind] = bomb.count
    assert all(count > 300 for count in found.values()), found
    return found


def fit(model: Any, sample: Any, budget: int, path: Path) -> None:
    budgetopt.fit(model, sample, budget, optimizer=None, allow=EXACT, plan=path)


@pytest.mark.parametrize("share", [0, 0.002, *(i / 12 for i in range(1, 12)), 0.998, 1])
@pytest.mark.parametrize("kind", [AtOperator, AtCall])
def test_interrupted_anywhere(kind: Any, share: float, counts: dict[Any, int], tmp_path: Path) -> None:
    model, sample = built()
    budget = tight(model, sample)
    before = everything(model, tmp_path)
    raised = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt) as caught, kind(1 + round(share * (counts[kind] - 5)), raised):
        fit(model, sample, budget, tmp_path / "plan.json")
    assert caught.value is raised
    after = everything(model, tmp_path)
    changed = [part for part in before if before[part] != after[part]]
    assert not changed, f"changed: {changed}"
    assert budgetopt.plan_of(model) is None
    fit(model, sample, budget, tmp_path / "plan.json")
    plan = budgetopt.plan_of(model)
    assert plan is not None and plan.drops


@pytest.mark.parametrize("share", [i / 8 for i in range(8)])
def test_an_error_anywhere_is_undone_or_planned_around(
    share: float, counts: dict[Any, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Recording takes errors of its own for a reason to keep, so fit may also end well."""
    model, sample = built()
    budget = tight(model, sample)
    before = everything(model, tmp_path)
    try:
        with AtOperator(1 + round(share * counts[AtOperator]), RuntimeError("injected")):
            fit(model, sample, budget, tmp_path / "plan.json")
    except (RuntimeError, budgetopt.BudgetOptError) as error:
        assert "injected" in str(error) or isinstance(error, budgetopt.BudgetOptError)
        assert everything(model, tmp_path) == before and budgetopt.plan_of(model) is None
    else:
        plan = budgetopt.plan_of(model)
        assert plan is not None and plan.measured is not None and plan.measured.peak_bytes <= budget


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_an_earlier_plan_is_back_after_an_interrupted_fit(share: float, counts: dict[Any, int], tmp_path: Path) -> None:
    model, sample = built()
    budget = tight(model, sample)
    fit(model, sample, budget, tmp_path / "first.json")
    first, names = budgetopt.plan_of(model), [set(vars(module)) for module in model.modules()]
    with pytest.raises(KeyboardInterrupt), AtOperator(round(share * counts[AtOperator]), KeyboardInterrupt()):
        fit(model, sample, budget + 2048, tmp_path / "second.json")
    assert budgetopt.plan_of(model) is first and [p.name for p in tmp_path.iterdir()] == ["first.json"]
    assert [set(vars(module)) for module in model.modules()] == names
    budgetopt.remove(model)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("n", range(1, 9))
def test_no_profiler_stays_running(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two runs points stderr elsewhere as the profiler starts and as it stops: interrupted before and after."""
    real, count = _device._quiet_stderr, 0

    def step() -> None:
        nonlocal count
        count += 1
        if count == n:
            raise KeyboardInterrupt

    @contextmanager
    def quiet() -> Iterator[None]:
        step()
        with real():
            yield
        step()

    monkeypatch.setattr(_device, "_quiet_stderr", quiet)
    model, sample = built()
    with refused(model, KeyboardInterrupt, "^$"):
        budgetopt.measure(model, sample, steps=2)


@pytest.mark.parametrize("n", range(1, 9))
def test_putting_back_goes_on_after_ctrl_c(n: int) -> None:
    model, sample = built()
    bomb = AtOperator(0, KeyboardInterrupt())
    with refused(model, KeyboardInterrupt, "^$"), bomb, _state.untouched(model, sample):
        with torch.no_grad():
            for tensor in [*model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]:
                tensor.add_(1)
        model.seen.append(1)
        bomb.n = bomb.count + n


FIRST_USE = """
import random
before = random.getstate()
import torch, budgetopt
state = torch.get_rng_state()
model = torch.nn.Linear(4, 4)
state = torch.get_rng_state()
budgetopt.fit(model, torch.ones(2, 4), "1GB")
text = str(budgetopt.plan_of(model)) + str(budgetopt.plan_of(model).profile)
assert random.getstate() == before, "Python's random numbers moved"
assert torch.equal(torch.get_rng_state(), state), "torch's random numbers moved"
"""


def test_the_first_use_in_a_process_moves_no_random_numbers() -> None:
    """Modules that are imported late may draw numbers as they are."""
    done = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Refusing(torch.autograd.Function):
    """Has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise KeyError("no gradient today")


def test_an_error_inside_a_node_leaves_no_mode_on() -> None:
    """Not even in what torch notes of modes for its compiler."""

    class Layer(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            refusing: Any = Refusing.apply
            out: torch.Tensor = super().forward(refusing(super().forward(x)))
            return out

    before = _torch.modes()
    with pytest.raises(KeyError, match="no gradient today"):
        budgetopt.profile(torch.nn.Sequential(Layer(8, 8), Layer(8, 8)), torch.randn(4, 8))
    assert _torch.modes() == before
