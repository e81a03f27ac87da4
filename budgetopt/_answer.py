"""Back from the solvers: Solution → Plan, with the names of layers and operators. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from budgetopt._fingerprint_digest import digest
from budgetopt._numbering import Numbering
from budgetopt._plan import Decision, Plan, Prediction, RegionPlan, compress
from budgetopt._problem import CHOICES, describe_event
from budgetopt._schema import Profile
from budgetopt.solvers.problem import OUTSIDE, Choice, Problem, Solution


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


def every_region(profile: Profile, problem: Problem, choices: tuple[Choice, ...]) -> list[RegionPlan]:
    """Of all region calls, those that keep everything too, with every operator recorded: as a profiling step runs."""
    solution, saved = Solution(choices, 0, OUTSIDE, 0), set(profile.handles)
    return [_region_plan(profile, problem, solution, saved, number).exact() for number in range(len(profile.regions))]


def _region_plan(profile: Profile, problem: Problem, solution: Solution, saved: set[int], number: int) -> RegionPlan:
    record = profile.regions[number]
    replayed = _may_be_replayed(problem, solution, number)
    decisions: list[Decision] = []
    numbering = Numbering()
    for index in record.operators:
        operator = profile.operators[index]
        nth = numbering.next(operator.name)
        for slot, value in operator.slots:
            choice = _word(problem, solution, replayed, saved, value)
            if choice is not None:
                decisions.append(
                    Decision(
                        operator=operator.name,
                        nth=nth,
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
        ranks=tuple(o.ranks for o in operators),
        record=tuple(i for i, index in enumerate(record.operators) if index in replayed),
        blocked=tuple(i for i, o in enumerate(operators) if o.blocked),
        snapshot=tuple(i for i, o in enumerate(operators) if o.snapshot),
        shape=record.shape,
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
