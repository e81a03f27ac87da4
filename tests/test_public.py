"""The public names, and that they load without what they do not need."""

from __future__ import annotations

import subprocess
import sys

import budgetopt

NAMES = [
    "BudgetOptError", "BudgetOptWarning", "Finding", "Fits", "FrontierPoint", "Gain", "InfeasibleBudgetError",
    "Inspection", "InvalidBudgetError", "Measurement", "OverBudgetError", "Plan", "PlanMismatchError", "Profile",
    "ProfileError", "SolverError", "Usage", "Waste", "apply", "fit", "fits", "frontier", "gain", "inspect", "measure",
    "plan_of", "profile", "remove", "solve", "usage",
]  # fmt: skip


def test_public_names() -> None:
    assert sorted(budgetopt.__all__) == NAMES
    for name in NAMES:
        assert getattr(budgetopt, name).__module__.startswith("budgetopt")
        assert getattr(budgetopt, name).__doc__


def test_solvers_and_plans_need_no_torch() -> None:
    code = (
        "import sys, budgetopt, budgetopt.solvers; budgetopt.Plan; budgetopt.solve; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
