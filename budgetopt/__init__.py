"""Make a live PyTorch model train under a memory budget at the least cost in time.

``budgetopt.fit(model, sample, budget="8GB")``; see :func:`fit`. Names load when they are asked for, so
that ``import budgetopt.solvers`` needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from budgetopt._errors import (
        BudgetOptError,
        BudgetOptWarning,
        InfeasibleBudgetError,
        InvalidBudgetError,
        OverBudgetError,
        PlanMismatchError,
        ProfileError,
        SolverError,
    )
    from budgetopt._findings import Finding, Waste
    from budgetopt._fit import fit
    from budgetopt._fits import Fits, fits
    from budgetopt._frontier import frontier
    from budgetopt._gain import Gain, gain
    from budgetopt._inspect import Inspection, inspect
    from budgetopt._live import apply, measure, plan_of, remove
    from budgetopt._plan import Plan
    from budgetopt._profile import profile
    from budgetopt._schema import FrontierPoint, Measurement, Profile
    from budgetopt._solve import solve
    from budgetopt._usage import Usage, usage

_WHERE = {
    "fit": "_fit",
    "fits": "_fits",
    "frontier": "_frontier",
    "gain": "_gain",
    "inspect": "_inspect",
    "usage": "_usage",
    "profile": "_profile",
    "solve": "_solve",
    "apply": "_live",
    "remove": "_live",
    "plan_of": "_live",
    "measure": "_live",
    "Plan": "_plan",
    "Profile": "_schema",
    "Measurement": "_schema",
    "FrontierPoint": "_schema",
    "Fits": "_fits",
    "Gain": "_gain",
    "Usage": "_usage",
    "Finding": "_findings",
    "Waste": "_findings",
    "Inspection": "_inspect",
    "BudgetOptError": "_errors",
    "BudgetOptWarning": "_errors",
    "InfeasibleBudgetError": "_errors",
    "InvalidBudgetError": "_errors",
    "OverBudgetError": "_errors",
    "PlanMismatchError": "_errors",
    "ProfileError": "_errors",
    "SolverError": "_errors",
}

__all__ = [
    "BudgetOptError",
    "BudgetOptWarning",
    "Finding",
    "Fits",
    "FrontierPoint",
    "Gain",
    "InfeasibleBudgetError",
    "Inspection",
    "InvalidBudgetError",
    "Measurement",
    "OverBudgetError",
    "Plan",
    "PlanMismatchError",
    "Profile",
    "ProfileError",
    "SolverError",
    "Usage",
    "Waste",
    "apply",
    "fit",
    "fits",
    "frontier",
    "gain",
    "inspect",
    "measure",
    "plan_of",
    "profile",
    "remove",
    "solve",
    "usage",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        try:
            return version("budgetopt")
        except PackageNotFoundError:
            return "0.1.0"
    if name not in _WHERE:
        raise AttributeError(f"module 'budgetopt' has no attribute {name!r}")
    return getattr(import_module(f"budgetopt.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
