"""Custom autograd functions in planned layers, and forwards that never see a backward pass."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import budgetopt
from budgetopt._fixed import Resident
from budgetopt._step import Step
from budgetopt._verify import run_once
from tests.oracle import assert_same, run_steps

from .cases import case
from .sides import How, exactly, planned, replays, same_as_plain
from .test_autograd import NOTHING, blocks, sample


class ReadsTwice(torch.autograd.Function):
    """A cube: unpacks what it saved twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (first,) = ctx.saved_tensors
        return grads[0] * 3 * first * ctx.saved_tensors[0]


class Hangs(torch.autograd.Function):
    """A cube that hangs a tensor on its context, where no hook sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.square = x * x
        return x * ctx.square  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 3 * ctx.square


class Custom(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(16, 16), function

    def forward(self, x: Tensor) -> Any:
        return x + self.function.apply(self.inner(x).sin()).exp().tanh()


def custom(function: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Custom(function) for _ in range(4)))


@case("Autograd", "a custom function reads its saved tensors twice", "exact", threads="mamba#909, pytorch#82156")
def test_saved_tensors_read_twice() -> None:
    _, model, _ = same_as_plain(custom(ReadsTwice), sample(), "dropped", options=NOTHING)
    assert replays(model)


@exactly
@case("Autograd", "a custom function hangs tensors on its context", "exact", threads="bitsandbytes#2034, pytorch#5569")
def test_tensors_on_the_context(how: How) -> None:
    """They live on, and the prediction knows: it is of what the step was seen to hold."""
    _, model, _ = same_as_plain(custom(Hangs), sample(), how, options=NOTHING)
    assert replays(model)
    plan = budgetopt.plan_of(model)
    assert plan is not None
    x = sample()
    model.zero_grad()
    run = run_once(model, Step(x), Resident(model, x), 0)
    assert abs(run.peak - plan.predicted.peak_bytes) <= 0.01 * run.peak


def forward_alone(model: nn.Module) -> None:
    model(sample())


def loss_that_raises(model: nn.Module) -> None:
    with suppress(ValueError):
        model(sample()).square().mean()
        raise ValueError("planted")


def interrupted_backward(model: nn.Module) -> None:
    def interrupt(grad: Tensor) -> None:
        raise KeyboardInterrupt

    out = model[0](sample())  # type: ignore[index]
    out.register_hook(interrupt)
    with suppress(KeyboardInterrupt):
        model[2](model[1](out)).square().mean().backward()  # type: ignore[index]


@pytest.mark.parametrize("use", [forward_alone, loss_that_raises, interrupted_backward])
@case("Autograd", "forwards without a backward leak", "exact", threads="pytorch#154642, #84413")
def test_abandoned_forwards(use: Callable[[nn.Module], None]) -> None:
    plain, model = blocks(), blocks()
    planned(model, sample(), "dropped", **NOTHING)
    gc.collect()
    gc.disable()
    try:
        counts = []
        for _ in range(3):
            for _ in range(25):
                use(model)
                model.zero_grad()
            counts.append(sum(issubclass(type(one), Tensor) for one in gc.get_objects()))
        assert counts[1] == counts[2]
    finally:
        gc.enable()
    assert_same(run_steps(plain, [sample()]), run_steps(model, [sample()]))
