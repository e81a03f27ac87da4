"""Memory over a planned step, and what fills it: the referee's own blocks, summed by what they are for. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

from budgetopt._floor import Place
from budgetopt._problem import to_problem
from budgetopt._schema import Profile
from budgetopt._slices import SLICES, tops
from budgetopt.solvers.problem import OUTSIDE, Choice, Kind, Problem, Segment
from budgetopt.solvers.trace import Action, Name, blocks

GROUPS: Final = (
    "parameters and buffers",
    "optimizer's state",
    "sample",
    "gradients of parameters",
    "activations outside of planned layers",
    "activations kept",
    "activations in fp16",
    "activations made again",
    "gradients on their way back",
    "operators' own workspace",
)
"""What memory is for, in the order in which pictures pile it up."""

OTHERS: Final = "outside of layers"
"""The layer of activations that no region makes."""

_FIXED = {
    "parameter": GROUPS[0],
    "buffer": GROUPS[0],
    "optimizer": GROUPS[1],
    "sample": GROUPS[2],
    "gradient": GROUPS[3],
}
_OF_PLACES = {
    "gradients of parameters": GROUPS[3],
    "made outside of planned layers: inputs, output, loss": GROUPS[4],
    "kept by the plan": GROUPS[5],
    "kept because it can't be made again": GROUPS[5],
    "passed from layer to layer": GROUPS[5],
    "values in fp16": GROUPS[6],
    "decoded from fp16": GROUPS[6],
    "gradients on their way back": GROUPS[8],
    "states of random generators": GROUPS[9],
    "work space of the operator": GROUPS[9],
}
_ROWS = 8  # layers that are told apart; of more, neighbours count together


@dataclass(frozen=True)
class Curve:
    """Bytes over the step: the highest moment of each of its slices (:mod:`budgetopt._slices`).

    Attributes:
        total: bytes at each point, resident ones included. groups: the same by what they are for (:data:`GROUPS`; those
            that are never there are left out). layers: activations alone, by layer.
        turn: the share of the step at which the backward pass begins.
    """

    total: tuple[int, ...]
    groups: dict[str, tuple[int, ...]]
    layers: dict[str, tuple[int, ...]]
    turn: float

    @property
    def peak(self) -> int:
        """The first point with the most bytes."""
        return self.total.index(max(self.total))


def over_step(
    profile: Profile, choices: Sequence[Choice], segments: Sequence[Segment] = (), slices: int = SLICES
) -> Curve:
    """The step under `choices` as the referee replays it."""
    problem = to_problem(profile, 0)
    actions, names = blocks(problem, choices, segments)
    sizes = [action.size for action in actions]
    levels = list(accumulate(sizes, initial=0))
    points = tops(sizes, slices)
    rows = _rows(profile)
    labels = _labels(profile, problem, names, rows)
    found = _at(points, actions, labels)
    fixed = Counter[str]()
    for kind, size in profile.fixed.model_dump().items():
        fixed[_FIXED[kind]] += size
    groups = {what: tuple(fixed[what] + now[what, ""] for now in found) for what in GROUPS}
    layers = {row: tuple(now["", row] for now in found) for row in dict.fromkeys(rows.values())}
    return Curve(
        total=tuple(problem.resident + levels[at] for at in points),
        groups={what: sizes for what, sizes in groups.items() if any(sizes)},
        layers={row: sizes for row, sizes in layers.items() if any(sizes)},
        turn=_turn(problem, actions),
    )


Label = tuple[str, str]
"""What a block counts for: a group, or a layer; the other one is empty."""


def _at(points: Sequence[int], actions: Sequence[Action], labels: Sequence[tuple[Label, ...]]) -> list[Counter[Label]]:
    """Bytes by label right before the action of each point's number; past the last one, after it."""
    found, now, done = [], Counter[Label](), 0
    for at in points:
        for action in actions[done:at]:
            for label in labels[action.block]:
                now[label] += action.size
        done = at
        found.append(Counter(now))
    return found


def _labels(
    profile: Profile, problem: Problem, names: Sequence[Name], rows: Mapping[int, str]
) -> list[tuple[Label, ...]]:
    """Of each block: its group, and its layer where it is an activation."""
    place = Place(profile, problem)
    known: dict[Name, tuple[Label, ...]] = {}
    for name in names:
        if name not in known:
            group = _OF_PLACES.get(place.word(name), GROUPS[7])
            layer = rows[_region(problem, place, name)]
            known[name] = ((group, ""), ("", layer)) if group.startswith("activations") else ((group, ""),)
    return [known[name] for name in names]


def _region(problem: Problem, place: Place, name: Name) -> int:
    kind, number = name
    if kind == "storage":
        return place.region(number)
    return problem.values[number].region if kind in ("made", "again", "half", "decoded", "late") else OUTSIDE


def _rows(profile: Profile) -> dict[int, str]:
    """A name for every region: its layer, or the first and last of some neighbours where there are many."""
    paths = list(dict.fromkeys(record.path for record in profile.regions))
    count = min(_ROWS, len(paths))
    edges = [number * len(paths) // count for number in range(count)] + [len(paths)] if count else []
    rows: dict[str, str] = {}
    for a, b in pairwise(edges):
        first, last = paths[a] or "(model)", paths[b - 1]
        rows |= dict.fromkeys(paths[a:b], first if b == a + 1 else f"{first} to {last}")
    return {OUTSIDE: OTHERS} | {number: rows[record.path] for number, record in enumerate(profile.regions)}


def _turn(problem: Problem, actions: Sequence[Action]) -> float:
    """The share of the bytes allocated in the step that are so before the forward pass ends."""
    end = next((at for at, event in enumerate(problem.events) if event.kind == Kind.FORWARD_END), len(problem.events))
    taken = [(action.event <= end, action.size) for action in actions if action.size > 0]
    return sum(size for before, size in taken if before) / max(1, sum(size for _, size in taken))
