"""Step functions of the budget: what each budget makes possible, as steps (need, cost, ...) that rise and fall.

A step says: from ``need`` bytes on, ``cost`` is possible; what follows in the tuple is its owner's. Steps are sorted
by need. Plain tuples: millions of them are made.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, TypeVar

AnyStep = TypeVar("AnyStep", bound=tuple[Any, ...])

need = itemgetter(0)


def last(steps: Sequence[tuple[Any, ...]], size: int) -> int:
    """The last step that needs no more; -1 if there is none."""
    return bisect_right(steps, size, key=need) - 1


def together(left: Sequence[tuple[Any, ...]], right: Sequence[tuple[Any, ...]]) -> list[tuple[int, int, int, int]]:
    """Both, with the same bytes: (need, cost, step of the one, step of the other), the last of each at every need."""
    needs = sorted({step[0] for step in (*left, *right)})
    found: list[tuple[int, int, int, int]] = []
    a = b = -1
    for size in needs:
        a += a + 1 < len(left) and left[a + 1][0] == size
        b += b + 1 < len(right) and right[b + 1][0] == size
        if a >= 0 and b >= 0:
            found.append((size, left[a][1] + right[b][1], a, b))
    return found


def falling(steps: Sequence[AnyStep]) -> list[AnyStep]:
    """Sorted steps without those that are no cheaper than one that needs less."""
    found: list[AnyStep] = []
    least = -1
    for step in steps:
        if step[1] < least or not found:
            if found and found[-1][0] == step[0]:
                found.pop()
            found.append(step)
            least = step[1]
    return found


def thin(steps: Sequence[AnyStep], most: int) -> list[AnyStep]:
    """At most so many falling steps and one: the first, and the cheapest of each stretch of bytes."""
    found = falling(steps)
    if len(found) <= most:
        return found
    low = found[0][0]
    width = (found[-1][0] - low) // most + 1
    cheapest = {(step[0] - low) // width: step for step in found}
    return falling([found[0], *cheapest.values()])
