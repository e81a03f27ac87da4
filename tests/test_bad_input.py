"""Every bad input: an error that names the value and says what to do, and nothing has changed."""

from __future__ import annotations

import copy
import json
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import budgetopt
from budgetopt import (
    BudgetOptError,
    InfeasibleBudgetError,
    InvalidBudgetError,
    PlanMismatchError,
    ProfileError,
    SolverError,
)
from tests.untouched import refused

EXACT = ("keep", "recompute")
NAN = math.nan


class Net(nn.Module):
    """Small, and with all that a failed call could disturb: statistics, dropout, a list that its forward fills."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        out: Tensor = self.blocks(x)
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.drop(nn.functional.gelu(self.norm(self.up(x)))))
        return x + y


def built() -> tuple[Net, Tensor]:
    """A model in the middle of its life: a hook, a block in eval mode, a frozen weight, some gradients."""
    model = Net()
    model.blocks[0].register_forward_hook(lambda *_: None)
    model.blocks[1].eval()
    weights = dict(model.named_parameters())
    weights["blocks.2.up.weight"].requires_grad_(False)
    weights["blocks.0.up.weight"].grad = torch.ones(32, 16)
    return model, torch.randn(64, 16)


def tight(model: nn.Module, sample: Any) -> int:
    """A budget under which something must be dropped."""
    found = budgetopt.measure(copy.deepcopy(model), sample)
    return found.resident_bytes + round(0.8 * (found.peak_bytes - found.resident_bytes))


# -- values ------------------------------------------------------------------------------------------

BUDGETS = [
    (0, "budget=0 leaves no memory. Give"),
    (-1, "budget=-1 leaves no memory"),
    ("-8GB", "budget='-8GB' leaves no memory"),
    (NAN, "budget=nan is no finite number"),
    ("8 apples", "unknown unit 'apples'. Use B, kB"),
    (8, "budget=8 .*Did you mean '8GB'"),
    ("8", "budget='8' has no unit. Did you mean '8GB'"),
    ("101%", "more than the whole device. Give at most '100%'"),
    (None, "of type NoneType. Give"),
]


@pytest.mark.parametrize(("budget", "match"), BUDGETS)
def test_a_budget_that_is_none(budget: Any, match: str) -> None:
    model, sample = built()
    with refused(model, InvalidBudgetError, match):
        budgetopt.fit(model, sample, budget)


SOLVING: list[tuple[str, Any, type[BudgetOptError], str]] = [
    ("time_limit", NAN, BudgetOptError, "time_limit=nan: give seconds, more than 0 and at most 86400"),
    ("time_limit", -1, BudgetOptError, "time_limit=-1: give seconds"),
    ("time_limit", 0, BudgetOptError, "time_limit=0: give seconds"),
    ("time_limit", math.inf, BudgetOptError, "time_limit=inf: give seconds"),
    ("time_limit", "ten", BudgetOptError, "time_limit='ten': give seconds"),
    ("time_limit", True, BudgetOptError, "time_limit=True: give seconds"),
    ("gap", NAN, BudgetOptError, "gap=nan: give a number from 0"),
    ("gap", -0.1, BudgetOptError, "gap=-0.1: give a number from 0"),
    ("gap", 1.5, BudgetOptError, r"gap=1.5: give a number from 0 \(prove the optimum\) to 1"),
    ("headroom", -1, InvalidBudgetError, "headroom=-1 takes nothing off the budget. Give 0 or a size"),
    ("headroom", "-5%", InvalidBudgetError, "headroom='-5%' takes nothing off"),
    ("headroom", NAN, InvalidBudgetError, "headroom=nan is no finite number"),
    ("headroom", "2GB", InvalidBudgetError, "headroom='2GB' leaves nothing of the budget of 1.00 GB: give less"),
    ("headroom", "100%", InvalidBudgetError, "headroom='100%' leaves nothing"),
    ("headroom", "101%", InvalidBudgetError, "more than the whole budget"),
    ("headroom", "free", InvalidBudgetError, "headroom='free' can't be read. Give 0 or a size"),
    ("solver", "magic", SolverError, "solver='magic' is not one of auto"),
    ("solver", ["ilp"], SolverError, "not one of auto"),
    ("backend", "gurobi", SolverError, "backend='gurobi' is not one of auto, cbc, highs"),
    ("allow", ("keep", "zip"), BudgetOptError, "no such choice 'zip'; there are keep, recompute, fp16"),
    ("allow", "keep", BudgetOptError, "allow='keep': give a tuple"),
    ("exclude", ("blocks.0.upp",), BudgetOptError, r"no layer 'blocks.0.upp'; did you mean 'blocks\.0\.up'"),
    ("exclude", ("layers.2",), BudgetOptError, "no layer 'layers.2'; did you mean 'blocks.2'"),
    ("exclude", ("xyz",), BudgetOptError, "names are those of named_modules"),
    ("exclude", "blocks", BudgetOptError, "exclude='blocks': give a tuple"),
]


@pytest.mark.parametrize(("argument", "value", "error", "match"), SOLVING)
def test_an_argument_of_the_solver(argument: str, value: Any, error: type[BudgetOptError], match: str) -> None:
    model, sample = built()
    with refused(model, error, match):
        budgetopt.fit(model, sample, "1GB", **{argument: value}, progress=ran)


@pytest.mark.parametrize(("argument", "value", "error", "match"), SOLVING)
def test_an_argument_of_solve(
    argument: str, value: Any, error: type[BudgetOptError], match: str, profile: budgetopt.Profile
) -> None:
    with pytest.raises(error, match=match):
        budgetopt.solve(profile, "1GB", **{argument: value})


@pytest.fixture(scope="module")
def profile() -> budgetopt.Profile:
    return budgetopt.profile(*built())


def ran(stage: str) -> None:
    raise AssertionError(f"{stage}: the argument could have been refused before")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"max_grad_error": -1e-3}, "max_grad_error=-0.001: give a number of at least 0"),
        ({"max_grad_error": NAN}, "max_grad_error=nan"),
        ({"loss": lambda out: out.mean(), "step": lambda model, x: model(x).mean()}, "either loss= or step="),
        ({"loss": 3}, "loss=3 can't be called: give a function, loss"),
        ({"step": "mean"}, "step='mean' can't be called"),
        ({"progress": 3}, "progress=3 can't be called"),
        ({"optimizer": "shampoo"}, "'shampoo'.*name the nearest of"),
        ({"optimizer": 3}, "optimizer=3 is neither"),
        ({"plan": 3}, "plan=3: give the path"),
        ({"plan": ""}, "plan='': give the path"),
    ],
)
def test_another_argument(arguments: dict[str, Any], match: str) -> None:
    model, sample = built()
    with refused(model, BudgetOptError, match):
        budgetopt.fit(model, sample, "1GB", **arguments)


@pytest.mark.parametrize("arguments", [{"gap": 0}, {"gap": 1}, {"max_grad_error": math.inf}, {"time_limit": 86400}])
def test_the_ends_of_the_legal_ranges(arguments: dict[str, Any]) -> None:
    model, sample = built()
    budgetopt.fit(model, sample, tight(model, sample), optimizer=None, allow=EXACT, **arguments)
    plan = budgetopt.plan_of(model)
    assert plan is not None and plan.drops


def test_a_budget_below_what_is_resident() -> None:
    model, sample = built()
    weights = sum(p.numel() * 4 for p in model.parameters())
    trained = sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
    with refused(model, InfeasibleBudgetError, "no plan fits 20.0 kB: the smallest .*Raise the budget") as caught:
        budgetopt.fit(model, sample, 20_000)
    for part in (
        f"{weights / 1000:.1f} kB parameters",
        "2.05 kB gradients that were there before",
        f"{2 * trained / 1000:.1f} kB the optimizer's state",
        "4.10 kB the sample",
    ):
        assert part in str(caught.value)
    assert isinstance(caught.value, InfeasibleBudgetError)
    budgetopt.fit(model, sample, caught.value.minimum)


# -- samples, losses, steps --------------------------------------------------------------------------


def notes(error: BaseException) -> str:
    return " ".join(getattr(error, "__notes__", [])) or str(error.__cause__)  # 3.10 has no notes


@pytest.mark.parametrize("call", [budgetopt.profile, budgetopt.measure, lambda m, s: budgetopt.fit(m, s, "1GB")])
def test_a_sample_that_the_model_rejects(call: Callable[..., Any]) -> None:
    model, _ = built()
    with refused(model, RuntimeError, "mat1 and mat2") as caught:
        call(model, torch.ones(4, 5))
    assert "ran the model on the sample" in notes(caught.value)


@pytest.mark.parametrize("call", [budgetopt.profile, budgetopt.measure, lambda m, s: budgetopt.fit(m, s, "1GB")])
def test_a_batch_of_inputs_and_targets(call: Callable[..., Any]) -> None:
    model, x = built()
    with refused(model, TypeError, "takes 2 positional arguments but 3") as caught:
        call(model, (x, x))
    assert "forward takes 1" in notes(caught.value) and "step=lambda model, batch" in notes(caught.value)


def test_an_error_without_notes_gets_a_cause() -> None:
    class Old(Exception):
        @property
        def add_note(self) -> Any:  # what Python 3.10 does
            raise AttributeError

    def step(model: nn.Module, sample: Any) -> Tensor:
        raise Old("mine")

    model, sample = built()
    with refused(model, Old, "mine") as caught:
        budgetopt.fit(model, sample, "1GB", step=step)
    assert isinstance(caught.value.__cause__, ProfileError) and "step=" in str(caught.value.__cause__)


@pytest.mark.parametrize("sample", [None, {}, (), []])
def test_an_empty_sample(sample: Any) -> None:
    model, _ = built()
    with refused(model, ProfileError, r"holds nothing, but the model's forward needs x: give a batch"):
        budgetopt.fit(model, sample, "1GB")


def test_a_sample_may_be_empty_where_the_step_brings_its_own() -> None:
    model, x = built()
    budgetopt.fit(model, None, "1GB", step=lambda model, _: model(x).mean())
    assert budgetopt.plan_of(model) is not None


LOSSES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda out: out, r"loss= gave a tensor of shape \[64, 16\].*reduce it"),
    (lambda out: out.mean().item(), "loss= gave float.*without .item"),
    (lambda out: None, "loss= gave NoneType"),
    (lambda out: out.mean().detach(), "loss= gave does not require grad"),
    (lambda out: out.mean() + 1j, "complex64.*real scalar"),
]


@pytest.mark.parametrize(("loss", "match"), LOSSES)
def test_a_loss_that_is_none(loss: Callable[[Any], Any], match: str) -> None:
    model, sample = built()
    with refused(model, ProfileError, match):
        budgetopt.fit(model, sample, "1GB", loss=loss)
    with refused(model, ProfileError, match.replace("loss= gave", "step= gave")):
        budgetopt.fit(model, sample, "1GB", step=lambda model, sample: loss(model(sample)))


@pytest.mark.parametrize("loss", [None, lambda out: out.sum()])
def test_nothing_to_differentiate(loss: Any) -> None:
    model, sample = built()
    with (
        torch.no_grad(),
        refused(model, ProfileError, "nothing to differentiate.*grad mode is off: call budgetopt out"),
    ):
        budgetopt.fit(model, sample, "1GB", loss=loss)
    with torch.inference_mode(), refused(model, ProfileError, "nothing to differentiate.*inference_mode is on"):
        budgetopt.fit(model, sample, "1GB", loss=loss)
    model.requires_grad_(False)
    with refused(model, ProfileError, "nothing to differentiate.*all parameters are frozen"):
        budgetopt.fit(model, sample, "1GB", loss=loss)


# -- models and devices ------------------------------------------------------------------------------


class Elsewhere(nn.Parameter):
    """A parameter that says it is on a device that this machine lacks."""

    kind = "mps"

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(type(self).kind)


class OnCuda(Elsewhere):
    kind = "cuda"


def on(parameter: type[nn.Parameter]) -> nn.Module:
    model = nn.Linear(16, 16)
    model.weight, model.bias = parameter(model.weight.detach()), parameter(model.bias.detach())
    return model


def made_for_inference() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(16, 16)


MODELS: list[tuple[Callable[[], nn.Module], str]] = [
    (nn.ReLU, "no parameters: there is nothing to train"),
    (lambda: nn.Linear(16, 16, device="meta"), r"on the meta device.*to_empty"),
    (lambda: nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16, device="meta")), r"several devices \(cpu, meta\)"),
    (lambda: nn.LazyLinear(16), "'weight' has no shape yet: run the model once"),
    (made_for_inference, "'weight' was made in torch.inference_mode"),
    (lambda: on(Elsewhere), "device 'mps' is not supported yet: .* on cpu and cuda; .* could move to cpu"),
]
CALLS: list[Callable[[Any, Any], Any]] = [
    lambda model, sample: budgetopt.fit(model, sample, "1GB"),
    budgetopt.profile,
    budgetopt.measure,
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("make", "match"), MODELS)
def test_a_model_that_cant_be_trained(make: Callable[[], nn.Module], match: str, call: Callable[..., Any]) -> None:
    model = make()
    with refused(model, ProfileError, match):
        call(model, torch.ones(4, 16))


def test_where_to_move_is_what_torch_says_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    with refused(model := on(Elsewhere), ProfileError, "could move to cpu or cuda"):
        budgetopt.fit(model, torch.ones(4, 16), "1GB")


@pytest.mark.parametrize("call", CALLS)
def test_a_cuda_graph_is_being_captured(call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with refused(model := on(OnCuda), ProfileError, "CUDA graph is being captured.*fit before the capture"):
        call(model, torch.ones(4, 16))


@pytest.mark.parametrize("call", [*CALLS, lambda m, s: budgetopt.remove(m), lambda m, s: budgetopt.plan_of(m)])
def test_what_is_no_module(call: Callable[..., Any]) -> None:
    with refused(len, BudgetOptError, "of type builtin_function_or_method: give the torch.nn.Module"):
        call(len, torch.ones(4, 16))


@pytest.mark.parametrize("call", CALLS[:2])
def test_a_script_module(call: Callable[..., Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.ReLU()))
    with refused(model, ProfileError, "ScriptModule.*give the module it came from"):
        call(model, torch.ones(4, 16))


@pytest.mark.parametrize("call", CALLS[:2])
def test_a_compiled_model(call: Callable[..., Any]) -> None:
    model, sample = built()
    compiled = torch.compile(model, backend="eager")
    with refused(compiled, ProfileError, "torch.compile was called on the model.*give the plain model"):
        call(compiled, sample)
    model.compile(backend="eager")
    with refused(model, ProfileError, "compile after fit: what is planned then runs uncompiled"):
        call(model, sample)


def test_remove_without_fit() -> None:
    model, _ = built()
    with refused(model, BudgetOptError, "no plan on this model to remove: fit or apply one first"):
        budgetopt.remove(model)


def test_what_is_no_plan_and_no_profile() -> None:
    model, _ = built()
    with refused(model, BudgetOptError, r"plan='plan.json' is no Plan: .*Plan\.load"):
        budgetopt.apply(model, "plan.json")  # type: ignore[arg-type]
    with pytest.raises(BudgetOptError, match=r"profile='plan.json' is no Profile: .*budgetopt\.profile"):
        budgetopt.solve("plan.json", "1GB")  # type: ignore[arg-type]
    with refused(model, BudgetOptError, "steps=0: give the number of steps"):
        budgetopt.measure(model, torch.ones(4, 16), steps=0)


# -- files -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    model, sample = built()
    budgetopt.fit(model, sample, tight(model, sample), optimizer=None, allow=EXACT, plan=path)
    return path.read_text()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda text: "", "not a Plan.*Delete it"),
        (lambda text: text[: len(text) // 2], "not a Plan.*Delete it"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "version: Input should be 1, not 2. Delete it"),
        (lambda text: json.dumps({**json.loads(text), "color": 1}), "color"),
    ],
)
def test_a_file_that_is_no_plan(change: Callable[[str], str], match: str, plan_text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(change(plan_text))
    model, sample = built()
    with refused(model, PlanMismatchError, match, tmp_path):
        budgetopt.fit(model, sample, "1GB", plan=path)


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up = nn.Linear(16, 32, bias=False)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda model: Wider(), r"modules, +Net was planned and +Wider is here"),
        (
            lambda model: model.double(),
            r"blocks\.0\.up\.weight \[32, 16\] torch\.float32 was planned and .*float64 is here",
        ),
    ],
)
def test_the_plan_of_another_model(
    change: Callable[[nn.Module], nn.Module], match: str, plan_text: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan_text)
    model = change(built()[0])
    with refused(model, PlanMismatchError, f"{match}.*give another path", tmp_path):
        budgetopt.fit(model, torch.ones(64, 16), "1GB", plan=path)
    with refused(model, PlanMismatchError, match):
        budgetopt.apply(model, budgetopt.Plan.load(path))


def test_the_plan_of_another_sample(plan_text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan_text)
    model, x = built()
    with refused(model, PlanMismatchError, "in its sample, torch.float32 was planned and torch.float64 is", tmp_path):
        budgetopt.fit(model, x.double(), "1GB", plan=path)
    with refused(model, PlanMismatchError, "in its sample, ", tmp_path):
        budgetopt.fit(model, (x,), "1GB", plan=path)


def test_a_path_that_cant_be_written(tmp_path: Path) -> None:
    model, sample = built()
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "none" / "plan.json", tmp_path / "file" / "plan.json"):
        with refused(model, BudgetOptError, "can't write the plan.*choose a folder that exists", tmp_path):
            budgetopt.fit(model, sample, "1GB", plan=path, progress=ran)
    with refused(model, BudgetOptError, r"is a folder: give a file in it, such as .*plan\.json", tmp_path):
        budgetopt.fit(model, sample, "1GB", plan=tmp_path, progress=ran)


@pytest.mark.parametrize("name", ["mkstemp", "fdopen", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_save_that_fails(
    name: str, error: BaseException, plan_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan_text)
    model, sample = built()

    def fail(*arguments: Any, **named: Any) -> None:
        raise error

    full = isinstance(error, OSError)
    expected = BudgetOptError if full else KeyboardInterrupt
    with (
        monkeypatch.context() as patched,
        refused(model, expected, "No space left.*Choose a folder" if full else "^$", tmp_path),
    ):
        patched.setattr(f"tempfile.{name}" if name == "mkstemp" else f"os.{name}", fail)
        budgetopt.fit(model, sample, "1GB", plan=path)
    budgetopt.fit(model, sample, "1GB", plan=path)
    assert budgetopt.Plan.load(path).budget_bytes == 10**9 and len(os.listdir(tmp_path)) == 1


# -- no errors ---------------------------------------------------------------------------------------


def test_fit_twice_is_one_plan() -> None:
    model, sample = built()
    budget = tight(model, sample)
    attributes = [set(vars(module)) for module in model.modules()]
    budgetopt.fit(model, sample, budget, optimizer=None, allow=EXACT)
    first = budgetopt.plan_of(model)
    budgetopt.fit(model, sample, budget + 2048, optimizer=None, allow=EXACT)
    second = budgetopt.plan_of(model)
    assert (
        first is not None and second is not None and second.drops and second.budget_bytes == first.budget_bytes + 2048
    )
    assert budgetopt.remove(model) is model and budgetopt.plan_of(model) is None
    assert [set(vars(module)) for module in model.modules()] == attributes
