"""Plans as files: find the one that was saved, and say whether it answers the same question."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from budgetopt import _fingerprint
from budgetopt._arguments import CHOICES
from budgetopt._errors import OverBudgetError, PlanMismatchError
from budgetopt._fixed import Resident
from budgetopt._optimizer import Footprint, footprint
from budgetopt._plan import Plan
from budgetopt._problem import keep_all
from budgetopt._schema import Profile
from budgetopt._trial import Job, verify
from budgetopt._units import show_bytes

CLOSE = 1.05
"""A saved plan that fits is used as it is up to this many times its own budget: with more, a better one is solved."""


class Saved:
    """A saved plan that belongs to the model and the samples, and how far it holds here.

    Attributes:
        plan: as it was read. profile: its own, with the optimizer's bytes as they are now, or None if the
            surroundings are others, so that it must be taken again before solving.
    """

    def __init__(self, job: Job, plan: Plan, now: dict[str, object]) -> None:
        self.plan = plan
        resident = Resident(job.model, job.steps[0].sample)
        profile = plan.profile
        known = Footprint(profile.fixed.optimizer, profile.optimizer_workspace, profile.optimizer_kind)
        optimizer = footprint(job.model, job.optimizer, known)
        self._same_optimizer = optimizer[:2] == known[:2]
        self._same_place = not _fingerprint.differs(plan.fingerprint, now) and plan.environment == (
            _fingerprint.environment(resident.device, resident.gradient > 0)
        )
        self._updated = profile if self._same_optimizer else _with_optimizer(profile, optimizer)

    @property
    def profile(self) -> Profile | None:
        """What another budget can be solved from without measuring again."""
        return self._updated if self._same_place else None

    def reuse(self, job: Job, *, verified: bool) -> Plan | None:
        """The plan if it answers what was asked; run first (if `verified` is wanted) where the surroundings differ."""
        if not self._answers(job):
            return None
        if self._same_place and self._same_optimizer and (self.plan.measured is not None or not verified):
            return self.plan
        if not verified:
            return self.plan
        trial = replace(job, kept=set(), notes=[])  # what it teaches is of no use to another plan
        try:
            found = verify(trial, self._updated, self.plan)
        except OverBudgetError:
            return None
        return None if found is None else self.plan.model_copy(update={"measured": found})

    def _answers(self, job: Job) -> bool:
        """The same question, or a close one: a plan that needs less than the budget is simply used."""
        plan = self.plan
        allow = tuple(c for c in CHOICES if c in {*job.allow, "keep"})
        if (job.headroom, allow, job.exclude) != (plan.headroom_bytes, plan.allow, plan.exclude):
            return False
        if job.budget == plan.budget_bytes:
            return True
        peak = max(plan.predicted.peak_bytes, plan.measured.peak_bytes if plan.measured else 0)
        if peak <= job.limit and job.budget <= CLOSE * plan.budget_bytes:
            job.notes.append(f"made for {show_bytes(plan.budget_bytes)}, fits {show_bytes(job.budget)} too")
            return True
        return False


def _with_optimizer(profile: Profile, optimizer: Footprint) -> Profile:
    """The profile as it would be with another optimizer."""
    changed = profile.model_copy(
        update={
            "fixed": profile.fixed.model_copy(update={"optimizer": optimizer.state}),
            "optimizer_workspace": optimizer.workspace,
            "optimizer_kind": optimizer.kind,
        }
    )
    return changed.model_copy(update={"peak_bytes": keep_all(changed).peak})


def find(job: Job, path: Path | None) -> Saved | None:
    """The plan at `path`, or None if there is no such file.

    Raises:
        PlanMismatchError: it can't be read, or belongs to another model or sample: the first difference.
    """
    if path is None or not path.exists():
        return None
    plan = Plan.load(path)
    now = _fingerprint.take(job.model, *job.samples)
    try:
        _fingerprint.require_match(plan.fingerprint, None, now)
    except PlanMismatchError:
        _fingerprint.require_match(plan.fingerprint, plan.profile.fingerprint, now)
    return Saved(job, plan, now)
