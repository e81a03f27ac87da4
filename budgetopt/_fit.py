"""The main path: profile → solve → apply → verify, and what goes with it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from budgetopt import _apply, _device, _fingerprint
from budgetopt._arguments import CHOICES, choices, function, headroom_bytes, layers, number, plan_path
from budgetopt._errors import OverBudgetError, PlanMismatchError
from budgetopt._fixed import Resident, device_of, optimizer_bytes, require_plannable
from budgetopt._plan import Plan, Verification
from budgetopt._profile import profile
from budgetopt._report import fit_line
from budgetopt._schema import Profile
from budgetopt._solve import solve, solver_options
from budgetopt._state import random_states, restore_random, untouched
from budgetopt._step import Step
from budgetopt._units import parse_bytes, show_bytes
from budgetopt._verify import gradient_error, prove, run_once

Model = TypeVar("Model", bound=torch.nn.Module)
ROUNDS = 3
"""Plans tried at most: the first, and one more per correction by what running it showed."""


@dataclass
class _Job:
    """Everything that `fit` was asked for."""

    model: torch.nn.Module
    how: Step
    budget: int
    headroom: int
    optimizer: Any
    allow: tuple[str, ...]
    exclude: tuple[str, ...]
    solver: dict[str, Any]
    max_grad_error: float
    tell: Callable[[str], None]
    notes: list[str] = field(default_factory=list)
    kept: set[tuple[int, int]] = field(default_factory=set)
    excess: int = 0


def fit(
    model: Model,
    sample: Any,
    budget: int | str,
    *,
    step: Callable[[Any, Any], torch.Tensor] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: Any = "adamw",
    allow: Iterable[str] = CHOICES,
    exclude: Iterable[str] = (),
    plan: str | os.PathLike[str] | None = None,
    solver: str = "auto",
    backend: str = "auto",
    time_limit: float = 10.0,
    gap: float = 0.01,
    verify: bool = True,
    headroom: int | str = 0,
    max_grad_error: float = 1e-2,
    progress: Callable[[str], None] | None = None,
) -> Model:
    """Make `model` train under `budget`, in place, at the least cost in time; returns the same object.

    Args:
        model: a live model on one device, in the mode it trains in.
        sample: a batch of the shape you train on: Tensor → ``model(x)``, tuple or list → ``model(*x)``,
            mapping → ``model(**x)``, anything else → ``model(x)``.
        budget: bound of the peak of a whole training step on the model's device: ``"8GB"``, ``"8GiB"``, bytes,
            ``"80%"`` of the device, ``"free"``. Parameters, buffers, gradients, optimizer state, sample,
            activations and temporaries all count.
        step: ``step(model, sample) -> scalar loss``, for whatever a loss on the output can't express.
        loss: ``loss(output) -> scalar``; by default ``output.loss`` or ``output["loss"]``, else the sum of the
            means of the outputs that require grad.
        optimizer: an instance (its state is measured or derived), a name such as ``"adamw"`` or
            ``"sgd+momentum"`` (reserved), or None (nothing reserved).
        allow: choices that may be made; without ``"fp16"`` gradients are bit for bit as before.
        exclude: paths of modules (as in ``named_modules``) that are left alone.
        plan: path of a JSON file; made if missing, used if it fits, never overwritten if it belongs elsewhere.
        solver, backend, time_limit (seconds), gap (0 to 1): see :func:`budgetopt.solve`.
        verify: run the plan: prove every replayed value, measure the peak and fp16's error.
        headroom: bytes, or a percentage of the budget, taken off first.
        max_grad_error: bound of ‖g - g*‖ ÷ ‖g*‖ for plans with fp16, at least 0; infinity is no bound.
        progress: called with a short text as each stage begins.

    Raises:
        InvalidBudgetError, InfeasibleBudgetError, ProfileError, SolverError, PlanMismatchError,
        OverBudgetError, and BudgetOptError for other arguments: each says what to do; the model is then as it was.
    """
    device = device_of(model)
    require_plannable(model)
    function(progress, "progress", "progress(text)")
    kind = _device.backend(device)
    limit = parse_bytes(budget, total=kind.total(device), free=kind.free(device))
    job = _Job(
        model=model,
        how=Step(sample, loss, step),
        budget=limit,
        headroom=headroom_bytes(headroom, limit),
        optimizer=optimizer,
        allow=choices(allow),
        exclude=layers(exclude, [path for path, _ in model.named_modules()]),
        solver=solver_options(solver, backend, time_limit, gap),
        max_grad_error=number(max_grad_error, "max_grad_error", "a number of at least 0", 0.0),
        tell=progress or (lambda text: None),
    )
    path = plan_path(plan)
    saved = _saved_plan(job, path, sample)
    before = _apply.installed(model)
    try:
        with untouched(model, sample):
            made = _reuse(job, saved, sample, verify) if saved is not None else None
            reused = made is not None
            if made is None:
                made = _make(job, saved.profile if saved is not None else _profile(job), verify)
            _put(model, made)
        line = fit_line(made, reused=reused, notes=job.notes)
        if path is not None and (not reused or made is not saved):
            made.save(path)
        print(line, file=sys.stderr)
    except BaseException:
        _apply.uninstall(model)
        if before is not None:
            _apply.install(model, before.plan, before.regions.values())
        raise
    return model


# -- the stages --------------------------------------------------------------------------------------


def _profile(job: _Job) -> Profile:
    job.tell("profiling one step")
    found = profile(job.model, job.how.sample, step=job.how.step, loss=job.how.loss, optimizer=job.optimizer)
    if found.loss_guessed:
        job.notes.append("the loss was guessed from the output, its own memory is not counted")
    return found


def _make(job: _Job, found: Profile, verify: bool) -> Plan:
    """Solve, run, correct: until the plan that runs is right and within the budget."""
    for _ in range(ROUNDS):
        job.tell("solving")
        plan = solve(
            found,
            job.budget,
            allow=job.allow,
            exclude=job.exclude,
            headroom=job.headroom,
            kept=job.kept,
            excess=job.excess,
            **job.solver,
        )
        if not verify:
            return plan
        verified = _verify(job, found, plan)
        if verified is not None:
            return plan.model_copy(update={"measured": verified})
    raise OverBudgetError(
        f"the planned step still does not hold {show_bytes(job.budget)} after {ROUNDS} plans; "
        "set headroom= or a larger budget",
        job.budget + job.excess,
    )


def _verify(job: _Job, found: Profile, plan: Plan) -> Verification | None:
    """Run the plan; None if it must be solved again, with what was learned noted in `job`."""
    job.tell("verifying")
    _put(job.model, plan)
    resident = Resident(job.model, job.how.sample)
    states = random_states()
    proof = prove(job.model, job.how, resident)
    if proof.differing or proof.broken:
        _keep_what_differs(job, found, proof.differing, proof.broken)
        return None
    restore_random(states)
    run = run_once(job.model, job.how, resident, found.fixed.optimizer)
    if run.peak > job.budget - job.headroom:
        over = run.peak - plan.predicted.peak_bytes
        if not plan.drops or job.excess >= over > 0:
            _too_much(job, run.peak)
        job.excess += max(over, run.peak - (job.budget - job.headroom))
        return None
    error = _fp16_error(job, found, plan, resident)
    if error is not None and error > job.max_grad_error:
        job.notes.append(f"fp16 left out: gradient error {error:.1e} is over max_grad_error={job.max_grad_error:g}")
        job.allow = tuple(choice for choice in job.allow if choice != "fp16")
        return None
    return Verification(
        peak_bytes=run.peak,
        step_ns=run.ns,
        values_proven=proof.proven,
        values_kept_after_proof=tuple(found.operators[i].name for i, _ in sorted(job.kept)),
        grad_error=error,
    )


def _too_much(job: _Job, peak: int) -> None:
    raise OverBudgetError(
        f"the planned step was run and took {show_bytes(peak)}, over the budget of {show_bytes(job.budget)}; "
        "set headroom= or a larger budget",
        peak,
    )


def _keep_what_differs(
    job: _Job, found: Profile, differing: list[tuple[str, int, int, int]], broken: list[str]
) -> None:
    numbers = {(record.path, record.call): record for record in found.regions}
    for path, call, position, slot in differing:
        job.kept.add((numbers[path, call].operators[position], slot))
    for record in found.regions:
        if record.path in broken:
            job.kept.update((i, slot) for i in record.operators for slot, _ in found.operators[i].slots)
    job.notes.append(f"{len(differing)} values kept, replaying them did not give the same bits")
    if broken:
        job.notes.append(f"kept whole, can't be recorded: {', '.join(broken)}")


def _fp16_error(job: _Job, found: Profile, plan: Plan, resident: Resident) -> float | None:
    if not any(d.choice == "fp16" for region in plan.regions for d in region.decisions):
        return None
    job.tell("measuring the error of fp16")
    exact = plan.model_copy(update={"regions": tuple(r.exact() for r in plan.regions)})
    return gradient_error(job.model, job.how, resident, exact, plan)


def _put(model: torch.nn.Module, plan: Plan) -> None:
    _apply.install(model, plan, _apply.regions_of(plan))


# -- saved plans -------------------------------------------------------------------------------------


def _saved_plan(job: _Job, path: Path | None, sample: Any) -> Plan | None:
    if path is None:
        return None
    if not path.exists():
        return None
    saved = Plan.load(path)
    now = _fingerprint.take(job.model, sample)
    try:
        _fingerprint.require_match(saved.fingerprint, None, now)
    except PlanMismatchError:
        _fingerprint.require_match(saved.fingerprint, saved.profile.fingerprint, now)
    return saved


def _reuse(job: _Job, saved: Plan, sample: Any, verify: bool) -> Plan | None:
    """The saved plan if it answers the same question; verified again where the surroundings differ."""
    asked = (job.budget, job.headroom, tuple(c for c in CHOICES if c in {*job.allow, "keep"}), job.exclude)
    if asked != (saved.budget_bytes, saved.headroom_bytes, saved.allow, saved.exclude):
        return None
    now = _fingerprint.take(job.model, sample)
    resident = Resident(job.model, sample)
    same = (
        not _fingerprint.differs(saved.fingerprint, now)
        and saved.environment == _fingerprint.environment(resident.device, resident.gradient > 0)
        and saved.profile_optimizer == optimizer_bytes(job.model, job.optimizer)
    )
    if same and (saved.measured is not None or not verify):
        return saved
    if not verify:
        return saved
    verified = _verify(job, saved.profile, saved)
    return None if verified is None else saved.model_copy(update={"measured": verified})
