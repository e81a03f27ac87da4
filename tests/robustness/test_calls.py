"""How modules are called: what they take and return, what they write into it, and in which mode."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import budgetopt
from budgetopt._apply import installed
from tests.models import gpt2_small
from tests.oracle import assert_same, run_steps

from .cases import case
from .sides import How, exactly, planned, replays, same_as_plain

NOTHING: dict[str, Any] = {"optimizer": None}


class Body(nn.Module):
    """The tensor part of every block here: enough to drop."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(torch.tanh(self.up(x)).exp().cos())


class Stack(nn.Module):
    """Blocks that hand on whatever they hand on; the first gets a tensor's worth from `begin`, `end` reads the last."""

    def __init__(
        self, kind: Callable[[], nn.Module], begin: Callable[[Tensor], Any], end: Callable[[Any], Any]
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(3))
        self.begin, self.end = begin, end

    def forward(self, x: Tensor) -> Any:
        state = self.begin(x)
        for block in self.blocks:
            state = block(state)
        return self.end(state)


def sample(rows: int = 32) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(3))


# -- what goes in and comes out --------------------------------------------------------------------


class Pair(NamedTuple):
    hidden: Tensor
    extra: Tensor | None


@dataclass
class Record:
    hidden: Tensor
    detached: Tensor
    number: int = 3


class ReturnsPair(Body):
    def forward(self, x: Any) -> Any:
        return Pair(super().forward(x.hidden), None)


class ReturnsRecord(Body):
    def forward(self, x: Any) -> Any:
        hidden = super().forward(x.hidden)
        return Record(hidden, hidden.detach() * 2, x.number + 1)


class ReturnsNested(Body):
    def forward(self, x: Any) -> Any:
        hidden = super().forward(x["state"]["hidden"][0])
        return {"state": {"hidden": [hidden, None]}, "none": None, "text": "as it is", "mask": hidden > 0}


class TakesNames(Body):
    def forward(self, x: Any) -> Any:
        return self.named(**x)

    def named(self, *, hidden: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Any:
        return {"hidden": super().forward(hidden) * scale, "mask": hidden > 0, "scale": 0.5}


STRUCTURES: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Any]]] = {
    "named tuple": (ReturnsPair, lambda x: Pair(x, None)),
    "dataclass": (ReturnsRecord, lambda x: Record(x, x)),
    "nested": (ReturnsNested, lambda x: {"state": {"hidden": [x, None]}}),
    "keywords": (TakesNames, lambda x: {"hidden": x}),
}


def shape_of(tree: Any) -> Any:
    """Types all the way down, and of each tensor whether it requires grad."""
    if isinstance(tree, Tensor):
        return type(tree), tree.requires_grad, tree.shape
    if is_dataclass(tree) and not isinstance(tree, type):
        return type(tree), [shape_of(getattr(tree, one.name)) for one in fields(tree)]
    if isinstance(tree, Mapping):
        return type(tree), {name: shape_of(part) for name, part in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree), [shape_of(part) for part in tree]
    return type(tree), tree


def hidden_of(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree
    if isinstance(tree, Mapping):
        return hidden_of(tree["hidden"] if "hidden" in tree else tree["state"])
    return tree[0] if isinstance(tree, list) else tree.hidden


def square(out: Any) -> Any:
    return hidden_of(out).square().mean()


@pytest.mark.parametrize(
    ("name", "how"), [*((name, "dropped") for name in STRUCTURES), ("dataclass", "solved"), ("keywords", "solved")]
)
@case(
    "Calls and modules", "outputs are dataclasses, dicts, named tuples, None", "exact", threads="pytorch#124725, #85088"
)
def test_structures(name: str, how: How) -> None:
    torch.manual_seed(0)
    kind, begin = STRUCTURES[name]
    model = Stack(kind, begin, lambda out: out)
    plain, found, _ = same_as_plain(model, sample(), how, options={**NOTHING, "loss": square}, loss=square)
    assert replays(found)
    assert shape_of(plain(sample())) == shape_of(found(sample()))


class Writes(Body):
    """Writes its result into the dict that it was given."""

    def forward(self, x: Any) -> Any:
        x["hidden"] = super().forward(x["hidden"])
        return x


class Pops(Body):
    """Takes the last of a list, puts two things back, of which the shapes change."""

    def forward(self, x: Any) -> Any:
        hidden = super().forward(x.pop())
        x.extend([hidden[: len(hidden) // 2], hidden])
        return x


MUTATED: list[tuple[Any, Any, Any]] = [
    (Writes, lambda x: {"hidden": x}, lambda state: state["hidden"]),
    (Pops, lambda x: [x], lambda state: torch.cat(state).sin()),
]


@exactly
@pytest.mark.parametrize(("kind", "begin", "end"), MUTATED)
@case("Calls and modules", "a block changes the dict or list that it was given", "exact", threads="pytorch#178568")
def test_containers_that_are_changed(kind: Any, begin: Any, end: Any, how: How) -> None:
    torch.manual_seed(0)
    _, model, _ = same_as_plain(Stack(kind, begin, end), sample(), how, options=NOTHING)
    assert replays(model)


# -- frozen parameters -----------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer and a low-rank addition to it that is trained."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.a, self.b = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Any:
        return x + torch.tanh(self.base(x) + self.b(self.a(x))).sin().exp()


@exactly
@case("Calls and modules", "adapters on frozen weights, and an input without grad", "exact", threads="peft#1142")
def test_adapters(how: How) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted() for _ in range(3)))
    before = copy.deepcopy(model.state_dict())
    _, fitted, trace = same_as_plain(model, sample(), how, options=NOTHING)
    assert replays(fitted)
    for name, value in trace.parameters.items():
        assert torch.equal(before[name], value) is ("base" in name)


@case("Calls and modules", "frozen blocks in front are planned for nothing", "exact", threads="peft#1142")
def test_frozen_blocks_save_nothing() -> None:
    torch.manual_seed(0)
    frozen, trained = [Body().requires_grad_(False) for _ in range(3)], [Body() for _ in range(3)]
    model = nn.Sequential(*frozen, *trained)
    profile = budgetopt.profile(model, sample(), **NOTHING)
    assert {region.path for region in profile.regions} == {"3", "4", "5"}
    held = {layer.path: layer.activation_bytes for layer in profile.layers}
    assert [held[path] for path in "012"] == [0, 0, 0]
    _, fitted, _ = same_as_plain(model, sample(), "dropped", options=NOTHING)
    assert replays(fitted)


@exactly
@case("Calls and modules", "parameters are frozen after fit", "exact", threads="transformers#26334")
def test_frozen_after_fit(how: How) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Body() for _ in range(4)))
    plain = copy.deepcopy(model)
    planned(model, sample(), how, **NOTHING)
    for each in (plain, model):
        each[0].requires_grad_(False)
        each[2].up.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", budgetopt.BudgetOptWarning)
        assert_same(run_steps(plain, [sample()]), run_steps(model, [sample()]))
    assert replays(model)


# -- modes ----------------------------------------------------------------------------------------


@exactly
@case(
    "Calls and modules", "gradients are needed in eval mode, none in no_grad", "exact", threads="diffusers#9850, #10107"
)
def test_what_counts_is_whether_gradients_are_wanted(how: How) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(Body(), nn.Dropout(0.3)) for _ in range(3)))
    plain = copy.deepcopy(model)
    planned(model, sample(), how, **NOTHING)
    there = installed(model)
    assert there is not None
    for mode in (torch.no_grad, torch.inference_mode):
        for train in (True, False):
            torch.manual_seed(1)
            with mode():
                expected = plain.train(train)(sample())
            torch.manual_seed(1)
            with mode():
                assert torch.equal(expected, model.train(train)(sample()))
    assert all(region.counters.calls == 0 for region in there.regions.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", budgetopt.BudgetOptWarning)  # without dropout, other operators run
        assert_same(run_steps(plain.eval(), [sample()]), run_steps(model.eval(), [sample()]))
    assert replays(model)


@case("Calls and modules", "generating from a planned model", "exact", threads="trl#4636, unsloth#2434")
def test_generate() -> None:
    model, batch = gpt2_small(2)
    plain: Any = copy.deepcopy(model)
    fitted: Any = planned(model, batch, "dropped", **NOTHING)
    for train in (True, False):
        found = []
        for each in (plain, fitted):
            torch.manual_seed(1)
            each.train(train)
            each.config.use_cache = True
            prompt = {"input_ids": batch["input_ids"][:2, :5], "attention_mask": torch.ones(2, 5, dtype=torch.long)}
            found.append(each.generate(**prompt, max_new_tokens=6, do_sample=True, pad_token_id=0))
            each.config.use_cache = False
        assert torch.equal(*found)
    assert_same(run_steps(plain.train(), [batch]), run_steps(fitted.train(), [batch]))
    assert replays(fitted)
