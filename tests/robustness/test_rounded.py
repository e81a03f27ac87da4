"""Values stored in fp16: no overflow, the error that the user allows, and nothing made again from rounded values."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import budgetopt
from budgetopt._apply import installed
from budgetopt._problem import UNSEEN, to_problem
from budgetopt.solvers import Choice
from tests.forced import Around
from tests.oracle import assert_same, run_steps
from tests.plans import ALL, forced_plan

from .cases import case
from .near import gradient_error, near_plain
from .sides import budget, planned, replays

# -- overflow ------------------------------------------------------------------------------------


class Stream(nn.Module):
    """A residual stream whose values are far above what fp16 can hold."""

    def __init__(self, top: float, width: int = 16) -> None:
        super().__init__()
        self.top = top
        self.first = nn.Linear(width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.top
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x)).tanh() * self.top
        return (x / self.top).sin()


@pytest.mark.parametrize(
    ("top", "dtype"),
    [(1e5, torch.float32), (1e-30, torch.float32), (1e15, torch.float32), (1e60, torch.float64)],
)
@case("Odd tensors", "activations above 65504 overflow in half storage", "exact", threads="transformers#5651, t5#539")
def test_no_overflow(top: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Stream(top).to(dtype)
    assert near_plain(model, torch.randn(48, 16, dtype=dtype), 2e-3) > 0


@case("Odd tensors", "large and small values share a storage in half", "exact")
def test_large_values_do_not_ruin_their_neighbours() -> None:
    """Each column's gradient is as exact as fp16 allows for the largest of them."""
    scales = torch.tensor([1e5, 1.0, 1e5, 1.0, 10.0, 10.0])
    model = Around(lambda h: ((h * scales).square() / scales**2).sum(0))
    assert near_plain(model, torch.randn(40, 6), 1e-3, steps=1) > 0


@case("Odd tensors", "infinities and NaN that are there become others in half storage", "exact")
def test_values_that_are_not_finite() -> None:
    def body(h: Tensor) -> Tensor:
        masked = h.masked_fill(h > 1.0, float("-inf"))
        return masked.exp() * masked.sigmoid() + torch.where(h > 0, h.log(), h).cos().nan_to_num(0.0)

    plain, model, sample = Around(body), Around(body), torch.rand(40, 6) - 0.5
    planned(model, sample, "halved")
    a, b = (run_steps(one, [sample], steps=1).gradients[0]["weight"] for one in (plain, model))
    assert a is not None and b is not None and torch.equal(a.isnan(), b.isnan())
    assert torch.allclose(a, b, rtol=1e-2, atol=1e-3, equal_nan=True)


@case("Odd tensors", "half storage starves the gradient scaler", "exact", threads="transformers#11461")
def test_the_gradient_scaler_skips_no_step() -> None:
    torch.manual_seed(0)
    model, sample = Stream(1e5), torch.randn(48, 16)
    plain = copy.deepcopy(model)
    planned(model, sample, "halved")
    scales = []
    for one in (plain, model):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
        optimizer = torch.optim.SGD(one.parameters(), lr=0.01)
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(one(sample).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [2.0**18, 2.0**18]


class Overflowing(nn.Module):
    """Plain gradients are finite; a value that is off in the third digit makes them infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Any) -> Any:
        edge: Any = Edge.apply
        for layer in self.layers:
            x = edge(layer(x))
        return x


class Edge(torch.autograd.Function):
    """The gradient is infinite unless the saved value is bit for bit what it was."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.total = x.double().sum()
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        scale = 1.0 if x.double().sum() == ctx.total else float("inf")
        found: Tensor = gradients[0] * scale * x.cos()
        return found


@case("Odd tensors", "rounding makes gradients NaN, and no bound is below NaN", "fallback")
def test_new_nan_is_no_small_error() -> None:
    model, sample = Overflowing(), torch.randn(64, 16)
    plain = copy.deepcopy(model)
    profile = budgetopt.profile(model, sample)
    halved = forced_plan(profile, lambda v: Choice.FP16).predicted.peak_bytes + UNSEEN
    with pytest.raises(budgetopt.InfeasibleBudgetError):
        budgetopt.fit(model, sample, halved, allow=("keep", "fp16"))
    budgetopt.fit(model, sample, budget(profile))
    assert_same(run_steps(plain, [sample]), run_steps(model, [sample]))


# -- tolerance -----------------------------------------------------------------------------------


class Delicate(nn.Module):
    """Softmax and layer norm, where rounding weighs most."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.layer(x) * 4).softmax(-1)
        out: Tensor = x + self.norm(scores.log() * scores)
        return out


@pytest.mark.parametrize(("tolerance", "allow"), [(1e-2, ("keep", "fp16")), (1e-6, ALL)])
@case("Odd tensors", "the error of rounding is not known, or too large", "exact", threads="TransformerEngine#1665")
def test_the_tolerance_is_respected(tolerance: float, allow: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model, sample = nn.Sequential(*(Delicate() for _ in range(3))), torch.randn(64, 16)
    plain = copy.deepcopy(model)
    profile = budgetopt.profile(model, sample)
    wanted = profile.peak_bytes - 4096
    budgetopt.fit(model, sample, wanted, allow=allow, max_grad_error=tolerance)
    plan = budgetopt.plan_of(model)
    assert plan is not None and plan.measured is not None and plan.drops
    error = gradient_error(run_steps(plain, [sample], steps=1), run_steps(model, [sample], steps=1))
    stored = any(d.choice == "fp16" for region in plan.regions for d in region.decisions)
    if stored:
        assert plan.measured.grad_error is not None and plan.measured.grad_error <= tolerance
        assert error == pytest.approx(plan.measured.grad_error, rel=0.05)
    else:
        assert error == 0 and plan.measured.grad_error is None
    assert stored == (tolerance == 1e-2)


class Mixed(nn.Module):
    """Its gradients are sparse, dense and complex."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16, sparse=True)
        self.layers = nn.ModuleList(Delicate() for _ in range(3))
        self.weight = nn.Parameter(torch.randn(9, dtype=torch.cfloat))

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens).sin()
        for layer in self.layers:
            x = layer(x)
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight).sin()


@pytest.mark.filterwarnings("ignore:.*(Sparse|sparse).*:UserWarning")
@case("Odd tensors", "the error of sparse and of complex gradients can't be told", "exact")
def test_the_error_of_every_kind_of_gradient() -> None:
    torch.manual_seed(0)
    model, tokens = Mixed(), torch.randint(50, (64,))
    plain = copy.deepcopy(model)
    profile = budgetopt.profile(model, tokens, optimizer="sgd")
    budgetopt.fit(model, tokens, profile.peak_bytes - 4096, allow=("keep", "fp16"), optimizer="sgd")
    plan = budgetopt.plan_of(model)
    assert plan is not None and plan.measured is not None and plan.measured.grad_error
    for one in (plain, model):
        out: Any = one(tokens)
        out.mean().backward()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    exact, rounded = (torch.cat(found) for found in zip(*((_flat(p), _flat(q)) for p, q in pairs), strict=True))
    error = float((exact - rounded).norm() / exact.norm())
    assert error == pytest.approx(plan.measured.grad_error, rel=0.01)


def _flat(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    dense = parameter.grad.to_dense()
    return (torch.view_as_real(dense) if dense.is_complex() else dense).flatten().double()


# -- what replays read ---------------------------------------------------------------------------


class Decisions(nn.Module):
    """ReLU, dropout and top-k: a rounded input may decide otherwise."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.a(x).relu())
        chosen = h.topk(4, dim=-1).indices
        out: Tensor = x + self.b(h).tanh() * torch.zeros_like(x).scatter(-1, chosen, 1.0)
        return out


@pytest.mark.parametrize("seed", range(4))
@case("Odd tensors", "values are made again from rounded inputs", "exact", threads="pytorch#174327")
def test_replays_read_exact_values(seed: int) -> None:
    """Whatever is stored in fp16 for autograd, what is made again is so bit for bit."""
    model, sample = nn.Sequential(*(Decisions() for _ in range(3))), torch.randn(48, 16)
    profile = budgetopt.profile(model, sample)
    crossing = [value.crossing for value in to_problem(profile, 0).values]
    lot = random.Random(seed)
    plan = forced_plan(profile, lambda v: Choice.KEEP if crossing[v] else lot.choice((Choice.FP16, Choice.RECOMPUTE)))
    assert not plan.rounds_between
    budgetopt.apply(model, plan)
    found = installed(model)
    assert found is not None
    for region in found.regions.values():
        region.verify = True
    run_steps(model, [sample], steps=1)
    proven = sum(region.counters.proven for region in found.regions.values())
    assert proven and not any(call.failures for region in found.regions.values() for _, call in region.watched)


@case("Odd tensors", "a plan does not say that layers hand on rounded values", "exact", threads="AReno#538")
def test_rounding_between_layers_is_said() -> None:
    """Without a word of it in the plan, a boundary is exact; with it, the error was measured and allowed."""
    model, sample = nn.Sequential(*(Decisions() for _ in range(4))), torch.randn(64, 16)
    profile = budgetopt.profile(model, sample)
    plan = forced_plan(profile, lambda v: Choice.FP16)
    handed = [d for region in plan.regions for d in region.decisions if d.between]
    assert plan.rounds_between == bool(handed)
    assert not plan.exact().rounds_between
    assert all(d.choice != "fp16" for region in plan.exact().regions for d in region.decisions)
    plain = copy.deepcopy(model)
    budgetopt.apply(model, plan.exact())
    a, b = run_steps(plain, [sample], steps=1), run_steps(model, [sample], steps=1)
    assert gradient_error(a, b) == 0 and replays(model)


def test_plans_in_fp16_that_nobody_measured_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model, sample = Stream(1.0), torch.randn(48, 16)
    profile = budgetopt.profile(model, sample)
    plan = forced_plan(profile, lambda v: Choice.FP16)
    with pytest.warns(budgetopt.BudgetOptWarning, match=r"may be over the .* predicted: budgetopt.fit measures"):
        budgetopt.apply(model, plan)
    budgetopt.remove(model)
    allow = ("keep", "fp16")
    tight = plan.predicted.peak_bytes + UNSEEN
    budgetopt.fit(model, sample, tight, allow=allow, verify=False)
    assert "neither the gradient error nor the peak is measured" in capsys.readouterr().err
    exact = forced_plan(profile, lambda v: Choice.RECOMPUTE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        budgetopt.apply(model, exact)
