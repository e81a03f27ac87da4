"""Autocast, default types and other contexts: what was on in the forward holds when values are made again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import budgetopt
from tests.oracle import assert_same, run_steps

from .cases import case
from .sides import How, budget, exactly, planned, replays, same_as_plain

Context = Callable[[], AbstractContextManager[Any]]


def bf16() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


def step_in(context: Context) -> Callable[[Any, Any], Tensor]:
    """A step whose forward alone runs in the context."""

    def step(model: Any, sample: Tensor) -> Tensor:
        with context():
            out = model(sample)
        found: Tensor = out.float().square().mean()
        return found

    return step


# -- autocast ------------------------------------------------------------------------------------


class Islands(nn.Module):
    """Linear in what is on around it, statistics in float32, attention weights in float16's rival."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.types: list[tuple[torch.dtype, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.autocast("cpu", enabled=False):
            inner = F.gelu(h.float()) @ self.b.weight.t() + self.b.bias
        with torch.autocast("cpu", torch.float16):
            gate = self.b(h).sigmoid()
        self.types.append((h.dtype, inner.dtype, gate.dtype))
        out: Tensor = x + self.norm(inner * gate.float())
        return out


@exactly
@case(
    "Autocast and dtypes",
    "autocast has ended, or is another, when values are made again",
    "exact",
    threads="pytorch#71124, fairscale#1199, TransformerEngine#787",
)
def test_autocast_islands(how: How) -> None:
    step = step_in(bf16)
    model: Any = nn.Sequential(*(Islands() for _ in range(2)))
    plain, model, _ = same_as_plain(model, torch.randn(48, 16), how, options={"step": step}, step=step)
    assert replays(model)
    for one in (plain, model):
        types = [block.types for block in one.modules() if isinstance(block, Islands)]
        assert types == [[(torch.bfloat16, torch.float32, torch.float16)] * 3] * 2


@pytest.mark.parametrize("how", ["dropped", "solved"])
@case("Autocast and dtypes", "autocast is on in the backward alone", "exact")
def test_autocast_around_the_backward(how: How) -> None:
    def backward(model: Any, sample: Tensor) -> Tensor:
        loss: Any = model(sample).square().mean()
        with bf16():
            loss.backward(retain_graph=True)
        half: Tensor = loss * 0.5
        return half

    model: Any = nn.Sequential(*(Islands() for _ in range(2)))
    _, model, _ = same_as_plain(model, torch.randn(48, 16), how, step=backward)
    assert replays(model)


class Shared(nn.Module):
    """One layer is used by the block and outside of it, which finds autocast's casts of its weight or not."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.shared = nn.Linear(width, width)
        self.blocks = nn.Sequential(*(nn.Sequential(self.shared, nn.GELU(), nn.Linear(width, width)) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(self.shared(x)) + self.shared(x.sin())
        return out


def warmed(model: Any, sample: Tensor) -> Tensor:
    """A forward without gradients in the same autocast block comes first."""
    with bf16():
        with torch.no_grad():
            model(sample[:3])
        out: Tensor = model(sample)
    return out.float().square().mean()


@exactly
@pytest.mark.parametrize("step", [step_in(bf16), warmed], ids=["cold", "warm"])
@case("Autocast and dtypes", "autocast's cache of cast weights is cold or warm", "exact", threads="pytorch#141896")
def test_the_cache_of_cast_weights(step: Any, how: How) -> None:
    _, model, _ = same_as_plain(Shared(), torch.randn(48, 16), how, options={"step": step}, step=step)
    assert replays(model)


@case("Autocast and dtypes", "the cache is warm in training and was cold when planned", "exact")
def test_a_cache_that_was_cold_when_planned() -> None:
    cold = step_in(bf16)
    _, model, _ = same_as_plain(Shared(), torch.randn(48, 16), "dropped", options={"step": cold}, step=warmed)
    assert replays(model)


@case(
    "Autocast and dtypes",
    "half storage gains nothing where values are half already",
    "exact",
    threads="actnn#35, pytorch#148222",
)
def test_half_is_offered_only_where_it_saves() -> None:
    model: Any = nn.Sequential(*(Islands() for _ in range(3)))
    sample, step = torch.randn(512, 16), step_in(bf16)
    profile = budgetopt.profile(model, sample, step=step)
    halves = {(profile.storages[v.storage], v.half_bytes) for v in profile.values if v.region >= 0}
    rows = 512
    assert (rows * 32 * 2, 0) in halves  # a bf16 result of the first Linear
    assert (rows * 32 * 4, rows * 32 * 2 + 4) in halves  # its float32 copy, and the scale
    assert all(half == 0 or half < whole for whole, half in halves if whole > 64)
    planned(model, sample, "halved", step=step)
    plan = budgetopt.plan_of(model)
    assert plan is not None
    measured = budgetopt.measure(model, sample, step=step).peak_bytes
    assert profile.peak_bytes * 0.9 > plan.predicted.peak_bytes
    assert abs(measured - plan.predicted.peak_bytes) < 0.02 * plan.predicted.peak_bytes


@case("Autocast and dtypes", "a model in bfloat16 is offered half storage", "exact")
def test_a_model_in_bfloat16() -> None:
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))).bfloat16()
    _, model, _ = same_as_plain(model, torch.randn(48, 16).bfloat16(), "halved")
    plan = budgetopt.plan_of(model)
    assert plan is not None and not plan.drops


# -- other contexts ------------------------------------------------------------------------------


@contextmanager
def float64_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


CONTEXTS: dict[str, Context] = {
    "attention by hand": lambda: sdpa_kernel(SDPBackend.MATH),
    "float64 by default": float64_by_default,
    "deterministic": deterministic,
    "without oneDNN": lambda: torch.backends.mkldnn.flags(enabled=False),
}


class Mixed(nn.Module):
    """Attention, a convolution, and numbers of the default type."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        scale = torch.ones(16) * 0.1 + torch.arange(16) / 7
        out: Tensor = x + self.conv(mixed).tanh() * scale.float().sin()
        return out


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")
@pytest.mark.parametrize(
    ("context", "how"), [*((context, "dropped") for context in CONTEXTS), ("without oneDNN", "solved")]
)
@case(
    "Autocast and dtypes",
    "a context around the forward has ended when values are made again",
    "exact",
    threads="TransformerEngine#3394, Megatron-LM#7538",
)
def test_contexts_around_the_forward(context: str, how: How) -> None:
    step = step_in(CONTEXTS[context])
    model: Any = nn.Sequential(*(Mixed() for _ in range(2)))
    _, model, _ = same_as_plain(model, torch.randn(16, 8, 16), how, options={"step": step}, step=step)
    assert replays(model)


class Inside(Mixed):
    """The context is around a part of the block."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context

    def forward(self, x: Tensor) -> Tensor:
        with self.context():
            inner = super().forward(x)
        out: Tensor = inner + self.conv(x.sin()).tanh()
        return out


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")
@pytest.mark.parametrize("context", ["float64 by default", "without oneDNN"])
@case("Autocast and dtypes", "a context around a part of a layer has ended when values are made again", "fallback")
def test_contexts_inside(context: str) -> None:
    model: Any = nn.Sequential(*(Inside(CONTEXTS[context]) for _ in range(2)))
    sample = torch.randn(16, 8, 16)
    plain = copy.deepcopy(model)
    budgetopt.fit(model, sample, budget(budgetopt.profile(model, sample), 0.8), allow=("keep", "recompute"))
    assert_same(run_steps(plain, [sample]), run_steps(model, [sample]))
    plan = budgetopt.plan_of(model)
    assert replays(model) and plan is not None and plan.measured is not None
    assert bool(plan.measured.values_kept_after_proof) == (context == "without oneDNN")


class Pairing(nn.Module):
    """A bilinear layer between others."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(2))
        self.pair = nn.Bilinear(16, 16, 16)

    def forward(self, x: Tensor) -> Tensor:
        left, right = (one(x).float().tanh() for one in self.before)
        out: Tensor = self.pair(left, right).sin()
        return out


@case("Autocast and dtypes", "a kernel rounds inside by autocast, which no dispatch mode sees", "fallback")
def test_bilinear_under_autocast() -> None:
    """The modules beside it are planned, it is not."""
    model, step = nn.Sequential(Pairing(), Pairing()), step_in(bf16)
    same_as_plain(model, torch.randn(16, 16), "dropped", options={"step": step}, step=step)
    plan = budgetopt.plan_of(model)
    assert plan is not None and all("before" in region.path for region in plan.regions)
    assert replays(model)
