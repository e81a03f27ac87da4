"""The ways in which people call their model: planned by `fit` and run as they would, next to the plain one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import budgetopt
from budgetopt import Plan
from tests.models import Residual, conv_stack, gpt2_small, mlp_stack

EXACT = ("keep", "recompute")


def fitted(model: Any, sample: Any, share: float = 0.6, **how: Any) -> tuple[Any, Plan]:
    """A copy of `model` under the share of its activation bytes, which must drop something."""
    planned = copy.deepcopy(model)
    running = {name: value for name, value in how.items() if name in ("step", "loss")}
    profile = budgetopt.profile(copy.deepcopy(model), sample, optimizer=None, **running)
    resident = profile.fixed.total
    budget = resident + round(share * (profile.peak_bytes - resident))
    budgetopt.fit(planned, sample, budget, allow=EXACT, optimizer=None, solver="greedy", **how)
    plan = budgetopt.plan_of(planned)
    assert plan is not None and plan.drops
    assert budgetopt.measure(planned, sample, **running).peak_bytes <= budget
    return planned, plan


def assert_equal(plain: Any, planned: Any, run: Callable[[Any], Any]) -> None:
    """`run` gives both models the same result, gradients and buffers, bit for bit, and the same random state."""
    seen = []
    for model in (plain, planned):
        torch.manual_seed(3)
        result = run(model)
        gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        seen.append(([result, *gradients, *model.buffers()], torch.get_rng_state()))
    assert len(seen[0][0]) == len(seen[1][0]) and torch.equal(seen[0][1], seen[1][1])
    for one, other in zip(seen[0][0], seen[1][0], strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def backward(model: Any, loss: Tensor) -> Tensor:
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def autocast_step(model: Any, sample: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out = model(**sample)
    loss: Tensor = out.loss
    return loss


def test_autocast_around_the_forward() -> None:
    model, sample = gpt2_small()
    planned, _ = fitted(model, sample, step=autocast_step)
    assert_equal(model, planned, lambda m: backward(m, autocast_step(m, sample)))


class Island(nn.Module):
    """A part in bfloat16 inside a float32 model."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Residual(32, 0.1) for _ in range(4)))
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.blocks(x)
        out: Tensor = self.head(x.float())
        return out


def test_autocast_inside_the_model() -> None:
    torch.manual_seed(0)
    model, sample = Island().train(), torch.randn(128, 32)
    planned, _ = fitted(model, sample)
    assert_equal(model, planned, lambda m: backward(m, m(sample).square().mean()))


def test_gradients_alive_during_forward() -> None:
    """The second step of an accumulation: gradients are there, and counted."""
    model, sample = gpt2_small()
    model(**sample).loss.backward()
    planned = copy.deepcopy(model)
    for p, q in zip(planned.parameters(), model.parameters(), strict=True):
        p.grad = None if q.grad is None else q.grad.clone()
    before = [p.grad.clone() for p in planned.parameters() if p.grad is not None]
    profile = budgetopt.profile(planned, sample, optimizer=None)
    assert profile.fixed.gradient == sum(g.numel() * 4 for g in before) > 0
    budget = profile.fixed.total + (profile.peak_bytes - profile.fixed.total) * 7 // 10
    budgetopt.fit(planned, sample, budget, allow=EXACT, optimizer=None, solver="greedy")
    after = [p.grad for p in planned.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert budgetopt.measure(planned, sample).peak_bytes <= budget
    assert_equal(model, planned, lambda m: backward(m, m(**sample).loss))


def test_accumulation_over_several_steps() -> None:
    model, sample = gpt2_small()
    planned, _ = fitted(model, sample)
    assert_equal(model, planned, lambda m: torch.stack([backward(m, m(**sample).loss / 3) for _ in range(3)]))


def test_parameters_unfrozen_after_fit() -> None:
    model: Any
    model, sample = gpt2_small()
    for p in model.transformer.h[:2].parameters():
        p.requires_grad_(False)
    planned, _ = fitted(model, sample)
    for each in (model, planned):
        each.requires_grad_(True)
    assert_equal(model, planned, lambda m: backward(m, m(**sample).loss))


def test_parameters_frozen_after_fit() -> None:
    model: Any
    model, sample = gpt2_small()
    planned, _ = fitted(model, sample)
    for each in (model, planned):
        each.transformer.h[:2].requires_grad_(False)
        each.transformer.wte.requires_grad_(False)
        each.transformer.wpe.requires_grad_(False)
    assert_equal(model, planned, lambda m: backward(m, m(**sample).loss))


def test_channels_last() -> None:
    model: Any
    model, sample = conv_stack(channels=16, px=16)
    model = model.to(memory_format=torch.channels_last)
    sample = sample.to(memory_format=torch.channels_last)
    planned, _ = fitted(model, sample, 0.8)
    assert_equal(model, planned, lambda m: backward(m, m(sample).square().mean()))
    out = planned(sample)
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_several_forwards_before_a_backward() -> None:
    model, sample = gpt2_small()
    planned, _ = fitted(model, sample)
    assert_equal(model, planned, lambda m: backward(m, m(**sample).loss + m(**sample).loss * 2))


def test_retain_graph() -> None:
    model, sample = gpt2_small()
    planned, _ = fitted(model, sample)

    def run(model: Any) -> Tensor:
        loss: Tensor = model(**sample).loss
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        return backward(model, loss)

    assert_equal(model, planned, run)


def test_double_backward() -> None:
    """A gradient penalty: the backward pass is differentiated itself."""
    model, sample = mlp_stack()
    planned, _ = fitted(model, sample)

    def run(model: Any) -> Tensor:
        x = sample.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        return backward(model, slope.square().sum())

    assert_equal(model, planned, run)


def test_excluded_layers_are_left_alone() -> None:
    model, sample = gpt2_small()
    planned, plan = fitted(model, sample, 0.8, exclude=("transformer.h.1",))
    dropped = {d.layer for r in plan.regions for d in r.decisions if d.choice != "keep"}
    assert dropped and not any(layer.startswith("transformer.h.1.") for layer in dropped)
    assert_equal(model, planned, lambda m: backward(m, m(**sample).loss))


class Batch:
    """A sample of the user's own type, passed as it is."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class TakesBatches(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch: Any, scale: float = 1.0) -> Any:
        x = batch.x if isinstance(batch, Batch) else batch
        return {"loss": self.inner(x).square().mean() * scale}


@pytest.mark.parametrize("shape", ["tensor", "tuple", "list", "mapping", "object"])
def test_samples_of_every_shape(shape: str) -> None:
    inner, x = mlp_stack()
    model = TakesBatches(inner)
    sample: Any = {
        "tensor": x,
        "tuple": (x, 0.5),
        "list": [x, 0.5],
        "mapping": {"batch": x, "scale": 0.5},
        "object": Batch(x),
    }[shape]
    planned, _ = fitted(model, sample)
    assert_equal(model, planned, lambda m: backward(m, m(sample if shape == "object" else x)["loss"]))
