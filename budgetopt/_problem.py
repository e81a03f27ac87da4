"""Between the profile and the solvers: Profile + budget → Problem, Solution → Plan. No torch.

A problem has integers only; names come back when a solution becomes a plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from budgetopt._arguments import CHOICES as CHOICES
from budgetopt._arguments import choices, layers
from budgetopt._fingerprint_digest import digest
from budgetopt._schema import Decision, OperatorRecord, Plan, Prediction, Profile, RegionPlan, compress
from budgetopt._units import show_bytes
from budgetopt.solvers import memory
from budgetopt.solvers.problem import (
    OUTSIDE,
    Choice,
    Event,
    Kind,
    Operator,
    Problem,
    Region,
    Solution,
    Value,
)


def to_problem(
    profile: Profile,
    budget: int,
    *,
    allow: Iterable[str] = CHOICES,
    exclude: Iterable[str] = (),
    kept: frozenset[tuple[int, int]] = frozenset(),
) -> Problem:
    """The program's view of a profile.

    Args:
        budget: bytes, headroom already taken off. allow: choices that may be made. exclude: paths of
            modules that are left alone. kept: (operator, slot) of values that verifying found to differ.

    Raises:
        BudgetOptError: unknown choice, or a path in `exclude` that the model does not have.
    """
    allowed = {*choices(allow), "keep"}
    exclude = layers(exclude, [path for path, _ in profile.fingerprint["modules"]])
    crossing = _crossing(profile)
    excluded = {i for i, o in enumerate(profile.operators) if _inside(o.module, exclude)}
    unwanted = {value for operator, slot in kept for s, value in profile.operators[operator].slots if s == slot}
    values = tuple(
        Value(
            storage=v.storage,
            region=v.region,
            operator=v.operator,
            previous=v.previous,
            last=v.last,
            droppable=(
                len(allowed) > 1
                and v.region != OUTSIDE
                and i not in crossing
                and i not in unwanted
                and v.operator not in excluded
            ),
            half_bytes=v.half_bytes if "fp16" in allowed else 0,
            codec_ns=v.codec_ns,
        )
        for i, v in enumerate(profile.values)
    )
    return Problem(
        budget=budget,
        resident=profile.fixed.total,
        storages=profile.storages,
        values=values,
        operators=tuple(_operator(o, profile.replay_ns, "recompute" in allowed) for o in profile.operators),
        handles=profile.handles,
        regions=_regions(profile),
        events=tuple(Event(Kind(kind), index) for kind, index in profile.events),
        step_ns=profile.step_ns,
    )


def _inside(module: str, paths: Iterable[str]) -> bool:
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


def _operator(o: OperatorRecord, replay_ns: int, recompute: bool) -> Operator:
    return Operator(
        region=o.region,
        time_ns=o.time_ns + replay_ns,
        births=o.births,
        workspace=o.workspace,
        reads=o.reads,
        writes=tuple(value for _, value in o.slots),
        rng_bytes=o.rng_bytes,
        replayable=not o.blocked and recompute,
    )


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
    """The event at which memory is highest, in words."""
    if not 0 <= position < len(profile.events):
        return "the start of the step"
    for kind, index in reversed(profile.events[: position + 1]):
        if kind == Kind.RUN:
            operator = profile.operators[index]
            where = f" in {operator.module}" if operator.module and not operator.backward else ""
            phase = "the backward pass" if operator.backward else "the forward pass"
            return f"{operator.name}{where}, {phase}"
    return "the start of the step"


def to_plan(
    profile: Profile,
    problem: Problem,
    solution: Solution,
    *,
    budget: int,
    headroom: int,
    allow: Iterable[str],
    exclude: Iterable[str],
) -> Plan:
    """A solution with its names back: decisions by region, call, operator and slot."""
    saved = set(profile.handles)
    regions = [
        _region_plan(profile, problem, solution, saved, number)
        for number, _ in enumerate(profile.regions)
        if any(problem.values[v].region == number and solution.choices[v] != Choice.KEEP for v in saved)
    ]
    return Plan(
        budget_bytes=budget,
        headroom_bytes=headroom,
        predicted=Prediction(
            peak_bytes=solution.peak,
            plain_peak_bytes=profile.peak_bytes,
            resident_bytes=profile.fixed.total,
            overhead=solution.cost_ns / profile.step_ns if profile.step_ns else 0.0,
            extra_ns=solution.cost_ns,
            peak_at=describe_event(profile, solution.peak_event),
        ),
        solver=solution.solver,
        status=solution.status,
        gap=round(solution.gap, 6),
        allow=tuple(c for c in CHOICES if c in set(allow) | {"keep"}),
        exclude=tuple(exclude),
        regions=tuple(regions),
        calls=dict(Counter(record.path for record in profile.regions)),
        fingerprint=digest(profile.fingerprint),
        environment=profile.environment,
        profile_data=compress(profile),
    )


def _region_plan(profile: Profile, problem: Problem, solution: Solution, saved: set[int], number: int) -> RegionPlan:
    record = profile.regions[number]
    replayed = _may_be_replayed(problem, solution, number)
    decisions: list[Decision] = []
    nth: dict[str, int] = {}
    for index in record.operators:
        operator = profile.operators[index]
        count = nth.get(operator.name, 0)
        nth[operator.name] = count + 1
        for slot, value in operator.slots:
            choice = _word(problem, solution, replayed, saved, value)
            if choice is not None:
                decisions.append(
                    Decision(
                        operator=operator.name,
                        nth=count,
                        slot=slot,
                        layer=operator.module,
                        choice=choice,  # type: ignore[arg-type]
                        bytes=profile.storages[profile.values[value].storage],
                    )
                )
    operators = [profile.operators[i] for i in record.operators]
    return RegionPlan(
        path=record.path,
        call=record.call,
        decisions=tuple(decisions),
        operators=tuple(o.name for o in operators),
        record=tuple(i for i, index in enumerate(record.operators) if index in replayed),
        blocked=tuple(i for i, o in enumerate(operators) if o.blocked),
        snapshot=tuple(i for i, o in enumerate(operators) if o.snapshot),
    )


def _may_be_replayed(problem: Problem, solution: Solution, region: int) -> set[int]:
    """Operators in the closure of the region's dropped values: those that the executor must record.

    fp16 values' operators too: they must be known as values to be stored, though none may be replayed.
    """
    exact: set[int] = set()
    coded: set[int] = set()
    stack: list[int] = []
    for v in set(problem.handles):
        if problem.values[v].region == region and solution.choices[v] == Choice.RECOMPUTE:
            stack.append(v)
        elif problem.values[v].region == region and solution.choices[v] == Choice.FP16:
            coded.update(_chain(problem, v))
    while stack:
        value = problem.values[stack.pop()]
        if value.operator == OUTSIDE or value.operator in exact:
            continue
        exact.add(value.operator)
        for read in problem.operators[value.operator].reads:
            if problem.values[read].region == region and solution.choices[read] != Choice.KEEP:
                stack.append(read)
    return exact | coded


def _chain(problem: Problem, value: int) -> set[int]:
    """The operators that wrote the versions of a storage up to `value`."""
    operators = set()
    while value != OUTSIDE:
        operators.add(problem.values[value].operator)
        value = problem.values[value].previous
    return operators - {OUTSIDE}


def _word(problem: Problem, solution: Solution, replayed: set[int], saved: set[int], value: int) -> str | None:
    choice = solution.choices[value]
    if choice == Choice.FP16:
        return "fp16"
    if value in saved:
        return "keep" if choice == Choice.KEEP else "recompute"
    held = choice == Choice.KEEP and any(value in problem.operators[i].reads for i in replayed)
    return "hold" if held else None


def infeasible(problem: Problem, profile: Profile) -> tuple[int, str]:
    """The smallest feasible peak (bytes) and, in words, what sets it."""
    minimum, choices = memory.minimum(problem)
    simulation = memory.simulate(problem, choices)
    fixed = profile.fixed
    parts = ", ".join(f"{show_bytes(size)} {kind}" for kind, size in fixed.model_dump().items() if size)
    where = describe_event(profile, simulation.peak_event)
    return minimum, f"at {where}; of it {show_bytes(fixed.total)} are always there ({parts})"
