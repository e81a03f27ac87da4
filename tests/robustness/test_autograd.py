"""The ways in which people use autograd around a planned model."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import budgetopt
from tests.oracle import assert_same, run_steps

from .cases import case
from .sides import How, exactly, planned, replays, same_as_plain

NOTHING: dict[str, Any] = {"optimizer": None}


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(torch.tanh(self.up(self.norm(x))).sin().exp())


def blocks(depth: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(depth)))


def sample(rows: int = 32) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(3))


# -- transforms ----------------------------------------------------------------------------------


def functional_gradient(model: nn.Module, x: Tensor) -> Any:
    parameters = dict(model.named_parameters())
    return torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).square().mean())(parameters)


def per_sample_gradients(model: nn.Module, x: Tensor) -> Any:
    def loss(parameters: dict[str, Tensor], row: Tensor) -> Any:
        return torch.func.functional_call(model, parameters, (row[None],)).square().mean()

    return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(dict(model.named_parameters()), x)


def mapped(model: nn.Module, x: Tensor) -> Any:
    return {"out": torch.func.vmap(model)(x)}


def forward_mode(model: nn.Module, x: Tensor) -> Any:
    with torch.no_grad():
        return {"out": torch.func.jvp(model, (x,), (x.sin(),))[1]}


def hessian(model: nn.Module, x: Tensor) -> Any:
    return {"out": torch.func.hessian(lambda row: model(row).square().sum())(x[:1])}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("transform", [functional_gradient, per_sample_gradients, mapped, forward_mode, hessian])
@case("Autograd", "torch.func transforms refuse saved-tensor hooks", "fallback", threads="pytorch#122729, #146036")
def test_transforms(transform: Callable[[nn.Module, Tensor], dict[str, Tensor]]) -> None:
    """Inside one, the model runs as plain, and says once that no plan is in force."""
    plain, model, x = blocks(), blocks(), sample(4)
    planned(model, x, "dropped", **NOTHING)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        expected, found = transform(plain, x), transform(model, x)
        transform(model, x)
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name])
    ours = [one for one in said if issubclass(one.category, budgetopt.BudgetOptWarning)]
    assert len(ours) == (0 if transform is forward_mode else 1)
    assert all("torch.func" in str(one.message) for one in ours)
    assert_same(run_steps(plain, [x]), run_steps(model, [x]))
    assert replays(model)


# -- modules called several times -----------------------------------------------------------------


class Recurrent(nn.Module):
    """One cell, called four times, whose weights may serve the head as well."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.cell, self.tied = Block(), tied

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.cell(x)
        return x @ self.cell.up.weight[:16] if self.tied else x


def siamese(model: nn.Module, x: Tensor) -> Any:
    left, right = model(x), model(x.flip(0))
    return (left - right).square().mean() + (left * right).mean()


def backward_in_reverse(model: nn.Module, x: Tensor) -> Any:
    losses = [model(x * i).square().mean() for i in (1, 2, 3)]
    for loss in losses[:0:-1]:
        loss.backward()
    return losses[0]


def backward_in_order(model: nn.Module, x: Tensor) -> Any:
    losses = [model(x * i).square().mean() for i in (1, 2, 3)]
    for loss in losses[:-1]:
        loss.backward()
    return losses[-1]


def gradient_penalty(model: nn.Module, x: Tensor) -> Tensor:
    at = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(at).sum(), at, create_graph=True)
    found: Tensor = (slope.norm(dim=1) - 1).square().mean() + model(x).mean()
    return found


def one_call(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x).square().mean()
    return found


STEPS = (one_call, siamese, backward_in_reverse, backward_in_order, gradient_penalty)


@pytest.mark.parametrize(
    ("step", "how"), [*((step, "dropped") for step in STEPS), (siamese, "solved"), (gradient_penalty, "solved")]
)
@case("Autograd", "a module is called several times before backward", "exact", threads="pytorch#81296, DeepSpeed#2103")
def test_several_calls(step: Callable[[nn.Module, Tensor], Tensor], how: How) -> None:
    torch.manual_seed(0)
    _, model, _ = same_as_plain(Recurrent(), sample(8), how, options={**NOTHING, "step": step}, step=step)
    assert replays(model)
    fired: list[Tensor] = []
    model.get_parameter("cell.up.weight").register_hook(fired.append)  # type: ignore[no-untyped-call]
    one_call(model, sample(8)).backward()  # type: ignore[no-untyped-call]
    assert len(fired) == 1


@case("Autograd", "memory of a module that is called often is counted once", "exact", threads="pytorch#193193")
def test_bytes_of_every_call() -> None:
    """Four calls of one block hold what four blocks hold."""
    torch.manual_seed(0)
    often = budgetopt.profile(Recurrent(tied=False), sample(), **NOTHING)
    many = budgetopt.profile(blocks(4), sample(), **NOTHING)
    assert often.peak_bytes - often.fixed.total == many.peak_bytes - many.fixed.total


# -- orders of unpacking -------------------------------------------------------------------------


class Branches(nn.Module):
    """Two ways of which a caller may weigh one with nothing, or leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = Block(), Block(), Block()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.trunk(x)
        return self.left(y), self.right(y * 2)


def left_last(model: nn.Module, x: Tensor) -> Tensor:
    left, right = model(x)
    right.square().mean().backward(retain_graph=True)
    found: Tensor = left.square().mean()
    return found


def left_alone(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x)[0].square().mean()
    return found


def both(model: nn.Module, x: Tensor) -> Tensor:
    left, right = model(x)
    found: Tensor = 1e-3 * left.square().mean() + 1e3 * right.square().mean()
    return found


@pytest.mark.parametrize(
    ("step", "how"), [(left_last, "dropped"), (left_alone, "dropped"), (both, "dropped"), (both, "solved")]
)
@case("Autograd", "saved tensors are unpacked in any order, or never", "exact", threads="pytorch#198014, #187694")
def test_orders_of_unpacking(step: Callable[[nn.Module, Tensor], Tensor], how: How) -> None:
    torch.manual_seed(0)
    _, model, _ = same_as_plain(Branches(), sample(), how, options={**NOTHING, "step": both}, step=step)
    assert replays(model)


class Watching(nn.Module):
    """Notes what its forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.made: list[weakref.ref[Any]] = []

    def forward(self, x: Tensor) -> Any:
        for _ in range(3):
            x = self.inner(x).sin().exp()
            self.made.append(weakref.ref(x.untyped_storage()))
        return x


@exactly
@case("Autograd", "what is never unpacked is held for good", "exact", threads="pytorch#198014")
def test_what_is_never_unpacked_is_freed(how: How) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Watching() for _ in range(3)))
    planned(model, sample(), how, **NOTHING)
    for block in model:
        block.made.clear()  # type: ignore[union-attr, operator]
    gc.disable()
    try:
        out = model(sample())
        torch.autograd.grad(out.sum(), list(model[2].parameters()), retain_graph=True)
        del out
        assert [one() for block in model for one in block.made] == [None] * 9  # type: ignore[union-attr]
    finally:
        gc.enable()
