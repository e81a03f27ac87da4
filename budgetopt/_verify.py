"""Run a plan and see: every replayed value bit for bit, then the peak, then fp16's error on the gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from budgetopt import _apply, _device
from budgetopt._fixed import Resident
from budgetopt._plan import Plan
from budgetopt._slices import highest
from budgetopt._state import fresh_gradients, random_states, restore_random
from budgetopt._step import Step


@dataclass
class Run:
    """One measured step. `peak` and `curve`, the bytes over the step, include the resident ones."""

    peak: int
    ns: int
    reserved: int
    loss: float
    curve: tuple[int, ...] = ()


@dataclass
class Proof:
    """What a verifying step found.

    Attributes:
        proven: values compared. differing: (path, call, operator's position, slot) of those that were not
            the dropped ones. broken: paths of regions where recording gave up.
    """

    proven: int
    differing: list[tuple[str, int, int, int]]
    broken: list[str]


def run_once(
    model: torch.nn.Module,
    how: Step,
    resident: Resident,
    reserve: int,
    limit: int | None = None,
    pending: int = 0,
    workspace: int = 0,
) -> Run:
    """One step of the model as it is, measured. Gradients start as `resident` found them.

    Args:
        reserve: bytes of the optimizer's state, `pending` of them not there yet.
        limit: bytes that the device's allocator must do with, where it can be told so; a step that dies of it
            has a peak over `limit`.
        workspace: bytes that the optimizer's step needs on top of what this one leaves: it is added, not run.
    """
    fresh_gradients(resident.without)
    kind, device = _device.backend(resident.device), resident.device
    fixed = resident.fixed(reserve).total
    loss = math.nan
    with kind.capped(device, None if limit is None else limit - pending) as died, kind.meter(device, False) as peak:
        loss = float(how.run(model))
    fresh_gradients(resident.without)
    above = fixed + max(peak.above, peak.left + workspace)
    return Run(
        peak=max(above, limit + 1) if died and limit is not None else above,
        ns=peak.ns,
        reserved=peak.reserved,
        loss=loss,
        curve=tuple(fixed + level for level in highest([*peak.sizes, workspace, -workspace])) if peak.sizes else (),
    )


def prove(model: torch.nn.Module, how: Step, resident: Resident) -> Proof:
    """One step in which every value that is made again is compared with what was dropped."""
    found = _apply.installed(model)
    regions = list(found.regions.values()) if found is not None else []
    fresh_gradients(resident.without)
    for region in regions:
        region.verify, region.watched, region.next_call = True, [], 0
        region.counters.proven = 0
    try:
        how.run(model)
        return Proof(
            proven=sum(region.counters.proven for region in regions),
            differing=[
                (region.path, call, index, slot)
                for region in regions
                for call, record in region.watched
                for index, slot in sorted(record.failures)
            ],
            broken=[region.path for region in regions if region.counters.broken],
        )
    finally:
        fresh_gradients(resident.without)
        for region in regions:
            region.verify, region.watched, region.next_call = False, [], 0


def gradient_error(model: torch.nn.Module, how: Step, resident: Resident, exact: Plan, plan: Plan) -> float:
    """‖g - g*‖ ÷ ‖g*‖ over all parameters together: g under `plan`, g* under `exact`, same random state.

    What is not finite in both is left out; what is so in one alone is an infinite error. `plan` is installed
    afterwards. Both gradients are compared on the host in double precision.
    """
    states = random_states(model)
    reference = _gradients(model, how, resident, exact, states)
    measured = _gradients(model, how, resident, plan, states)
    pairs = list(zip(measured, reference, strict=True))
    if any(not torch.equal(g.isfinite(), r.isfinite()) for g, r in pairs):
        return math.inf
    off = sum(_squares(g.double() - r.double()) for g, r in pairs)
    norm = sum(_squares(r.double()) for r in reference)
    return float((off / norm) ** 0.5) if norm else float(off > 0)


def _gradients(model: torch.nn.Module, how: Step, resident: Resident, plan: Plan, states: Any) -> list[torch.Tensor]:
    restore_random(states)
    _apply.install(model, plan, _apply.regions_of(plan, quiet=True))
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    fresh_gradients(resident.without)
    how.run(model)
    found = [_real(p.grad.detach().to("cpu", copy=True)) for p in model.parameters() if p.grad is not None]
    fresh_gradients(resident.without)
    return found


def _real(gradient: torch.Tensor) -> torch.Tensor:
    """The same numbers as a dense tensor of real ones: it may be sparse, or complex."""
    dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


def _squares(numbers: torch.Tensor) -> float:
    """Their sum, over the finite ones."""
    return float(numbers.nan_to_num_(0.0, 0.0, 0.0).square().sum())
