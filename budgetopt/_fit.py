"""The main path: profile → solve → apply → verify, and what goes with it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from budgetopt import _apply, _device, _fingerprint, _saved, _trial, _watch
from budgetopt._arguments import (
    CHOICES,
    choices,
    function,
    further_samples,
    headroom_bytes,
    layers,
    number,
    plan_path,
)
from budgetopt._errors import BudgetOptError, OverBudgetError
from budgetopt._fixed import device_of, require_plannable
from budgetopt._optimizer import bytes_there
from budgetopt._plan import Plan
from budgetopt._profile import profile
from budgetopt._regions import uncompiled
from budgetopt._report import fit_line, scaled_note
from budgetopt._schema import Profile
from budgetopt._solve import solve, solver_options
from budgetopt._step import Step
from budgetopt._trial import Job
from budgetopt._units import parse_bytes, show_bytes

Model = TypeVar("Model", bound=torch.nn.Module)
ROUNDS = 4
"""Plans tried at most: the first, and one more per correction by what running it showed."""


def fit(
    model: Model,
    sample: Any,
    budget: int | str,
    *,
    samples: Iterable[Any] = (),
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
    watch: bool = False,
    replan: bool = False,
) -> Model:
    """Make `model` train under `budget`, in place, at the least cost in time; returns the same object.

    Args:
        model: a live model on one device, in the mode it trains in.
        sample: a batch of the shape you train on: Tensor → ``model(x)``, tuple or list → ``model(*x)``,
            mapping → ``model(**x)``, anything else → ``model(x)``.
        budget: bound of the peak of a whole training step on the model's device: ``"8GB"``, ``"8GiB"``, bytes,
            ``"80%"`` of the device, ``"free"`` (what is free now and what the step has there already).
            Parameters, buffers, gradients, optimizer state, sample, activations and temporaries all count.
        samples: further batches, of other sizes say: the plan is made for the one that takes most, and tried on all.
        step: ``step(model, sample) -> scalar loss``, for whatever a loss on the output can't express.
        loss: ``loss(output) -> scalar``; by default ``output.loss`` or ``output["loss"]``, else the sum of the
            means of the outputs that require grad.
        optimizer: an instance or a name such as ``"adamw"`` or ``"sgd+momentum"``: its state is reserved and its step
            counted; None: nothing is.
        allow: choices that may be made; without ``"fp16"`` gradients are bit for bit as before.
        exclude: paths of modules (as in ``named_modules``) that are left alone.
        plan: path of a JSON file; made if missing, used if it fits, never overwritten if it belongs elsewhere.
        solver, backend, time_limit (seconds), gap (0 to 1): see :func:`budgetopt.solve`.
        verify: run the plan: prove every replayed value, measure the peak and fp16's error.
        headroom: bytes, or a percentage of the budget, taken off first.
        max_grad_error: bound of ‖g - g*‖ ÷ ‖g*‖ for plans with fp16, at least 0; infinity is no bound.
        progress: called with a short text as each stage begins.
        watch: while the model trains, look at the real peak of the second step and of one in 50 after that, and warn
            once where it is over the budget; the other steps cost nothing.
        replan: where it is over, fit again, on the batch that is there, with everything else as here (watches as well).
            Not with ``step=``, whose sample is not known then.

    Raises:
        InvalidBudgetError, InfeasibleBudgetError, ProfileError, SolverError, PlanMismatchError,
        OverBudgetError, and BudgetOptError for other arguments: each says what to do; the model is then as it was.
    """
    device = device_of(model)
    require_plannable(model)
    function(progress, "progress", "progress(text)")
    total, free = _device.backend(device).total(device), _free(model, sample, optimizer)
    limit = parse_bytes(budget, total=total, free=free)
    job = Job(
        model=model,
        steps=[Step(each, loss, step) for each in (sample, *further_samples(samples))],
        budget=limit,
        headroom=headroom_bytes(headroom, limit),
        optimizer=optimizer,
        allow=choices(allow),
        exclude=layers(exclude, [path for path, _ in model.named_modules()]),
        solver=solver_options(solver, backend, time_limit, gap),
        max_grad_error=number(max_grad_error, "max_grad_error", "a number of at least 0", 0.0),
        tell=progress or (lambda text: None),
    )
    if replan and step is not None:
        raise BudgetOptError(
            "replan=True has only the model's arguments to plan with, and step= takes a sample: use loss="
        )
    again = None
    if replan:
        again = _watch.anew(
            fit,
            optimizer,
            budget=limit,
            loss=loss,
            allow=job.allow,
            exclude=job.exclude,
            **job.solver,
            verify=verify,
            max_grad_error=job.max_grad_error,
        )
    path = plan_path(plan)
    saved = _saved.find(job, path)
    before = _apply.installed(model)
    try:
        made = _plan(job, saved, verify)
        regions = _apply.regions_of(made)
        if watch or replan:
            regions = _watch.watched(regions, _watch.Watch(made, optimizer, again))
        _apply.install(model, made, regions)
        job.notes += _said_of(model, made)
        reused = saved is not None and made.regions == saved.plan.regions
        line = fit_line(made, reused=reused, notes=job.notes)
        if path is not None and (saved is None or made is not saved.plan):
            made.save(path)
        print(line, file=sys.stderr)
    except BaseException:
        _apply.uninstall(model)
        if before is not None:
            _apply.install(model, before.plan, before.regions.values())
        raise
    return model


def _said_of(model: torch.nn.Module, plan: Plan) -> list[str]:
    """What else is in the model that saves memory or time, and how a plan bears with it."""
    said = []
    if any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()):
        said.append("the model's own gradient checkpointing is on: turned off, all of it can be planned")
    inside = uncompiled(model, dict.fromkeys(region.path for region in plan.regions))
    if inside:
        said.append(f"compiled functions run uncompiled in planned layers: {', '.join(inside)}")
    return said


def _free(model: torch.nn.Module, sample: Any, optimizer: Any) -> int | None:
    """What a whole step may take: the bytes that are free now, and those of its own that are there already."""
    device = device_of(model)
    free = _device.backend(device).free(device)
    return None if free is None else free + bytes_there(model, sample, optimizer)


# -- the stages --------------------------------------------------------------------------------------


def _plan(job: Job, saved: _saved.Saved | None, verified: bool) -> Plan:
    """The saved plan if it will do, else another from its profile, else everything anew."""
    found = saved.reuse(job, verified=verified) if saved is not None else None
    if found is not None:
        return found
    known = saved.profile if saved is not None else None
    return _make(job, _profile(job) if known is None else known, verified)


def _profile(job: Job) -> Profile:
    """Of the sample whose plain step takes most; bound to all of them."""
    profiles = []
    for how in job.steps:
        job.tell("profiling one step")
        profiles.append(profile(job.model, how.sample, step=how.step, loss=how.loss, optimizer=job.optimizer))
    worst = max(profiles, key=lambda found: found.peak_bytes)
    job.profiled = profiles.index(worst)
    if worst.loss_guessed:
        job.notes.append("the loss was guessed from the output, its own memory is not counted")
    if worst.scaled_from:
        job.notes.append(scaled_note(worst))
    return worst.model_copy(update={"fingerprint": _fingerprint.take(job.model, *job.samples)})


def _make(job: Job, found: Profile, verified: bool) -> Plan:
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
            between=job.between,
            **job.solver,
        )
        if not verified:
            return plan
        measured = _trial.verify(job, found, plan)
        if measured is not None:
            return plan.model_copy(update={"measured": measured})
    raise OverBudgetError(
        f"the planned step still does not hold {show_bytes(job.budget)} after {ROUNDS} plans; "
        "set headroom= or a larger budget",
        job.budget + job.excess,
    )
