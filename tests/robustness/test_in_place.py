"""Writes in place, and weights that change before backward: what plain refuses is refused, the rest is exact."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.forced import by_lot, drop, force, halve, keep
from tests.oracle import assert_same, run_steps

from .cases import case
from .sides import How, exactly, planned, replays, same_as_plain

MODIFIED = "modified by an inplace operation"


class Block(nn.Module):
    """Saves its input, and what it makes of it in several versions of one storage."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Any:
        hidden = self.up(x).mul_(2)
        shifted = hidden + 1
        hidden.relu_()
        return self.down(shifted.mul_(0.5).tanh_() * hidden.sin())


class Residual(nn.Module):
    """Adds to each block's input in place, after the block has saved it."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            change = block(x)
            x = x.add_(change) if self.writes else x + change
        return x


@pytest.mark.parametrize("choose", [keep, drop, halve])
@case(
    "In place", "a block's input is written to in place behind the block", "as plain", threads="pytorch#197887, #36383"
)
def test_a_write_to_the_input_names_the_block(choose: Any) -> None:
    torch.manual_seed(0)
    model, x = Residual(writes=True), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match=MODIFIED) as expected:
        plain(x).sum().backward()
    force(model, choose, [f"blocks.{i}" for i in range(3)])
    with pytest.raises(RuntimeError, match=MODIFIED + r".*blocks\.2") as found:
        model(x).sum().backward()
    assert type(found.value) is type(expected.value)
    model.writes = plain.writes = False
    if choose is not halve:
        assert_same(run_steps(plain, [x]), run_steps(model, [x]))


class SharedMask(nn.Module):
    """A mask that all layers add, and that changes from layer to layer; autograd saves it nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(8, 8)
        for number, layer in enumerate(self.layers):
            x = self.attend(layer, x, mask)
            mask[:, number].fill_(-1e9)
        return x

    def attend(self, layer: nn.Module, x: Tensor, mask: Tensor) -> Any:
        y = layer(x)
        return x + torch.softmax(y @ y.t() + mask, -1) @ y.exp()


class Attends(nn.Module):
    """One layer of it, as a module: the mask comes from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        y = self.layer(x)
        return x + torch.softmax(y @ y.t() + mask, -1) @ y.exp()


class MaskFromOutside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attends() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(8, 8)
        for number, layer in enumerate(self.layers):
            x = layer(x, mask)
            mask[:, number].fill_(-1e9)
        return x


@pytest.mark.parametrize(
    ("build", "how"), [(SharedMask, "dropped"), (MaskFromOutside, "dropped"), (MaskFromOutside, "solved")]
)
@case("In place", "a later layer changes the mask that all layers share", "exact", threads="pytorch#36383")
def test_every_layer_is_made_again_with_the_mask_it_saw(build: Callable[[], nn.Module], how: How) -> None:
    torch.manual_seed(0)
    _, model, _ = same_as_plain(build(), torch.randn(8, 8), how, options={"optimizer": None})
    assert replays(model)


@pytest.mark.parametrize("seed", range(6))
@case("In place", "what is kept is written to by the operator behind it", "exact", threads="pytorch#119590, #113737")
def test_kept_versions_survive_writes(seed: int) -> None:
    """Kept and dropped versions of one storage, side by side, by lot."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(3))), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    regions = force(model, by_lot(seed), [str(i) for i in range(3)])
    assert_same(run_steps(plain, [x]), run_steps(model, [x]))
    assert sum(region.counters.replayed for region in regions)


def step_between(model: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = model(x).square().mean(), model(2 * x).square().mean()
    first.backward()
    optimizer.step()
    second.backward()


def average_between(model: nn.Module, x: Tensor) -> None:
    loss = model(x).square().mean()
    average = [p.detach() * 0.9 for p in model.parameters()]
    with torch.no_grad():
        for parameter, mean in zip(model.parameters(), average, strict=True):
            parameter.copy_(mean)
    loss.backward()


def load_between(model: nn.Module, x: Tensor) -> None:
    loss = model(x).square().mean()
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
    loss.backward()


@pytest.mark.parametrize(
    ("change", "how"),
    [(step_between, "dropped"), (step_between, "solved"), (average_between, "dropped"), (load_between, "dropped")],
)
@case("In place", "weights change between forward and backward", "as plain", threads="bitsandbytes#2034")
def test_changed_weights_raise(change: Callable[[nn.Module, Tensor], None], how: How) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(3))), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    planned(model, x, how, optimizer=None)
    for each in (plain, model):
        with pytest.raises(RuntimeError, match=MODIFIED):
            change(each, x)
    model.load_state_dict(plain.state_dict())
    assert_same(run_steps(plain, [x]), run_steps(model, [x]))
    assert replays(model)


class Buffers(nn.Module):
    """Streams weights through one buffer: what a layer read is gone when the next one is called."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8, 8) / 3 for _ in range(3))
        self.layers = nn.ModuleList(Uses() for _ in range(3))
        self.register_buffer("slot", torch.zeros(8, 8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for weight, layer in zip(self.weights, self.layers, strict=True):
            slot: Any = self.slot
            slot.copy_(weight.detach())
            x = layer(x, slot, weight)
        return x


class Uses(nn.Module):
    """Its gradient needs the slot's bytes only where they are read again: plain saves sums, which need none."""

    def forward(self, x: Tensor, slot: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(x + slot.sum(0)) * weight.exp()[0] + x.sin()


@exactly
@case("In place", "weights are streamed through a buffer that is used again", "exact", threads="bitsandbytes#2035")
def test_recycled_weight_buffers(how: How) -> None:
    torch.manual_seed(0)
    _, model, _ = same_as_plain(Buffers(), torch.randn(8, 8), how, options={"optimizer": None})
    assert replays(model)
