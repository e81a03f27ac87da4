"""Pictures for a page, as coordinates: the template draws them. No torch.

The shapes are plain SVG that is stretched to the width at hand, and all words are HTML beside it: they keep their size
on a narrow screen and take the theme's colours, neither of which text in an SVG of matplotlib's does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from budgetopt._curve import GROUPS, Curve
from budgetopt._schema import FrontierPoint
from budgetopt._units import show_bytes

SIDE: Final = 1000
"""Width and height of the coordinates; (0, 0) is at the top left."""

_TICKS = 4
_FAR = 1.6  # times the peak, from which on the budget's line would leave no room for the rest


@dataclass(frozen=True)
class Tick:
    """A label on an axis, at a percentage of it."""

    at: float
    label: str


@dataclass(frozen=True)
class Shape:
    """An area (`points` of a polygon) or a line of dots; `colour` is the number of one of the page's colours."""

    label: str
    points: str
    colour: str


@dataclass(frozen=True)
class Figure:
    """Shapes, from the bottom of the pile up, and what is written around them.

    Attributes:
        lines: drawn over the areas. turn: where a line divides the picture, in percent of its width; None: nowhere.
        across: what is written below: ticks, or the names of the two halves. below: what they mean.
    """

    title: str
    beside: str
    below: str
    up: list[Tick]
    across: list[Tick]
    areas: list[Shape]
    lines: list[Shape]
    dots: str = ""
    turn: float | None = None


def memory_figure(curve: Curve, measured: Sequence[int], budget: int) -> Figure:
    """Memory over the step by what it is for, the measured curve (empty: none) and the budget over it."""
    highest = max(*curve.total, *measured)
    near = budget <= _FAR * highest
    ticks = _ticks(max(budget, highest) if near else highest)
    scale = ticks[-1]
    lines = [Shape(f"predicted, {show_bytes(max(curve.total))} at most", _line(curve.total, scale), "predicted")]
    if measured:
        lines.append(Shape(f"measured, {show_bytes(max(measured))} at most", _line(measured, scale), "measured"))
    if near:
        lines.append(Shape(f"budget, {show_bytes(budget)}", _line([budget], scale), "budget"))
    return Figure(
        title="Memory over the step, by what it is for",
        beside="bytes on the device",
        below=_BELOW,
        up=_up(ticks),
        across=[],
        areas=[
            Shape(what, points, f"{GROUPS.index(what)}")
            for what, points in _pile(curve.groups, len(curve.total), scale)
        ],
        lines=lines,
        turn=100 * curve.turn,
    )


_BELOW = "the step from its start to its end, by the bytes it has allocated so far"


def layers_figure(curve: Curve) -> Figure:
    """The activations alone, by layer."""
    sums = [sum(sizes) for sizes in zip(*curve.layers.values(), strict=True)]
    ticks = _ticks(max(sums, default=1))
    piled = _pile(curve.layers, len(curve.total), ticks[-1])
    return Figure(
        title="Activations over the step, by layer",
        beside="bytes of activations",
        below=_BELOW,
        up=_up(ticks),
        across=[],
        areas=[Shape(layer, points, f"layer{number}") for number, (layer, points) in enumerate(piled)],
        lines=[],
        turn=100 * curve.turn,
    )


def frontier_figure(points: Sequence[FrontierPoint], budget: int) -> Figure:
    """What each byte buys: extra time against the budget."""
    sizes = [point.budget_bytes for point in points]
    low, high = min(sizes), max(sizes)
    room = 0.04 * (high - low or high)
    left, width = low - room, high - low + 2 * room
    ticks = _ticks(max(100 * max(point.overhead for point in points), 0.1))
    at = [
        (SIDE * (point.budget_bytes - left) / width, SIDE * (1 - 100 * point.overhead / ticks[-1])) for point in points
    ]
    lines = [Shape("cheapest plan found for each budget", " ".join(f"{x:.1f},{y:.1f}" for x, y in at), "predicted")]
    if left <= budget <= left + width:
        x = SIDE * (budget - left) / width
        lines.append(Shape(f"this plan's budget, {show_bytes(budget)}", f"{x:.1f},0 {x:.1f},{SIDE}", "budget"))
    return Figure(
        title="What each byte buys",
        beside="extra time, % of the plain step",
        below="budget",
        up=[Tick(100 * tick / ticks[-1], f"{tick:g}%") for tick in ticks],
        across=[
            Tick(100 * (tick - left) / width, show_bytes(round(tick)))
            for tick in _ticks(width, start=left)
            if left <= tick <= left + width
        ],
        areas=[],
        lines=lines,
        dots=" ".join(f"M{x:.1f},{y:.1f}h0" for x, y in at),
    )


def _ticks(width: float, start: float = 0) -> list[float]:
    """Round numbers from below `start` to above ``start + width``, some four of them."""
    rough = width / _TICKS
    ten = 10.0 ** math.floor(math.log10(rough))
    step = next(times * ten for times in (1, 2, 2.5, 5, 10) if times * ten >= rough * (1 - 1e-9))
    first, last = math.floor(start / step), math.ceil((start + width) / step * (1 - 1e-9))
    return [number * step for number in range(first, last + 1)]


def _up(ticks: Sequence[float]) -> list[Tick]:
    return [Tick(100 * tick / ticks[-1], show_bytes(round(tick)) if tick else "0") for tick in ticks]


def _across(count: int) -> list[float]:
    """Where points are: in the middle of their slices, but for the ends of the first and the last."""
    return [0.0, *(SIDE * (number + 0.5) / count for number in range(count)), float(SIDE)]


def _ends(sizes: Sequence[int]) -> list[int]:
    return [sizes[0], *sizes, sizes[-1]]


def _line(sizes: Sequence[int], scale: float) -> str:
    pairs = zip(_across(len(sizes)), _ends(sizes), strict=True)
    return " ".join(f"{x:.1f},{SIDE * (1 - size / scale):.1f}" for x, size in pairs)


def _pile(rows: Mapping[str, Sequence[int]], count: int, scale: float) -> list[tuple[str, str]]:
    """A polygon for each row, on top of those before."""
    base = [0] * count
    found = []
    for name, sizes in rows.items():
        top = [a + b for a, b in zip(base, sizes, strict=True)]
        back = " ".join(reversed(_line(base, scale).split()))
        found.append((name, f"{_line(top, scale)} {back}"))
        base = top
    return found
