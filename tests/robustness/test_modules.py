"""What a user sees of a planned model's modules: hooks, names, types, signatures; one plan at a time."""

from __future__ import annotations

import copy
import inspect
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import budgetopt
from budgetopt._apply import installed
from tests.models import gpt2_small
from tests.oracle import assert_same, run_steps

from .cases import case
from .sides import EXACT, How, budget, exactly, planned, replays, same_as_plain

NOTHING: dict[str, Any] = {"optimizer": None}


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Any:
        """Residual."""
        return x + self.down(torch.tanh(self.up(self.norm(x))).exp()) * scale


class Layer(nn.Module):
    """Two blocks in one: a module to plan that has modules to plan inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x)).sin()


def layers(depth: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(depth)))


def sample() -> Tensor:
    """Wants a gradient: modules' backward hooks say otherwise that nobody does."""
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(3)).requires_grad_()


class Counts:
    """Counts the calls of every module's forward, from outside of it."""

    def __init__(self, model: nn.Module) -> None:
        self.before: dict[str, int] = {}
        self.after: dict[str, int] = {}
        self.backward: dict[str, int] = {}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self.counter(self.before, name))
            module.register_forward_hook(self.counter(self.after, name))
            module.register_full_backward_hook(self.counter(self.backward, name))

    @staticmethod
    def counter(counts: dict[str, int], name: str) -> Any:
        def count(*args: Any) -> None:
            counts[name] = counts.get(name, 0) + 1

        return count


@exactly
@case(
    "Calls and modules",
    "a child of a planned layer runs thrice",
    "exact",
    threads="pytorch#105635",
)
def test_regions_are_disjoint_and_run_once(how: How) -> None:
    model = layers()
    profile = budgetopt.profile(model, sample(), **NOTHING)
    paths = {region.path for region in profile.regions}
    assert not any(a != b and b.startswith(f"{a}." if a else "") for a in paths for b in paths)
    planned(model, sample(), how, **NOTHING)
    counts = Counts(model)
    for _ in range(3):
        model(sample()).square().mean().backward()
    assert replays(model)
    names = [name for name, _ in model.named_modules()]
    assert counts.before == counts.after == counts.backward == dict.fromkeys(names, 3)


@exactly
@case("Calls and modules", "hooks fire twice, or before and after not alike", "exact", threads="pytorch#143573, #81296")
def test_hooks_that_change_things_fire_once(how: How) -> None:
    """Hooks of layers and of their children, that change what goes in, what comes out, and gradients."""
    model = layers()
    for name, module in model.named_modules():
        if name.endswith(("first", "up")):
            module.register_forward_pre_hook(lambda m, args: (args[0] * 1.1,))
            module.register_forward_hook(lambda m, args, out: out + 0.1)
            module.register_full_backward_hook(lambda m, before, after: (before[0] * 0.9,))
    _, fitted, trace = same_as_plain(model, sample(), how, options=NOTHING)
    assert replays(fitted) and sum(trace.hooks.values()) == 18


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@case("Calls and modules", "transformers' gradient checkpointing is on already", "exact", threads="transformers#30404")
def test_checkpointing_of_the_models_own(reentrant: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """It goes on as it did, its second forward is the user's own, and `fit` says that it is on."""
    model, batch = gpt2_small(2)
    transformer: Any = model
    transformer.gradient_checkpointing_enable({"use_reentrant": reentrant})
    plain = copy.deepcopy(model)
    planned(model, batch, "dropped", **NOTHING)
    assert_same(run_steps(plain, [batch]), run_steps(model, [batch]))
    assert replays(model)
    calls: list[int] = []
    transformer.transformer.h[0].attn.register_forward_hook(lambda *args: calls.append(1))
    run_steps(model, [batch], steps=1)
    assert len(calls) == 2
    budgetopt.fit(model, batch, "1GB", **NOTHING)
    assert "gradient checkpointing is on" in capsys.readouterr().err


@case("Calls and modules", "fit again and again, with other budgets", "exact", threads="mlx-lm#167, trl#6827")
def test_fit_again() -> None:
    model = layers()
    plain = copy.deepcopy(model)
    before = identities(model)
    profile = budgetopt.profile(model, sample(), **NOTHING)
    for share in (0.9, 0.7, 0.9):
        budgetopt.fit(model, sample(), budget(profile, share), allow=EXACT, **NOTHING)
        patches = [vars(module)["forward"] for module in model.modules() if "forward" in vars(module)]
        assert patches and not any(hasattr(patch.__wrapped__, "region") for patch in patches)
    assert_same(run_steps(plain, [sample()]), run_steps(model, [sample()]))
    budgetopt.remove(model)
    assert identities(model) == before


def identities(model: nn.Module) -> list[dict[str, int]]:
    """Of everything that hangs on the modules."""
    return [{name: id(value) for name, value in vars(module).items()} for module in model.modules()]


@exactly
@case("Calls and modules", "names, types and signatures change", "exact", threads="timm#2003, transformers#27865")
def test_names_types_and_signatures(how: How, tmp_path: Path) -> None:
    model = layers()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters())
    planned(model, sample(), how, **NOTHING)
    assert list(plain.state_dict()) == list(model.state_dict()) and repr(plain) == repr(model)
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert len(model) == 2 and isinstance(model[0], Layer) and isinstance(model[0].first.up, nn.Linear)
    for one, other in zip(plain.modules(), model.modules(), strict=True):
        assert inspect.signature(one.forward) == inspect.signature(other.forward)
        assert type(one) is type(other) and inspect.getdoc(one.forward) == inspect.getdoc(other.forward)
    kept = [id(p) for p in model.parameters()]
    assert kept == [id(p) for group in optimizer.param_groups for p in group["params"]]
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    plain.load_state_dict(torch.load(file))
    assert_same(run_steps(plain, [sample()]), run_steps(model, [sample()]))


@case("Calls and modules", "a saved and loaded model carries wrappers", "exact", threads="accelerate#1507")
def test_save_pretrained(tmp_path: Path) -> None:
    model, batch = gpt2_small(2)
    fitted: Any = planned(model, batch, "dropped", **NOTHING)
    fitted.save_pretrained(tmp_path)
    loaded = type(fitted).from_pretrained(tmp_path).train()
    assert installed(loaded) is None
    assert_same(run_steps(loaded, [batch]), run_steps(fitted, [batch]))
