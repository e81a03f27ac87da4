"""Back from the solvers: Solution → Plan, with the names of layers and operators. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from budgetopt._fingerprint_digest import digest
from budgetopt._numbering import Numbering
from budgetopt._plan import Decision, Plan, Prediction, RegionPlan, compress
from budgetopt._problem import CHOICES, describe_event
from budgetopt._reserved import reserved_bytes
from budgetopt._schema import Profile, RegionRecord
from budgetopt.solvers.holding import users
from budgetopt.solvers.memory import Simulation
from budgetopt.solvers.problem import OUTSIDE, Choice, Problem, Solution
from budgetopt.solvers.segments import chains, in_order, late
from budgetopt.solvers.timeline import timeline


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
    words = _Words(profile, problem, solution)
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
            reserved_bytes=reserved_bytes(profile, problem, solution.choices, solution.segments),
        ),
        solver=solution.solver,
        status=solution.status,
        gap=round(solution.gap, 6),
        allow=tuple(c for c in CHOICES if c in set(allow) | {"keep"}),
        exclude=tuple(exclude),
        regions=tuple(map(words.plan, words.planned)),
        calls=dict(Counter(record.path for record in profile.regions)),
        fingerprint=digest(profile.fingerprint),
        environment=profile.environment,
        profile_data=compress(profile),
    )


def every_region(profile: Profile, problem: Problem, found: Simulation) -> list[RegionPlan]:
    """Of all region calls, those that keep everything too, with every operator recorded: as a profiling step runs."""
    words = _Words(profile, problem, Solution(found.choices, found.peak, OUTSIDE, 0, segments=found.segments))
    return [words.plan(number).exact() for number in range(len(profile.regions))]


class _Words:
    """A solution in words, region by region.

    Attributes:
        planned: numbers of the regions that do not just keep everything from the forward on.
    """

    def __init__(self, profile: Profile, problem: Problem, solution: Solution) -> None:
        self._profile, self._problem, self._chosen = profile, problem, solution.choices
        self._segments = chains(in_order(solution.segments))
        self._level = late(problem, timeline(problem), solution.choices, solution.segments).level
        self._saved = set(profile.handles)
        self._between = {v for v in timeline(problem).shared if solution.choices[v] == Choice.FP16}
        self._replayed = self._may_be_replayed()
        reads = [(problem.operators[i].region, v) for i in self._replayed for v in problem.operators[i].reads]
        self._read = {v for _, v in reads}
        self._read_at_home = {v for region, v in reads if problem.values[v].region == region}
        dropped = {problem.values[v].region for v in self._saved if solution.choices[v] != Choice.KEEP}
        dropped |= users(problem, timeline(problem), solution.choices)
        self.planned = sorted((dropped | set(self._segments)) - {OUTSIDE})

    def plan(self, number: int) -> RegionPlan:
        record = self._profile.regions[number]
        operators = [self._profile.operators[i] for i in record.operators]
        return RegionPlan(
            path=record.path,
            call=record.call,
            decisions=tuple(self._decisions(record)),
            operators=tuple(o.name for o in operators),
            ranks=tuple(o.ranks for o in operators),
            record=tuple(i for i, index in enumerate(record.operators) if index in self._replayed),
            blocked=tuple(i for i, o in enumerate(operators) if o.blocked),
            snapshot=tuple(i for i, o in enumerate(operators) if o.snapshot),
            shape=record.shape,
            segments=self._segments.get(number, ()),
        )

    def _decisions(self, record: RegionRecord) -> Iterator[Decision]:
        numbering = Numbering()
        for operator in (self._profile.operators[i] for i in record.operators):
            nth = numbering.next(operator.name)
            for slot, value in operator.slots:
                choice = self._word(value)
                if choice is not None:
                    yield Decision(
                        operator=operator.name,
                        nth=nth,
                        slot=slot,
                        layer=operator.module,
                        choice=choice,  # type: ignore[arg-type]
                        bytes=self._profile.storages[self._profile.values[value].storage],
                        segment=self._level.get(value, 0),
                        between=value in self._between,
                    )

    def _word(self, value: int) -> str | None:
        choice = self._chosen[value]
        if choice == Choice.FP16:
            return "fp16"
        if choice == Choice.KEEP and value in self._level:
            return "late" if value in self._saved or value in self._read else None
        at_home = choice == Choice.KEEP and value in self._read_at_home
        if at_home and (value not in self._saved or self._crosses(value)):
            return "hold"  # whoever saves it, it is held from when it is made
        if value in self._saved:
            return "keep" if choice == Choice.KEEP else "recompute"
        return None

    def _crosses(self, value: int) -> bool:
        return timeline(self._problem).reach[value] > self._problem.values[value].region

    def _may_be_replayed(self) -> set[int]:
        """Operators in the closure of dropped and late values: those that the executor must record.

        fp16 values' operators too: they must be known as values to be stored, though none may be replayed.
        """
        problem, level = self._problem, self._level
        exact: set[int] = set()
        coded: set[int] = set()
        stack: list[int] = []
        for v in self._saved | self._between:
            if self._chosen[v] == Choice.RECOMPUTE or v in level:
                stack.append(v)
            elif self._chosen[v] == Choice.FP16:
                coded.update(_chain(problem, v))
        while stack:
            value = problem.values[stack.pop()]
            if value.operator == OUTSIDE or value.operator in exact:
                continue
            exact.add(value.operator)
            for read in problem.operators[value.operator].reads:
                own = problem.values[read].region == value.region
                if (own and self._chosen[read] != Choice.KEEP) or read in level:
                    stack.append(read)
        return exact | coded


def _chain(problem: Problem, value: int) -> set[int]:
    """The operators that wrote the versions of a storage up to `value`."""
    operators = set()
    while value != OUTSIDE:
        operators.add(problem.values[value].operator)
        value = problem.values[value].previous
    return operators - {OUTSIDE}
