"""Act on the live model without planning: install a plan, take it off, look at it, measure real steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from budgetopt import _apply, _device, _fingerprint
from budgetopt._errors import BudgetOptError, BudgetOptWarning
from budgetopt._fixed import Resident, device_of, require_module
from budgetopt._optimizer import state_bytes
from budgetopt._plan import Plan
from budgetopt._schema import Measurement
from budgetopt._state import untouched
from budgetopt._step import Step
from budgetopt._units import show_bytes
from budgetopt._verify import run_once

Model = TypeVar("Model", bound=torch.nn.Module)


def apply(model: Model, plan: Plan) -> Model:
    """Install a plan on a model that it was made for, without running anything; returns the model.

    Warns where the plan stores values in fp16 and was not measured: what such values are made of may be held longer
    than predicted.

    Raises:
        BudgetOptError: it is no plan, or no module. PlanMismatchError: the plan is for another module tree or
            other parameters.
    """
    require_module(model)
    if not isinstance(plan, Plan):
        raise BudgetOptError(f"plan={plan!r} is no Plan: read a file with budgetopt.Plan.load(path)")
    now = _fingerprint.take(model, None)
    _fingerprint.require_match(
        plan.fingerprint, plan.profile.fingerprint, {**now, "sample": None}, parts=("modules", "parameters")
    )
    _apply.install(model, plan, _apply.regions_of(plan))
    if plan.halves and plan.measured is None:
        warnings.warn(
            f"budgetopt: this plan stores values in fp16 and was not measured, so its peak may be over the "
            f"{show_bytes(plan.predicted.peak_bytes)} predicted: budgetopt.fit measures, or use budgetopt.measure",
            BudgetOptWarning,
            stacklevel=2,
        )
    return model


def remove(model: Model) -> Model:
    """Undo :func:`fit` or :func:`apply` exactly; returns the model.

    Raises:
        BudgetOptError: nothing is installed on it, or it is no module.
    """
    require_module(model)
    if not _apply.uninstall(model):
        raise BudgetOptError("there is no plan on this model to remove: fit or apply one first")
    return model


def plan_of(model: torch.nn.Module) -> Plan | None:
    """The plan that is in force on `model`, or None."""
    require_module(model)
    found = _apply.installed(model)
    return None if found is None else found.plan


def measure(
    model: torch.nn.Module,
    sample: Any,
    *,
    step: Callable[[Any, Any], torch.Tensor] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: Any = None,
    steps: int = 3,
) -> Measurement:
    """Run real steps of `model` as it is, planned or plain, and measure them; leaves no trace.

    Returns:
        peak of forward and backward (bytes, resident included, largest of the steps) and the median step time.

    Raises:
        ProfileError: the model can't be run or measured. BudgetOptError: `steps` is less than 1.
    """
    if not isinstance(steps, int) or steps < 1:
        raise BudgetOptError(f"steps={steps!r}: give the number of steps to run, at least 1")
    device_of(model)
    how = Step(sample, loss, step)
    with untouched(model, sample):
        resident = Resident(model, sample)
        reserve = state_bytes(model, optimizer)
        runs = [run_once(model, how, resident, reserve) for _ in range(steps)]
    times = sorted(run.ns for run in runs)
    return Measurement(
        peak_bytes=max(run.peak for run in runs),
        resident_bytes=resident.fixed(reserve).total,
        step_ns=times[len(times) // 2],
        reserved_bytes=max(run.reserved for run in runs),
        context_bytes=_device.backend(resident.device).context(resident.device),
        losses=tuple(run.loss for run in runs),
    )
