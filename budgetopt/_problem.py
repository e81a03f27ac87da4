"""From the profile to the solvers: Profile + budget → Problem, integers only. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median_low
from typing import TYPE_CHECKING

from budgetopt._arguments import CHOICES as CHOICES
from budgetopt._arguments import choices, headroom_bytes, layers
from budgetopt._units import parse_bytes
from budgetopt.solvers import memory
from budgetopt.solvers.problem import (
    OUTSIDE,
    Choice,
    Event,
    Kind,
    Operator,
    Problem,
    Region,
    Value,
)

if TYPE_CHECKING:  # a profile makes its own problems
    from budgetopt._schema import Profile, RegionRecord

UNSEEN = 4096
"""Bytes kept free for what no event shows: numbers that become tensors inside operators."""


def problem_within(
    profile: Profile,
    budget: int | str,
    *,
    allow: Iterable[str] = CHOICES,
    exclude: Iterable[str] = (),
    headroom: int | str = 0,
    kept: frozenset[tuple[int, int]] = frozenset(),
    excess: int = 0,
    between: bool = True,
) -> Problem:
    """The problem that :func:`budgetopt.solve` hands to the solvers for a budget as users give it.

    Its arguments are explained there.

    Raises:
        InvalidBudgetError: the budget or the headroom can't be read. BudgetOptError: as :func:`to_problem`.
    """
    limit = parse_bytes(budget, total=None, free=None)
    usable = limit - headroom_bytes(headroom, limit) - excess - UNSEEN
    return to_problem(profile, usable, allow=allow, exclude=exclude, kept=kept, between=between)


def to_problem(
    profile: Profile,
    budget: int,
    *,
    allow: Iterable[str] = CHOICES,
    exclude: Iterable[str] = (),
    kept: frozenset[tuple[int, int]] = frozenset(),
    between: bool = True,
) -> Problem:
    """The program's view of a profile: its operators and events, and the optimizer's step as one more of both.

    Args:
        budget: bytes, headroom already taken off. allow: choices that may be made. exclude: paths of
            modules that are left alone. kept: (operator, slot) of values that verifying found to differ. between: what
            regions hand to each other may be in fp16, too, if anything may.

    Raises:
        BudgetOptError: unknown choice, or a path in `exclude` that the model does not have.
    """
    allowed = {*choices(allow), "keep"}
    exclude = layers(exclude, [path for path, _ in profile.fingerprint["modules"]])
    crossing = _crossing(profile)
    excluded = {i for i, o in enumerate(profile.operators) if inside(o.module, exclude)}
    unwanted = {value for operator, slot in kept for s, value in profile.operators[operator].slots if s == slot}
    free = [
        len(allowed) > 1 and v.region != OUTSIDE and i not in unwanted and v.operator not in excluded
        for i, v in enumerate(profile.values)
    ]
    values = tuple(
        Value(
            storage=v.storage,
            region=v.region,
            operator=v.operator,
            previous=v.previous,
            last=v.last,
            droppable=free[i] and i not in crossing,
            crossing=free[i] and i in crossing,
            half_bytes=v.half_bytes if "fp16" in allowed and (between or i not in crossing) else 0,
            codec_ns=v.codec_ns,
        )
        for i, v in enumerate(profile.values)
    )
    regions = _regions(profile)
    operators = _operators(profile, regions, "recompute" in allowed)
    events = [Event(Kind(kind), index) for kind, index in profile.events]
    if profile.optimizer_workspace:
        events.append(Event(Kind.RUN, len(operators)))
        operators.append(Operator(workspace=profile.optimizer_workspace))
    return Problem(
        budget=budget,
        resident=profile.fixed.total,
        storages=profile.storages,
        values=values,
        operators=tuple(operators),
        handles=profile.handles,
        regions=regions,
        events=tuple(events),
        step_ns=profile.step_ns,
    )


def inside(module: str, paths: Iterable[str]) -> bool:
    """Whether a module is one of those named, or a part of one."""
    return any(module == path or module.startswith(path + ".") or path == "" for path in paths)


def _crossing(profile: Profile) -> set[int]:
    """Values that a region reads and another one (or none) makes: they are there anyway, or held for it."""
    return {
        value
        for operator in profile.operators
        if operator.region != OUTSIDE
        for value in operator.reads
        if profile.values[value].region != operator.region
    }


def _operators(profile: Profile, regions: tuple[Region, ...], recompute: bool) -> list[Operator]:
    """Operators as solvers see them. Equal regions run equal operators: what differs in their times is noise."""
    times = {i: ns for kind in _alike(profile, regions) for i, ns in _medians(profile, kind)}
    return [
        Operator(
            region=o.region,
            time_ns=times.get(i, o.time_ns) + profile.replay_ns,
            births=o.births,
            workspace=o.workspace,
            reads=o.reads,
            writes=tuple(value for _, value in o.slots),
            rng_bytes=o.rng_bytes,
            replayable=not o.blocked and recompute,
        )
        for i, o in enumerate(profile.operators)
    ]


def _alike(profile: Profile, regions: tuple[Region, ...]) -> Iterable[list[RegionRecord]]:
    """The records of each kind of region."""
    found: dict[str, list[RegionRecord]] = {}
    for region, record in zip(regions, profile.regions, strict=True):
        found.setdefault(region.kind, []).append(record)
    return found.values()


def _medians(profile: Profile, records: list[RegionRecord]) -> Iterable[tuple[int, int]]:
    """Every operator of equal regions, and the median time of those at its place."""
    for same in zip(*(record.operators for record in records), strict=True):
        ns = median_low(profile.operators[i].time_ns for i in same)
        yield from ((i, ns) for i in same)


def _regions(profile: Profile) -> tuple[Region, ...]:
    kinds: dict[tuple[object, ...], str] = {}
    regions = []
    for record in profile.regions:
        shape = tuple(
            (profile.operators[i].name, tuple(profile.storages[s] for s in profile.operators[i].births))
            for i in record.operators
        )
        kind = kinds.setdefault(shape, f"kind {len(kinds)}")
        regions.append(Region(record_ns=record.record_ns, kind=kind))
    return tuple(regions)


def keep_all(profile: Profile) -> memory.Simulation:
    """What the referee says of the plain step."""
    problem = to_problem(profile, 0)
    return memory.simulate(problem, [Choice.KEEP] * len(problem.values))


def describe_event(profile: Profile, position: int) -> str:
    """The event at which memory is highest, in words. Past the profile's own is the optimizer's step."""
    if position == len(profile.events):
        return "optimizer.step, after the backward pass"
    if not 0 <= position < len(profile.events):
        return "the start of the step"
    for at in range(position, -1, -1):
        kind, index = profile.events[at]
        if kind == Kind.RUN:
            operator = profile.operators[index]
            layer = _saved_for(profile, at) if operator.backward else operator.module
            phase = "the backward pass" if operator.backward else "the forward pass"
            return f"{operator.name}, {phase}{f' of {layer}' if layer else ''}"
    return "the start of the step"


def _saved_for(profile: Profile, position: int) -> str:
    """The layer whose saved value the backward pass asked for last."""
    for kind, index in reversed(profile.events[:position]):
        if kind == Kind.UNPACK:
            operator = profile.values[profile.handles[index]].operator
            return "" if operator == OUTSIDE else profile.operators[operator].module
    return ""
