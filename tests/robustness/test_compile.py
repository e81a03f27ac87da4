"""torch.compile before and after a plan, of the whole model and of parts: never wrong, and what is lost is said."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import budgetopt
from budgetopt._apply import installed
from budgetopt._fixed import Resident
from budgetopt._step import Step
from budgetopt._verify import run_once
from tests.oracle import assert_same, run_steps

from .cases import case
from .sides import EXACT, How, budget, exactly, planned, replays

BACKEND = "aot_eager"
AROUND = r"torch\.compile was called around 0, which is planned.*compile it before budgetopt\.fit"
NOTHING: dict[str, Any] = {"optimizer": None}
pytestmark = pytest.mark.filterwarnings("ignore:.*grad attribute of a Tensor that is not a leaf")
"""Dynamo looks at it wherever a compiled layer is called on what another one made."""


@pytest.fixture(autouse=True)
def _forget_what_was_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # Measuring runs a part in more ways than training does; with fullgraph=True, the limit of 8 is an error.
    with torch._dynamo.config.patch(recompile_limit=64):
        yield
    torch._dynamo.reset()


class Bends(nn.Module):
    """What lies between the two products."""

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(x).sin().exp()


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.bends, self.drop = Bends(), nn.Dropout(0.2)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(self.drop(self.bends(self.up(self.norm(x)))))


def blocks(depth: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(depth)), nn.Linear(16, 4))


def sample(rows: int = 32) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(3))


def graphs() -> int:
    """How many graphs were compiled since the last reset."""
    found: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return found


# -- compiled after fit --------------------------------------------------------------------------


def whole(model: nn.Module) -> nn.Module:
    model.compile(backend=BACKEND)
    return model


def every_block(model: nn.Module) -> nn.Module:
    for block in model:  # type: ignore[attr-defined]
        block.compile(backend=BACKEND)
    return model


def wrapper(model: nn.Module) -> nn.Module:
    found: Any = torch.compile(model, backend=BACKEND)
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize(("compiled", "how"), [(whole, "dropped"), (every_block, "dropped"), (whole, "solved")])
@case("Company", "torch.compile after the plan takes it out of force", "fallback", threads="pytorch#147565, #100733")
def test_compile_after_fit(compiled: Callable[[nn.Module], nn.Module], how: How) -> None:
    """Planned layers run under their plan, uncompiled, and it is said."""
    plain, model, x = blocks(), blocks(), sample()
    planned(model, x, how, **NOTHING)
    compiled(model)
    expected = run_steps(compiled(plain), [x])
    with pytest.warns(budgetopt.BudgetOptWarning, match=AROUND):
        found = run_steps(model, [x])
    assert_same(expected, found)
    there = installed(model)
    assert there is not None and all(region.counters.calls == 3 for region in there.regions.values())
    assert replays(model)
    model.zero_grad()
    plan = budgetopt.plan_of(model)
    assert plan is not None
    run = run_once(model, Step(x), Resident(model, x), 0)
    assert run.peak <= plan.predicted.peak_bytes + plan.predicted.resident_bytes // 50


@pytest.mark.parametrize("ran", [False, True])
@case(
    "Company", "a plan made after torch.compile is ignored by what is compiled already", "fallback", threads="#167406"
)
def test_fit_after_compiling_a_wrapper(ran: bool) -> None:
    """The user trains what torch.compile returned, and fits the model that was given to it."""
    plain, model, x = blocks(), blocks(), sample()
    expected, outer = wrapper(plain), wrapper(model)
    if ran:
        for each in (expected, outer):
            run_steps(each, [x])
    planned(model, x, "dropped", **NOTHING)
    with pytest.warns(budgetopt.BudgetOptWarning, match=AROUND):
        found = run_steps(outer, [x])
    assert_same(run_steps(expected, [x]), found)
    assert replays(model)


@case("Company", "a compiled model evaluates as planned", "exact", threads="diffusers#10107")
def test_evaluation_is_compiled_in_one_graph() -> None:
    plain, model, x = blocks().eval(), blocks(), sample()
    planned(model, x, "dropped", **NOTHING)
    model.eval()
    model.compile(backend=BACKEND, fullgraph=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(plain(x), model(x))
    assert graphs() == 1


# -- compiled before fit -------------------------------------------------------------------------


@case("Company", "the whole model was compiled before fit", "refused", threads="pytorch#121966")
def test_fit_of_a_compiled_model_is_refused() -> None:
    for compiled in (whole, wrapper):
        model = compiled(blocks())
        with pytest.raises(budgetopt.ProfileError, match=r"Parts of it may be compiled.*Or compile after fit"):
            budgetopt.fit(model, sample(), "1GB")
        assert_same(run_steps(compiled(blocks()), [sample()]), run_steps(model, [sample()]))


def a_block(model: Any) -> None:
    model[1].compile(backend=BACKEND, fullgraph=True)


def a_wrapped_block(model: Any) -> None:
    model[1] = torch.compile(model[1], backend=BACKEND)


def a_part(model: Any) -> None:
    model[1].bends.compile(backend=BACKEND, fullgraph=True)


@pytest.mark.parametrize(
    ("part", "how"),
    [(a_block, "dropped"), (a_block, "solved"), (a_wrapped_block, "dropped"), (a_part, "dropped")],
)
@case("Company", "a part was compiled before fit", "fallback", threads="pytorch#139989, #193143")
def test_compiled_parts_are_left_alone(part: Callable[[Any], None], how: How) -> None:
    """They stay compiled, nothing in them or around them is planned, and what they hold is counted."""
    model, x = blocks(4), sample()
    part(model)
    plain = copy.deepcopy(model)
    planned(model, x, how, **NOTHING)
    plan, there = budgetopt.plan_of(model), installed(model)
    assert plan is not None and there is not None
    assert not {"", "1", "1._orig_mod", "1.bends"} & set(there.regions)
    assert_same(run_steps(plain, [x]), run_steps(model, [x]))
    assert replays(model)
    compiled = graphs()
    run_steps(model, [x])
    assert compiled == graphs() > 0
    model.zero_grad()
    run = run_once(model, Step(x), Resident(model, x), 0)
    assert abs(run.peak - plan.predicted.peak_bytes) <= 0.02 * run.peak


# -- compiled functions inside --------------------------------------------------------------------


class Compiles(nn.Module):
    """Runs a function that was compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.function = torch.compile(lambda h: torch.tanh(h).sin() * h.exp(), backend=BACKEND)

    def forward(self, x: Tensor) -> Any:
        return x + self.function(self.inner(x))


@exactly
@case("Company", "a compiled function inside a layer saves otherwise when shapes change", "fallback", threads="#166926")
def test_compiled_functions_inside(how: How, capsys: pytest.CaptureFixture[str]) -> None:
    """In planned layers they run uncompiled; batches of other sizes make the compiler begin anew."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Compiles() for _ in range(3)))
    plain, batches = copy.deepcopy(model), [sample(), sample(24), sample(8)]
    planned(model, batches[0], how, **NOTHING)
    assert_same(run_steps(plain, batches), run_steps(model, batches))
    assert replays(model)
    if how == "solved":
        assert "compiled functions run uncompiled in planned layers" in capsys.readouterr().err


# -- exported, scripted, traced -------------------------------------------------------------------


@case("Company", "export after the plan", "exact", threads="diffusers#14135")
def test_export_after_fit() -> None:
    plain, model, x = blocks().eval(), blocks(), sample()
    planned(model, x, "dropped", **NOTHING)
    exported = torch.export.export(model.eval(), (x,))
    assert torch.equal(plain(x), exported.module()(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@case("Company", "scripting and tracing after the plan", "fallback", threads="pytorch#53421")
def test_scripting_after_remove() -> None:
    """Tracing sees the plain operators; scripting works once the plan is off."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Sigmoid(), nn.Linear(16, 16)) for _ in "123")
    )
    plain, x = copy.deepcopy(model), sample()
    planned(model, x, "dropped", **NOTHING)
    assert torch.equal(plain(x), torch.jit.trace(model.eval(), (x,))(x))  # type: ignore[no-untyped-call]
    assert torch.equal(plain(x), torch.jit.script(budgetopt.remove(model))(x))


@case("Company", "a budget is held by layers that compile leaves alone", "exact")
def test_fit_beside_compiled_parts() -> None:
    """The smallest budgets, with a part that can't be planned: measured within them."""
    model, x = blocks(4), sample()
    a_block(model)
    profile = budgetopt.profile(model, x, **NOTHING)
    limit = budget(profile, 0.5)
    budgetopt.fit(model, x, limit, allow=EXACT, **NOTHING)
    assert run_once(model, Step(x), Resident(model, x), 0).peak <= limit
    assert replays(model)
