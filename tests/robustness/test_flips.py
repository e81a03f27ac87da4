"""Forwards that would not run the same way twice: replays run operators, never the Python that chose them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import budgetopt
from budgetopt._fixed import Resident
from budgetopt._step import Step
from budgetopt._verify import prove
from tests.oracle import assert_same, run_steps

from .cases import case
from .sides import EXACT, How, budget, exactly, planned, replays, same_as_plain


class Experts(nn.Module):
    """One expert a token, chosen by a router that a caller may disturb; shapes depend on what is chosen."""

    def __init__(self, disturb: Callable[[Tensor], Tensor], width: int = 16) -> None:
        super().__init__()
        self.router = nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width)) for _ in "12")
        self.disturb = disturb

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = torch.softmax(self.disturb(self.router(x)), -1).topk(1, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen[:, 0] == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * share[rows])
        return x + out


def jitter(scores: Tensor) -> Tensor:
    """What another order of summing does on a GPU: last bits that differ from call to call."""
    return scores + torch.randn_like(scores) * 1e-7


def tied(*shape: int) -> Tensor:
    """Rows of which many are equal, so that routers are undecided."""
    return torch.randn(2, shape[1]).repeat(shape[0] // 2, 1)


class Stack(nn.Module):
    """Equal scores at the start: the router's weights are zero."""

    def __init__(self, disturb: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(disturb, 8) for _ in range(2))
        for layer in self.layers:
            router: Any = layer.router
            nn.init.zeros_(router.weight)
            nn.init.zeros_(router.bias)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.filterwarnings("ignore:.*ran other operators than planned")
@exactly
@case("Flips", "a router with ties decides otherwise when it is run again", "exact", threads="torchtitan#1117")
def test_routers_with_ties(how: How) -> None:
    torch.manual_seed(0)
    _, model, _ = same_as_plain(Stack(jitter), tied(24, 8), how, options={"optimizer": None})
    assert replays(model)


CALLS = [0]


@torch.library.custom_op("budgetopt_tests::shaky", mutates_args=())
def shaky(x: Tensor) -> Tensor:
    """A kernel whose last bits differ from run to run."""
    CALLS[0] += 1
    return x * (1 + 1e-6 * CALLS[0])


@shaky.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


shaky.register_autograd(lambda ctx, grad: grad)


class Shaken(nn.Module):
    """Makes much that can be made again, and something that can't."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x).sin().exp().tanh().cos()
        return x + shaky(y).cos()


@case("Flips", "a kernel gives other bits when it is run again", "fallback", threads="torchtitan#1117")
def test_what_a_replay_does_not_make_right_is_kept() -> None:
    """The trial step compares every replayed value; what differs is kept."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Shaken() for _ in range(3))), torch.randn(64, 32)
    plain = copy.deepcopy(model)
    planned(model, x, "dropped", optimizer=None)
    proof = prove(model, Step(x), Resident(model, x))
    assert [path for path, *_ in proof.differing] == ["0", "1", "2"] and proof.proven > 9
    profile = budgetopt.profile(model, x, optimizer=None)
    budgetopt.fit(model, x, budget(profile, 0.7), allow=EXACT, optimizer=None)
    CALLS[0] = 0
    expected = run_steps(plain, [x])
    CALLS[0] = 0
    assert_same(expected, run_steps(model, [x]))
    assert replays(model) and CALLS[0] == 9


class Counting(nn.Module):
    """Takes another branch on every call whose number `often` divides."""

    def __init__(self, often: int) -> None:
        super().__init__()
        self.calls, self.often = 0, often
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        y = self.inner(x).sin()
        return x + (y.exp().tanh() if self.calls % self.often else (y.sigmoid() * y.cos()).exp().sin())


class Deciding(nn.Module):
    """Takes a branch that its data choose."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x).sin()
        return x + (y.exp().tanh() if bool(y.sum() > 0) else (y.sigmoid() * y.cos()).exp().sin())


@exactly
@case("Flips", "the branch depends on how often the module was called", "exact", threads="native-sparse-attention#24")
def test_branches_by_calls(how: How) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Counting(100) for _ in range(3))), torch.randn(32, 16)
    plain = copy.deepcopy(model)
    planned(model, x, how, optimizer=None)
    for module in (*plain.modules(), *model.modules()):
        if isinstance(module, Counting):
            module.calls = 98
    expected = run_steps(plain, [x])
    with pytest.warns(budgetopt.BudgetOptWarning, match=r"ran other operators than planned.*exact.*fit again"):
        found = run_steps(model, [x])
    assert_same(expected, found)
    assert replays(model)
    assert [m.calls for m in model.modules() if isinstance(m, Counting)] == [101, 101, 101]


@case("Flips", "every other step runs other operators", "refused", threads="TinyLlama#152")
def test_branches_that_take_turns() -> None:
    """Two steps on the same sample and random state must run the same operators, or there is nothing to plan."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Counting(2) for _ in range(3))), torch.randn(32, 16)
    plain = copy.deepcopy(model)
    with pytest.raises(budgetopt.ProfileError, match="other operators in two steps on the same sample"):
        budgetopt.fit(model, x, "1GB")
    for module in model.modules():
        if isinstance(module, Counting):
            module.calls = 0
    assert_same(run_steps(plain, [x]), run_steps(model, [x]))


@exactly
@case("Flips", "the branch depends on the data", "exact", threads="SAM3_LoRA#10")
def test_branches_by_data(how: How) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Deciding() for _ in range(3))), torch.randn(32, 16)
    plain = copy.deepcopy(model)
    planned(model, x, how, optimizer=None)
    batches = [x, -x, x.flip(0).abs(), -x.abs()]
    expected = run_steps(plain, batches, steps=4)
    with pytest.warns(budgetopt.BudgetOptWarning, match="ran other operators than planned"):
        found = run_steps(model, batches, steps=4)
    assert_same(expected, found)
    assert replays(model)


def trained() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.3), nn.GELU(), nn.Linear(32, 16))
        for _ in "123"
    ]
    return nn.Sequential(*layers)


def eval_between(model: nn.Module, x: Tensor) -> Tensor:
    model.train()
    loss: Tensor = model(x).square().mean()
    model.eval()
    return loss


def freeze_between(model: nn.Module, x: Tensor) -> Tensor:
    model.requires_grad_(True)
    loss: Tensor = model(x).square().mean()
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_(False)
    return loss


@pytest.mark.parametrize(
    ("step", "how"), [(eval_between, "dropped"), (freeze_between, "dropped"), (eval_between, "solved")]
)
@case("Flips", "flags of training change between forward and backward", "exact", threads="transformers#26334")
def test_flags_that_change_before_backward(step: Callable[[nn.Module, Tensor], Tensor], how: How) -> None:
    _, model, trace = same_as_plain(trained(), torch.randn(16, 16), how, options={"optimizer": None}, step=step)
    assert replays(model)
    assert not all(trace.training.values()) or not all(trace.requires_grad.values())


class Guarded(nn.Module):
    """Falls back to a slow way where the fast one raises, and counts that."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.failures = self.left = 0

    def forward(self, x: Tensor) -> Any:
        try:
            return x + self.inner(x).sin().exp().tanh()
        except Exception:
            self.failures += 1
            return x + self.inner(x).cos()
        finally:
            self.left += 1


@exactly
@case("Flips", "the model's try and except swallows what stops a second run", "exact", threads="pytorch#96866, #160781")
def test_try_and_except_in_the_model(how: How) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Guarded() for _ in range(3))), torch.randn(32, 16)
    plain = copy.deepcopy(model)
    planned(model, x, how, optimizer=None)
    before = [block.left for block in guarded(model)]
    assert_same(run_steps(plain, [x]), run_steps(model, [x]))
    assert replays(model)
    assert [block.failures for block in guarded(model)] == [0, 0, 0]
    assert [block.left for block in guarded(model)] == [count + 3 for count in before]


def guarded(model: nn.Module) -> Iterator[Guarded]:
    return (module for module in model.modules() if isinstance(module, Guarded))
