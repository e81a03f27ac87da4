"""Randomness: what is drawn again must be what was drawn, and nothing that the user sees may be drawn by us."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import budgetopt
from tests.untouched import everything

from .cases import case
from .sides import How, budget, exactly, planned, replays, same_as_plain

ROWS, WIDTH = 48, 16


class Block(nn.Module):
    """Linear, dropout, linear, as a residual."""

    def __init__(self, share: float = 0.5) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(share)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.b(self.drop(self.a(x).relu()))
        return out


def blocks(kind: Any = Block, depth: int = 2) -> nn.Sequential:
    return nn.Sequential(*(kind() for _ in range(depth)))


@exactly
@case("Randomness", "another dropout mask is drawn", "exact", threads="OLMo-core#828, guided-diffusion#167")
def test_dropout_draws_the_same_mask(how: How) -> None:
    _, model, _ = same_as_plain(blocks(), torch.randn(ROWS, WIDTH), how)
    assert replays(model)


class Noisy(Block):
    """Draws in every way at hand: of the global stream, of a generator of its own, of distributions."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x + torch.randn_like(x) * 0.1)
        h = (h * torch.rand(h.shape, generator=self.own)).tanh() + F.gumbel_softmax(h, dim=-1)
        kept = torch.multinomial(h.detach().softmax(-1), 4)
        return F.alpha_dropout(h.sin() * torch.bernoulli(h.detach().sigmoid()), 0.2) * h.gather(1, kept)[:, :1]


@exactly
@case("Randomness", "noise of a generator of one's own, and of distributions, is drawn again", "exact")
def test_every_way_to_draw(how: How) -> None:
    _, model, _ = same_as_plain(blocks(Noisy, 1), torch.randn(ROWS, WIDTH), how)
    assert replays(model)


class HostNoise(Block):
    """Adds noise that numpy and Python draw."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.from_numpy(np.random.standard_normal(x.shape).astype(np.float32))
        return super().forward(x * random.uniform(0.5, 1.5) + noise).sin()


@exactly
@case("Randomness", "noise of numpy and of Python's random is not restored", "exact", threads="pytorch#14253")
def test_noise_of_the_host(how: How) -> None:
    _, model, _ = same_as_plain(blocks(HostNoise), torch.randn(ROWS, WIDTH), how)
    assert replays(model)


class Skipping(Block):
    """Layer drop: Python's random decides whether the block runs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sin() if random.random() < 0.5 else x.cos() * 1.5


@exactly
@pytest.mark.filterwarnings("ignore:budgetopt. .*other operators than planned")
@case("Randomness", "a coin of Python's decides which layers run", "exact")
def test_layers_dropped_by_lot(how: How) -> None:
    built = nn.Sequential(nn.Linear(WIDTH, WIDTH), blocks(Skipping, 3))
    _, model, _ = same_as_plain(built, torch.randn(ROWS, WIDTH), how, steps=6)
    assert replays(model)


# -- other devices -------------------------------------------------------------------------------


@case("Randomness", "the random state of another kind of device can't be restored", "refused", threads="pytorch#127676")
def test_a_device_whose_stream_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sample = blocks(), torch.randn(ROWS, WIDTH)
    monkeypatch.setattr(nn.Parameter, "device", property(lambda self: torch.device("mps")))
    with pytest.raises(budgetopt.ProfileError, match="'mps' is not supported yet"):
        budgetopt.fit(model, sample, "1GB")


class Elsewhere(Block):
    """Draws on a device that is not the model's, of whose stream nothing is known."""

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand(2, WIDTH, device="meta")
        return super().forward(x) * drawn.size(0)


@exactly
@case("Randomness", "one operator draws on a second device", "exact", threads="pytorch#14518")
def test_a_draw_on_another_device(how: How) -> None:
    _, model, _ = same_as_plain(blocks(Elsewhere), torch.randn(ROWS, WIDTH), how)
    assert replays(model)


# -- what fit itself leaves ----------------------------------------------------------------------


class Everything(nn.Module):
    """Batch norm, power iteration, dropout, a hook, frozen weights, numpy: all that a step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = blocks()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 4))
        self.stack[0].register_forward_hook(lambda module, args, out: out * 1.5)
        self.stack[1].eval().requires_grad_(False)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        np.random.rand()
        random.random()
        if self.fails:
            raise ZeroDivisionError("not on this sample")
        out: Tensor = self.head(self.norm(self.stack(x)))
        return out


@pytest.fixture
def flags() -> Iterator[None]:
    """Global switches, set as nobody has them."""
    before = torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()
    torch.backends.cudnn.benchmark = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.backends.cudnn.benchmark = before[0]
    torch.use_deterministic_algorithms(False)


def global_flags() -> tuple[Any, ...]:
    return (
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.mkldnn.enabled,
        torch.is_autocast_enabled("cpu"),
        torch.is_anomaly_enabled(),
        torch.get_num_threads(),
    )


def seen(model: nn.Module) -> dict[str, Any]:
    """All of it, but the forward that a plan installs."""
    found = everything(model)
    for attributes in found["attributes"].values():
        attributes.pop("forward", None)
        attributes.pop("_replicate_for_data_parallel", None)
    return {**found, "flags": global_flags(), "training": [m.training for m in model.modules()]}


@pytest.mark.usefixtures("flags")
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("end", ["fitted", "no budget does", "the sample raises"])
@case("Randomness", "planning itself draws numbers or changes the model", "exact", threads="thop#145, ColossalAI#1619")
def test_fit_leaves_everything_as_it_was(end: str, gradients: bool) -> None:
    model, sample = Everything(), torch.randn(ROWS, WIDTH)
    if gradients:
        for parameter in model.head.parameters():
            parameter.grad = torch.ones_like(parameter)
    wanted = budget(budgetopt.profile(model, sample)) if end == "fitted" else 2048
    model.fails = end == "the sample raises"
    before = seen(model)
    if end == "fitted":
        budgetopt.fit(model, sample, wanted, allow=("keep", "recompute"))
        plan = budgetopt.plan_of(model)
        assert plan is not None and plan.drops
    else:
        error = ZeroDivisionError if model.fails else budgetopt.BudgetOptError
        with pytest.raises(error):
            budgetopt.fit(model, sample, wanted, allow=("keep", "recompute"))
    after = seen(model)
    assert not [part for part in before if before[part] != after[part]]


@pytest.mark.usefixtures("flags")
@case("Randomness", "a forced plan leaves draws, gradients or flags behind", "exact")
def test_profile_and_apply_leave_everything_as_it_was() -> None:
    model, sample = Everything(), torch.randn(ROWS, WIDTH)
    before = seen(model)
    planned(model, sample, "dropped")
    assert seen(model) == before
    budgetopt.remove(model)
    assert everything(model)["attributes"] == before["attributes"]
