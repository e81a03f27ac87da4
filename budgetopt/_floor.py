"""What a peak consists of, in words: which bytes are there at the event that sets it, and what for. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from budgetopt._problem import describe_event
from budgetopt._schema import Profile
from budgetopt._units import show_bytes
from budgetopt.solvers.memory import simulate
from budgetopt.solvers.problem import OUTSIDE, Choice, Kind, Problem, Segment
from budgetopt.solvers.timeline import timeline
from budgetopt.solvers.trace import Name, alive

_FIXED = {
    "parameter": "parameters",
    "buffer": "buffers",
    "gradient": "gradients that were there before",
    "optimizer": "the optimizer's state",
    "sample": "the sample",
}
_SEED = "aten.ones_like.default"
"""Makes the loss's own gradient, which lives until the backward pass is over."""
_SMALL = 0.02
"""Share of the peak under which parts that are not there all the time are told together."""


def explain_peak(
    profile: Profile, problem: Problem, choices: Sequence[Choice], segments: Sequence[Segment] = ()
) -> str:
    """The event with the highest bytes under `choices`, and what is there then, largest first."""
    event = simulate(problem, choices, segments).peak_event
    parts = composition(profile, problem, choices, event, segments)
    total = sum(parts.values())
    large = {what: size for what, size in parts.items() if size >= _SMALL * total or what in _FIXED.values()}
    rest = total - sum(large.values())
    told = [f"{show_bytes(size)} {what}" for what, size in sorted(large.items(), key=lambda part: -part[1])]
    told += [f"{show_bytes(rest)} for the rest"] if rest else []
    return f"at {describe_event(profile, event)}: {', '.join(told)}"


def composition(
    profile: Profile, problem: Problem, choices: Sequence[Choice], event: int, segments: Sequence[Segment] = ()
) -> dict[str, int]:
    """Bytes at an event, by what they are for; together they are the referee's peak of that event."""
    found = {_FIXED[kind]: size for kind, size in profile.fixed.model_dump().items() if size}
    other = problem.resident - profile.fixed.total
    if other:
        found["held back"] = other
    place = Place(profile, problem, event)
    for name, size in alive(problem, choices, event, segments).items():
        what = place.word(name)
        found[what] = found.get(what, 0) + size
    return found


class Place:
    """Says what a block is for, seen from one event, or from none."""

    def __init__(self, profile: Profile, problem: Problem, event: int = OUTSIDE) -> None:
        self._profile, self._problem, self._event = profile, problem, event
        self._line = timeline(problem)
        self._makers = {s: i for i, operator in enumerate(problem.operators) for s in operator.births}
        self._values: dict[int, list[int]] = {}
        for v, value in enumerate(problem.values):
            self._values.setdefault(value.storage, []).append(v)
        self._end = next((at for at, e in enumerate(problem.events) if e.kind == Kind.FORWARD_END), len(problem.events))

    def word(self, name: Name) -> str:
        kind, number = name
        if kind == "storage":
            return self._storage(number)
        if kind in ("half", "decoded"):
            return "values in fp16" if kind == "half" else "decoded from fp16"
        if kind == "late":
            return "stored when segments were run again"
        if kind == "state":
            return "states of random generators"
        if kind in ("made", "again"):
            return f"made again in {self._region(self._problem.values[number].region)}"
        return "work space of the operator"

    def maker(self, storage: int) -> int | None:
        """The operator that makes a storage; None if no recorded one does."""
        return self._makers.get(storage)

    def region(self, storage: int) -> int:
        """The region that makes a storage."""
        maker = self.maker(storage)
        return OUTSIDE if maker is None else self._problem.operators[maker].region

    def _storage(self, storage: int) -> str:
        maker = self._makers.get(storage)
        if self._line.born_at[storage] == self._event:
            return "the operator's own output"
        if maker is None:
            return "unknown"
        if self._line.born_at[storage] > self._end:
            last = self._line.die_at[storage] >= len(self._problem.events)
            stays = last and self._profile.operators[maker].name != _SEED
            return "gradients of parameters" if stays else "gradients on their way back"
        if self.region(storage) == OUTSIDE:
            return "made outside of planned layers: inputs, output, loss"
        values = self._values.get(storage, [])
        if any(v in self._line.decided for v in values):
            return "kept by the plan"
        if any(self._profile.operators[maker].blocked for _ in values):
            return "kept because it can't be made again"
        return "passed from layer to layer"

    def _region(self, region: int) -> str:
        return "the step" if region == OUTSIDE else self._profile.regions[region].path or "the model"
