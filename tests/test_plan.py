"""Plans as files: made once, used again without measuring or solving, refused where they do not belong."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import budgetopt
from budgetopt import Plan, _fit, _trial
from tests.models import gpt2_small, mlp_stack
from tests.oracle import assert_same, plain_and_planned, run_steps
from tests.outside_meter import peak_bytes, resident_bytes

EXACT = ("keep", "recompute")


def budget_of(model: Any, sample: Any, part: float = 0.6) -> int:
    other = copy.deepcopy(model)  # a step leaves gradients
    return resident_bytes(other, sample) + round(part * peak_bytes(other, sample))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often fit measured, solved and verified."""
    counts = {"profile": 0, "solve": 0, "run_once": 0}
    for module, name in ((_fit, "profile"), (_fit, "solve"), (_trial, "run_once")):
        real = getattr(module, name)

        def count(*arguments: Any, name: str = name, real: Any = real, **named: Any) -> Any:
            counts[name] += 1
            return real(*arguments, **named)

        monkeypatch.setattr(module, name, count)
    return counts


def test_the_second_run_neither_profiles_nor_solves(tmp_path: Path, counted: dict[str, int]) -> None:
    path = tmp_path / "plan.json"
    model, sample = gpt2_small()
    plain, first = plain_and_planned(model)
    second = gpt2_small()[0]
    budget = budget_of(model, sample)
    budgetopt.fit(first, sample, budget, allow=EXACT, optimizer=None, plan=path)
    text = path.read_text()
    assert counted == {"profile": 1, "solve": 1, "run_once": 1}
    budgetopt.fit(second, sample, budget, allow=EXACT, optimizer=None, plan=path)
    assert counted == {"profile": 1, "solve": 1, "run_once": 1}
    assert path.read_text() == text
    assert budgetopt.plan_of(second) == budgetopt.plan_of(first)
    assert_same(run_steps(plain, [sample]), run_steps(second, [sample]))


def test_another_budget_solves_again_without_measuring(tmp_path: Path, counted: dict[str, int]) -> None:
    path = tmp_path / "plan.json"
    model, sample = mlp_stack()
    budgets = budget_of(model, sample, 0.6), budget_of(model, sample, 0.8)
    for budget in budgets:
        budgetopt.fit(model, sample, budget, allow=EXACT, optimizer=None, plan=path)
    assert counted["profile"] == 1 and counted["solve"] == 2
    assert budgetopt.Plan.load(path).budget_bytes == budgets[1]


def test_a_slightly_larger_budget_uses_the_plan_that_is_there(
    tmp_path: Path, counted: dict[str, int], capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    model, sample = mlp_stack()
    budget = budget_of(model, sample)
    budgetopt.fit(model, sample, budget, allow=EXACT, optimizer=None, plan=path)
    text = path.read_text()
    for other in (budget * 103 // 100, Plan.load(path).predicted.peak_bytes):
        budgetopt.fit(mlp_stack()[0], sample, other, allow=EXACT, optimizer=None, plan=path)
        assert "fits" in capfd.readouterr().err
    assert counted == {"profile": 1, "solve": 1, "run_once": 1} and path.read_text() == text
    budgetopt.fit(mlp_stack()[0], sample, budget * 11 // 10, allow=EXACT, optimizer=None, plan=path)
    assert counted["profile"] == 1 and counted["solve"] == 2


def test_a_larger_sample_that_breaks_the_budget_is_profiled(tmp_path: Path, counted: dict[str, int]) -> None:
    path = tmp_path / "plan.json"
    model, sample = mlp_stack(batch=64)
    larger = torch.cat([sample, sample])
    budget = budget_of(model, larger, 0.8)
    budgetopt.fit(model, sample, budget, allow=EXACT, optimizer=None, plan=path)
    budgetopt.fit(model, larger, budget, allow=EXACT, optimizer=None, plan=path)
    assert counted["profile"] == 2
    probe = copy.deepcopy(model)
    assert resident_bytes(probe, larger) + peak_bytes(probe, larger) <= budget
    assert Plan.load(path).profile.batch == 128


def test_another_optimizer_reserve_needs_no_new_profile(tmp_path: Path, counted: dict[str, int]) -> None:
    path = tmp_path / "plan.json"
    model, sample = mlp_stack()
    budget = budget_of(model, sample, 0.9)
    budgetopt.fit(model, sample, budget, allow=EXACT, optimizer=None, plan=path)
    parameters = sum(p.numel() * 4 for p in model.parameters())
    budgetopt.fit(model, sample, budget + 2 * parameters, allow=EXACT, optimizer="adamw", plan=path)
    assert counted["profile"] == 1
    assert Plan.load(path).profile.fixed.optimizer == 2 * parameters + 4 * len(list(model.parameters()))


def test_another_sample_size_is_verified_again(tmp_path: Path, counted: dict[str, int]) -> None:
    path = tmp_path / "plan.json"
    model, sample = mlp_stack()
    budget = budget_of(model, sample)
    budgetopt.fit(model, sample, budget, allow=EXACT, optimizer=None, plan=path)
    half = sample[: len(sample) // 2] if isinstance(sample, torch.Tensor) else tuple(t[: len(t) // 2] for t in sample)
    budgetopt.fit(model, half, budget, allow=EXACT, optimizer=None, plan=path)
    assert counted == {"profile": 1, "solve": 1, "run_once": 2}


def test_another_model_is_refused_and_the_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    model, sample = gpt2_small(2)
    budgetopt.fit(model, sample, budget_of(model, sample, 0.8), allow=EXACT, optimizer=None, plan=path)
    text = path.read_text()
    other, sample = gpt2_small(3)
    with pytest.raises(budgetopt.PlanMismatchError, match=r"modules.*transformer\.ln_f.*transformer\.h\.2"):
        budgetopt.fit(other, sample, "1GB", optimizer=None, plan=path)
    with pytest.raises(budgetopt.PlanMismatchError, match="modules"):
        budgetopt.apply(other, budgetopt.Plan.load(path))
    with pytest.raises(budgetopt.PlanMismatchError, match="parameters"):
        budgetopt.fit(model.double(), sample, "1GB", optimizer=None, plan=path)
    assert path.read_text() == text


@pytest.mark.parametrize("damage", ["", "{", '{"version": 1}', "[]", "null", "\x00", '{"version": 99}'])
def test_a_damaged_file_is_a_clear_error(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(damage)
    model, sample = mlp_stack()
    with pytest.raises(budgetopt.PlanMismatchError, match=r"plan\.json.*Delete it"):
        budgetopt.fit(model, sample, "1GB", optimizer=None, plan=path)
    assert path.read_text() == damage


def test_a_damaged_profile_inside_is_a_clear_error_too(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    model, sample = mlp_stack()
    budget = budget_of(model, sample)
    budgetopt.fit(model, sample, budget, allow=EXACT, optimizer=None, plan=path)
    data = json.loads(path.read_text())
    data["profile_data"] = data["profile_data"][:-40]
    del data["seal"]  # as in files of older versions
    path.write_text(json.dumps(data))
    with pytest.raises(budgetopt.PlanMismatchError, match="profile inside"):
        budgetopt.fit(mlp_stack()[0], sample, budget, allow=EXACT, optimizer=None, plan=path)


def test_a_folder_that_is_not_there_is_said_before_anything_runs(tmp_path: Path, counted: dict[str, int]) -> None:
    model, sample = mlp_stack()
    with pytest.raises(budgetopt.BudgetOptError, match="choose a folder"):
        budgetopt.fit(model, sample, "1GB", optimizer=None, plan=tmp_path / "none" / "plan.json")
    assert counted["profile"] == 0


def test_a_plan_reads_decisions_first_and_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    model, sample = gpt2_small()
    budgetopt.fit(model, sample, budget_of(model, sample), allow=EXACT, optimizer=None, plan=path)
    data = json.loads(path.read_text())
    assert list(data)[:2] == ["seal", "version"] and list(data)[-1] == "profile_data"
    plan = budgetopt.Plan.load(path)
    assert plan == budgetopt.plan_of(model)
    assert plan.profile.peak_bytes == plan.predicted.plain_peak_bytes
    choices = {d["choice"] for region in data["regions"] for d in region["decisions"]}
    assert "recompute" in choices and choices <= {"keep", "hold", "recompute"}
    assert "transformer.h.0" in str(plan) and "transformer.h.0" in str(plan.profile)


def test_apply_needs_no_run_and_gives_the_same_numbers(tmp_path: Path, counted: dict[str, int]) -> None:
    model, sample = mlp_stack()
    plain, planned = plain_and_planned(model)
    profile = budgetopt.profile(model, sample, optimizer=None)
    plan = budgetopt.solve(profile, budget_of(model, sample), allow=EXACT)
    assert budgetopt.apply(planned, plan) is planned
    assert budgetopt.plan_of(planned) is plan
    assert counted["run_once"] == 0
    assert_same(run_steps(plain, [sample]), run_steps(planned, [sample]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"allow": ("keep", "zip")}, "zip.*keep, recompute, fp16"),
        ({"allow": "keep"}, "give a tuple"),
        ({"exclude": ("transformer.h.9",)}, "no layer 'transformer.h.9'"),
        ({"solver": "magic"}, "magic.*not one of"),
        ({"backend": "magic"}, "magic.*cbc, highs"),
        ({"headroom": "200GB"}, "leaves nothing"),
        ({"budget": "8 apples"}, "8 apples"),
        ({"budget": 8}, "Did you mean"),
    ],
)
def test_bad_arguments_are_clear_errors(arguments: dict[str, Any], message: str) -> None:
    model, sample = gpt2_small()
    named = {"budget": budget_of(model, sample), "optimizer": None, **arguments}
    with pytest.raises(budgetopt.BudgetOptError, match=message):
        budgetopt.fit(model, sample, **named)
    assert budgetopt.plan_of(model) is None
