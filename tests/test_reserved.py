"""Plans for CUDA say what the caching allocator would reserve: here from profiles of the CPU, said to be CUDA's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import budgetopt
from budgetopt import Plan, Profile
from budgetopt._plan import Verification
from budgetopt._problem import keep_all, to_problem
from budgetopt._report import fit_line
from budgetopt._reserved import reserved_bytes
from budgetopt.solvers import Choice
from tests.models import mlp_stack

MIB = 1 << 20
EXACT = ("keep", "recompute")


def on_cuda(profile: Profile) -> Profile:
    return profile.model_copy(update={"environment": profile.environment.model_copy(update={"device": "cuda"})})


def half_way(profile: Profile) -> int:
    return (profile.fixed.total + profile.peak_bytes) // 2


@pytest.fixture(scope="module")
def profile() -> Profile:
    return budgetopt.profile(*mlp_stack(depth=6, width=64, batch=2048))


def test_a_plan_for_cuda_says_what_is_reserved(profile: Profile) -> None:
    plan = budgetopt.solve(on_cuda(profile), half_way(profile), allow=EXACT)
    least, most = plan.predicted.peak_bytes, profile.peak_bytes
    assert least <= plan.predicted.reserved_bytes < most + 40 * MIB
    assert f"the allocator reserves about {plan.predicted.reserved_bytes / 1e6:.1f} MB" in str(plan)
    assert "reserved by the allocator" in fit_line(plan, reused=False, notes=[])
    measured = Verification(peak_bytes=least, reserved_bytes=50_000_000, step_ns=1, values_proven=0)
    line = fit_line(plan.model_copy(update={"measured": measured}), reused=False, notes=[])
    assert f"the allocator reserved 50.0 MB (predicted {plan.predicted.reserved_bytes / 1e6:.1f} MB)" in line


def test_elsewhere_nothing_is_said(profile: Profile) -> None:
    plan = budgetopt.solve(profile, half_way(profile), allow=EXACT)
    assert plan.predicted.reserved_bytes == 0
    assert "reserve" not in str(plan) and "reserve" not in fit_line(plan, reused=False, notes=[])


def test_plans_of_older_versions_can_be_read(profile: Profile, tmp_path: Path) -> None:
    plan = budgetopt.solve(on_cuda(profile), half_way(profile), allow=EXACT)
    old = json.loads(plan.model_dump_json())
    del old["predicted"]["reserved_bytes"]
    (tmp_path / "old.json").write_text(json.dumps(old))
    read = Plan.load(tmp_path / "old.json")
    assert read.predicted.reserved_bytes == 0 and "reserve" not in str(read)
    profiled = json.loads(profile.model_dump_json())
    del profiled["optimizer_workspace"], profiled["optimizer_kind"]
    assert Profile.model_validate(profiled).optimizer_workspace == 0


def test_resident_tensors_are_blocks_of_their_own() -> None:
    """Three parameters of 7 MiB in segments of 20: two fit into each, and as much as the optimizer asks for besides."""
    model = nn.ModuleList(nn.Linear(1, 7 * MIB // 4, bias=False) for _ in range(3))

    def step(model: nn.Module, sample: torch.Tensor) -> torch.Tensor:
        return torch.stack([p.sum() for p in model.parameters()]).sum() * sample.sum()

    found = {}
    for name in ("sgd", "sgd+momentum", "adamw"):
        profile = on_cuda(budgetopt.profile(model, torch.ones(1), step=step, optimizer=name))
        problem = to_problem(profile, 0)
        keep = [Choice.KEEP] * len(problem.values)
        found[name] = reserved_bytes(profile, problem, keep)
        assert found[name] >= keep_all(profile).peak
    # Parameters and gradients of 7 MiB, two in a segment of 20, and one small segment: momentum adds three more.
    assert found["sgd"] == 3 * 20 * MIB + 2 * MIB
    assert found["sgd+momentum"] == 5 * 20 * MIB + 2 * MIB
    # Nine residents, and numbers of steps in the small segment; three gradients; the step takes three blocks on top.
    assert found["adamw"] == 8 * 20 * MIB + 2 * MIB
