"""A plan: decisions by name, what is predicted of them, what running them showed. Pydantic models, no torch."""

from __future__ import annotations

import base64
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from budgetopt import _batch, _explain
from budgetopt._errors import PlanMismatchError
from budgetopt._numbering import Numbering
from budgetopt._problem import UNSEEN
from budgetopt._schema import Environment, FrontierPoint, Profile, Saved, Strict
from budgetopt._units import parse_bytes
from budgetopt.solvers.problem import Choice, Segment

WORDS: Final = {
    "keep": Choice.KEEP,
    "hold": Choice.KEEP,
    "late": Choice.KEEP,
    "recompute": Choice.RECOMPUTE,
    "fp16": Choice.FP16,
}
"""What a decision's word means; what a planned region makes and no decision names is made again."""


class Decision(Strict):
    """What happens to one value: the `slot`-th result of the `nth` operator of its name in the region's call.

    ``"hold"``: kept for replays, autograd does not save it. ``"late"``: dropped in the forward, and kept from when
    `segment` is run again. `between`: other regions use the value, too, and their replays read it in fp16.
    """

    operator: str
    nth: int
    slot: int
    layer: str
    choice: Literal["keep", "hold", "late", "recompute", "fp16"]
    bytes: int
    segment: int = 0
    between: bool = False


class RegionPlan(Strict):
    """The decisions for one call of one module, and the operators that make the call the planned one.

    `segments`: the numbers of those it is part of, outermost first. A segment is a row of calls that is run again as
    one, right before the backward pass first asks for something in it.
    """

    path: str
    call: int
    decisions: tuple[Decision, ...]
    operators: tuple[str, ...]
    ranks: tuple[str, ...]
    record: tuple[int, ...]
    blocked: tuple[int, ...]
    snapshot: tuple[int, ...]
    shape: tuple[int, ...] = ()
    segments: tuple[int, ...] = ()

    def exact(self) -> RegionPlan:
        """The same with values recomputed that are in fp16 here; every operator is recorded."""
        exactly = {"choice": "recompute", "between": False}
        decisions = tuple(d.model_copy(update=exactly) if d.choice == "fp16" else d for d in self.decisions)
        return self.model_copy(update={"decisions": decisions, "record": tuple(range(len(self.operators)))})


class Prediction(Strict):
    """What the referee says of a plan. `overhead` is extra time ÷ plain step time; `reserved_bytes` what the caching
    allocator would reserve (CUDA; 0 elsewhere, and in plans of older versions).
    """

    peak_bytes: int
    plain_peak_bytes: int
    resident_bytes: int
    overhead: float
    extra_ns: int
    peak_at: str
    reserved_bytes: int = 0


class Verification(Strict):
    """What running the plan showed; `reserved_bytes` of the caching allocator (CUDA; 0 elsewhere).

    `curve`: bytes over the measured step, resident ones included, and at its end what the optimizer's step needs: the
    highest of each of at most 400 slices in which as many bytes are allocated (CPU; empty elsewhere, and in plans of
    older versions).
    """

    peak_bytes: int
    reserved_bytes: int = 0
    step_ns: int
    values_proven: int
    values_kept_after_proof: tuple[str, ...] = ()
    grad_error: float | None = None
    curve: tuple[int, ...] = ()

    @model_serializer(mode="wrap")
    def _without_an_empty_curve(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Plans of older versions have none, and their seal is that of the text without it."""
        found: dict[str, Any] = write(self)
        return found if self.curve else {name: value for name, value in found.items() if name != "curve"}


class Plan(Saved):
    """Decisions for every planned region, bound to a model and a sample; `profile` is compressed."""

    version: Literal[1] = 1
    budget_bytes: int
    headroom_bytes: int = 0
    predicted: Prediction
    measured: Verification | None = None
    solver: str
    status: str
    gap: float
    allow: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    regions: tuple[RegionPlan, ...]
    calls: dict[str, int] = Field(default_factory=dict)
    fingerprint: dict[str, Any]
    environment: Environment
    profile_data: str = ""

    @property
    def profile(self) -> Profile:
        """The profile that the plan was solved from.

        Raises:
            PlanMismatchError: it was damaged, or written by another version.
        """
        try:
            return Profile.model_validate_json(zlib.decompress(base64.b85decode(self.profile_data)))
        except (ValueError, zlib.error) as error:
            raise PlanMismatchError(
                "the profile inside the plan can't be read: the file was damaged or written by another version of "
                "budgetopt. Delete it to have it made anew."
            ) from error

    @property
    def drops(self) -> bool:
        """Whether anything is not kept: if not, the plan leaves the model untouched."""
        return any(d.choice in ("recompute", "fp16", "late") for region in self.regions for d in region.decisions)

    @property
    def halves(self) -> bool:
        """Whether anything is stored in fp16."""
        return any(d.choice == "fp16" for region in self.regions for d in region.decisions)

    @property
    def rounds_between(self) -> bool:
        """Whether replays read what other regions made in fp16: what they make is then not bit for bit the dropped."""
        return any(d.between for region in self.regions for d in region.decisions)

    def exact(self) -> Plan:
        """The same with values recomputed that are in fp16 here."""
        return self.model_copy(update={"regions": tuple(region.exact() for region in self.regions)})

    def segments(self, profile: Profile) -> tuple[Segment, ...]:
        """Rows of regions, by their numbers in :attr:`profile`, that are run again as one."""
        numbers = {(record.path, record.call): number for number, record in enumerate(profile.regions)}
        rows: dict[int, list[int]] = {}
        for region in self.regions:
            for segment in region.segments:
                rows.setdefault(segment, []).append(numbers[region.path, region.call])
        return tuple(Segment(min(row), max(row)) for _, row in sorted(rows.items()))

    def choices(self, profile: Profile) -> list[Choice]:
        """The decisions as a choice for every value of :attr:`profile` (passed in: reading it takes time)."""
        choices = [Choice.KEEP] * len(profile.values)
        numbers = {(record.path, record.call): record.operators for record in profile.regions}
        for region in self.regions:
            numbering = Numbering()
            slots: dict[tuple[str, int], dict[int, int]] = {}
            for operator in (profile.operators[i] for i in numbers[region.path, region.call]):
                slots[operator.name, numbering.next(operator.name)] = dict(operator.slots)
                for _, value in operator.slots:
                    choices[value] = Choice.RECOMPUTE
            for decision in region.decisions:
                choices[slots[decision.operator, decision.nth][decision.slot]] = WORDS[decision.choice]
        return choices

    def explain(self, layer: str) -> str:
        """Why a layer (a name of ``named_modules()``) is treated as it is: what that saves and costs, per value.

        Raises:
            BudgetOptError: the model has no such layer.
        """
        profile = self.profile
        return _explain.explain(profile, self.choices(profile), layer, self.segments(profile), self.budget_bytes)

    def peak_at(self, batch: int) -> int:
        """Predicted peak (bytes) of this plan, decisions as they are, at another batch size.

        Raises:
            BudgetOptError: the profile knows one batch size only (it says why), or `batch` is less than 1.
        """
        profile = self.profile
        return _batch.peak_at(profile, self.choices(profile), batch, self.segments(profile))

    def largest_batch(self, budget: int | str | None = None, *, replan: bool = True) -> int:
        """The largest batch whose predicted peak is within `budget`; 0 if not even one example fits.

        Args:
            budget: bytes, or text such as ``"8GB"``; by default the plan's own.
            replan: under the best plan for that batch (call ``fit`` with it); otherwise under this plan.

        Raises:
            BudgetOptError: the profile knows one batch size only (it says why).
            InvalidBudgetError: the budget can't be read.
        """
        limit = self.budget_bytes if budget is None else parse_bytes(budget, total=None, free=None)
        profile = self.profile
        usable = limit - self.headroom_bytes - UNSEEN
        if replan:
            return _batch.largest(profile, usable, self.allow, self.exclude)
        return _batch.largest_planned(profile, usable, self.choices(profile), self.segments(profile))

    @model_validator(mode="after")
    def _one_plan_per_call(self) -> Plan:
        calls = [(region.path, region.call) for region in self.regions]
        if len(set(calls)) != len(calls):
            raise ValueError("a region's call is planned twice")
        return self

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw memory over the step, predicted and measured, and what fills it: a .png, .svg or .pdf.

        Raises:
            BudgetOptError: matplotlib is not installed, the name ends otherwise, or it can't be written.
        """
        from budgetopt._picture import draw_memory

        draw_memory(self, Path(path))

    def report(self, path: str | os.PathLike[str], frontier: Iterable[FrontierPoint] = ()) -> None:
        """Write one page (HTML) that says what the plan does; it needs nothing else to be read.

        Args:
            frontier: points of :func:`budgetopt.frontier`, to show what each byte buys.

        Raises:
            BudgetOptError: it can't be written. PlanMismatchError: the profile inside can't be read.
        """
        from budgetopt._sheet import write_page

        write_page(self, Path(path), frontier)

    def __str__(self) -> str:
        return _explain.plan_table(self)

    def _repr_html_(self) -> str:
        return _explain.plan_html(self)


def compress(profile: Profile) -> str:
    """The profile as text that fits into a plan's JSON."""
    return base64.b85encode(zlib.compress(profile.model_dump_json().encode(), 6)).decode()
