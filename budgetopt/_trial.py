"""Run a plan on the live model and judge it: right, within the budget, fp16's error within its bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from budgetopt import _apply
from budgetopt._errors import OverBudgetError
from budgetopt._fixed import Resident, device_of
from budgetopt._out_of_memory import is_out_of_memory, let_go
from budgetopt._plan import Plan, Verification
from budgetopt._schema import Profile
from budgetopt._state import random_states, restore_random, untouched
from budgetopt._step import Step
from budgetopt._units import show_bytes
from budgetopt._verify import Proof, Run, gradient_error, prove, run_once

DEATH: Final = 0.05
"""Share of the budget that the next plan goes without, where running one died of memory: nobody knows by how much."""


@dataclass
class Job:
    """Everything that `fit` was asked for, and what trials have taught so far.

    Attributes:
        steps: one per sample; `profiled` is the number of the one that the profile was taken with, if known.
        notes: what the line that `fit` prints shall say. kept: (operator, slot) of values that must be kept.
        excess: bytes by which a plan, when run, was over its prediction. between: what layers hand to each other may be
            in fp16.
    """

    model: torch.nn.Module
    steps: list[Step]
    budget: int
    headroom: int
    optimizer: Any
    allow: tuple[str, ...]
    exclude: tuple[str, ...]
    solver: dict[str, Any]
    max_grad_error: float
    tell: Callable[[str], None]
    profiled: int | None = 0
    notes: list[str] = field(default_factory=list)
    kept: set[tuple[int, int]] = field(default_factory=set)
    excess: int = 0
    between: bool = True

    @property
    def samples(self) -> list[Any]:
        """The first is the one that plans are bound to."""
        return [how.sample for how in self.steps]

    def pending(self, found: Profile) -> int:
        """Bytes of the optimizer's state that are counted, but not there yet: its first step makes them."""
        there = isinstance(self.optimizer, torch.optim.Optimizer) and self.optimizer.state
        return 0 if there else found.fixed.optimizer

    @property
    def limit(self) -> int:
        """Bytes that a step may take."""
        return self.budget - self.headroom


def verify(job: Job, found: Profile, plan: Plan) -> Verification | None:
    """Run the plan on every sample; None if it must be solved again, with what was learned noted in `job`.

    Raises:
        OverBudgetError: no other plan would help.
    """
    job.tell("verifying")
    try:
        with untouched(job.model, job.samples):
            return _verify(job, found, plan)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    let_go(device_of(job.model))  # here the error is gone, and with it the tensors that its traceback held
    job.excess += round(DEATH * job.limit)
    return None


def _verify(job: Job, found: Profile, plan: Plan) -> Verification | None:
    states = random_states(job.model)
    runs, proven = [], 0
    for number, how in enumerate(job.steps):
        resident = Resident(job.model, how.sample)
        restore_random(states)
        # Replays that read rounded values don't make what was dropped: there, they are proven with exact ones.
        proven_plan = plan.exact() if plan.rounds_between else plan
        _apply.install(job.model, proven_plan, _apply.regions_of(proven_plan, quiet=True))
        proof = prove(job.model, how, resident)
        if proof.differing or proof.broken:
            _keep_what_differs(job, found, proof, known=number == job.profiled)
            return None
        proven += proof.proven
        if proven_plan is not plan:
            _apply.install(job.model, plan, _apply.regions_of(plan, quiet=True))
        restore_random(states)
        runs.append(
            run_once(
                job.model,
                how,
                resident,
                found.fixed.optimizer,
                job.limit,
                pending=job.pending(found),
                workspace=found.optimizer_workspace,
            )
        )
    worst = max(runs, key=lambda run: run.peak)
    if worst.peak > job.limit:
        _note_excess(job, plan, worst)
        return None
    error = _fp16_error(job, plan, runs.index(worst))
    if error is not None and error > job.max_grad_error:
        _without_fp16(job, plan, error)
        return None
    return Verification(
        peak_bytes=worst.peak,
        reserved_bytes=worst.reserved,
        step_ns=worst.ns,
        values_proven=proven,
        values_kept_after_proof=tuple(found.operators[i].name for i, _ in sorted(job.kept)),
        grad_error=error,
        curve=worst.curve,
    )


def _without_fp16(job: Job, plan: Plan, error: float) -> None:
    """Try without what costs most precision: rounded inputs of replays, then all of fp16."""
    what = "fp16 between layers" if plan.rounds_between else "fp16"
    job.notes.append(f"{what} left out: gradient error {error:.1e} is over max_grad_error={job.max_grad_error:g}")
    if plan.rounds_between:
        job.between = False
    else:
        job.allow = tuple(choice for choice in job.allow if choice != "fp16")


def _note_excess(job: Job, plan: Plan, run: Run) -> None:
    over = run.peak - plan.predicted.peak_bytes
    if not plan.drops or job.excess >= over > 0:
        raise OverBudgetError(
            f"the planned step was run and took {show_bytes(run.peak)}, over the budget of {show_bytes(job.budget)}; "
            "set headroom= or a larger budget",
            run.peak,
        )
    job.excess += max(over, run.peak - job.limit)


def _keep_what_differs(job: Job, found: Profile, proof: Proof, *, known: bool) -> None:
    """Keep the values that a replay did not make right; the whole region where `found` is not of this sample."""
    numbers = {(record.path, record.call): record for record in found.regions}
    broken = set(proof.broken)
    for path, call, position, slot in proof.differing:
        if known:
            job.kept.add((numbers[path, call].operators[position], slot))
        else:
            broken.add(path)
    for record in found.regions:
        if record.path in broken:
            job.kept.update((i, slot) for i in record.operators for slot, _ in found.operators[i].slots)
    if proof.differing:
        job.notes.append(f"{len(proof.differing)} values kept, replaying them did not give the same bits")
    if broken:
        job.notes.append(f"kept whole, can't be recorded: {', '.join(sorted(broken))}")


def _fp16_error(job: Job, plan: Plan, number: int) -> float | None:
    if not plan.halves:
        return None
    job.tell("measuring the error of fp16")
    how = job.steps[number]
    return gradient_error(job.model, how, Resident(job.model, how.sample), plan.exact(), plan)
