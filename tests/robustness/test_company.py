"""Other tools around a planned model and inside it: checkpoint, offloading, modes, profilers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from tests.oracle import assert_same, run_steps

from .cases import case
from .sides import How, exactly, planned, replays, same_as_plain

NOTHING: dict[str, Any] = {"optimizer": None}
SELECTIVE: Any = create_selective_checkpoint_contexts  # untyped in torch
MATRIX = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.drop = nn.Linear(width, 2 * width), nn.Dropout(0.2)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(self.drop(torch.tanh(self.up(x)).exp().cos()))


def blocks(depth: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(depth)))


def sample() -> Tensor:
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(3))


class Passing(TorchDispatchMode):
    """Does nothing but count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


# -- ways to call a module ------------------------------------------------------------------------


def in_checkpoint(model: nn.Module, x: Tensor) -> Any:
    return checkpoint(model, x, use_reentrant=False)


def in_reentrant_checkpoint(model: nn.Module, x: Tensor) -> Any:
    return checkpoint(model, x if x.requires_grad else x.detach().requires_grad_(), use_reentrant=True)


def in_selective_checkpoint(model: nn.Module, x: Tensor) -> Any:
    return checkpoint(model, x, use_reentrant=False, context_fn=lambda: SELECTIVE(MATRIX))


def in_save_on_cpu(model: nn.Module, x: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return model(x)


def in_hooks(model: nn.Module, x: Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.clone(), 1), lambda packed: packed[0]):
        return model(x)


def in_a_mode(model: nn.Module, x: Tensor) -> Any:
    with Passing():
        return model(x)


def in_a_device(model: nn.Module, x: Tensor) -> Any:
    with torch.device("cpu"):
        return model(x)


WAYS = (
    in_checkpoint,
    in_reentrant_checkpoint,
    in_selective_checkpoint,
    in_save_on_cpu,
    in_hooks,
    in_a_mode,
    in_a_device,
)


@pytest.mark.parametrize(
    ("way", "how"), [*((way, "dropped") for way in WAYS), (in_checkpoint, "solved"), (in_save_on_cpu, "solved")]
)
@case("Company", "checkpoint, offloading or a mode around a planned model", "exact", threads="pytorch#84907, #191236")
def test_around(way: Callable[[nn.Module, Tensor], Any], how: How) -> None:
    """The plan was made without it."""
    plain, model = blocks(), blocks()
    planned(model, sample(), how, **NOTHING)

    def step(each: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = way(each, x).square().mean()
        return found

    assert_same(run_steps(plain, [sample()], step=step), run_steps(model, [sample()], step=step))
    assert replays(model)


class Uses(nn.Module):
    """Calls its child in a way of its own."""

    def __init__(self, way: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.child, self.way = Block(), way

    def forward(self, x: Tensor) -> Any:
        return x + self.way(self.child, torch.tanh(x).exp()).sin().exp()


@pytest.mark.parametrize(("way", "how"), [*((way, "dropped") for way in WAYS), (in_save_on_cpu, "solved")])
@case("Company", "checkpoint, offloading or a mode inside a planned layer", "exact", threads="llama-cookbook#740")
def test_inside(way: Callable[[nn.Module, Tensor], Any], how: How) -> None:
    torch.manual_seed(0)
    _, model, _ = same_as_plain(nn.Sequential(*(Uses(way) for _ in range(3))), sample(), how, options=NOTHING)
    assert replays(model)


# -- tools that look on ---------------------------------------------------------------------------


@exactly
@case("Company", "a FLOP counter counts replays", "exact", threads="pytorch#123800")
def test_flops_are_those_of_plain(how: How) -> None:
    plain, model = blocks(), blocks()
    planned(model, sample(), how, **NOTHING)
    counts = []
    for each in (plain, model):
        with FlopCounterMode(display=False) as counter:
            each(sample()).square().mean().backward()
        counts.append(counter.get_flop_counts())
    assert counts[0] == counts[1] and replays(model)


@case("Company", "an outer dispatch mode is shown replays", "exact", threads="pytorch#158657")
def test_outer_modes_see_the_users_operators() -> None:
    """As many as without a plan, but for the detached aliases that plain autograd makes of results that it saves."""
    names = []
    plain, model = blocks(), blocks()
    planned(model, sample(), "dropped", **NOTHING)
    for each in (plain, model):
        with Named() as mode:
            each(sample()).square().mean().backward()
        names.append([name for name in mode.names if name != "aten.detach.default"])
    assert names[0] == names[1] and replays(model)


class Named(TorchDispatchMode):
    """Notes the names of operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@exactly
@case("Company", "the profiler around a planned step", "exact", threads="pytorch#158657")
def test_the_profiler_around(how: How) -> None:
    plain, model = blocks(), blocks()
    planned(model, sample(), how, **NOTHING)
    expected = run_steps(plain, [sample()])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as seen:
        found = run_steps(model, [sample()])
    assert_same(expected, found)
    assert replays(model)
    # three layers, two products each, three steps; what is replayed shows as well: it is run
    assert sum(event.count for event in seen.key_averages() if event.key == "aten::addmm") >= 18


@case("Company", "anomaly detection around a planned step", "exact", threads="pytorch#170284")
def test_anomaly_detection() -> None:
    plain, model = blocks(), blocks()
    planned(model, sample(), "dropped", **NOTHING)
    expected = run_steps(copy.deepcopy(plain), [sample()])
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        found = run_steps(model, [sample()])
    assert_same(expected, found)
    assert replays(model)
