"""Step functions of the budget as arrays: a recursion over a long chain makes thousands of them.

A way says: from so many bytes on, so much time is possible. Ways are sorted by bytes, and then fall in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Ways:
    """Arrays of the same length, one entry for each way.

    Attributes:
        need: bytes. cost: nanoseconds. how: what is done first, a number of the owner's. inner: the way that
            follows, or that is inside. rest: the way after that.
    """

    need: Integers
    cost: Integers
    how: Integers
    inner: Integers
    rest: Integers

    def last(self, size: int) -> int:
        """The last way that needs no more; -1 if there is none."""
        return int(np.searchsorted(self.need, size, side="right")) - 1

    def at_least(self, size: int) -> Ways:
        """With so many bytes for each of them."""
        return Ways(np.maximum(self.need, size), self.cost, self.how, self.inner, self.rest)


def nothing() -> Ways:
    """The one way to do nothing."""
    zero = np.zeros(1, dtype=np.int64)
    return Ways(zero, zero, zero, zero, zero)


def then(own: int, held: int, cost: int, how: int, inner: Ways) -> Ways:
    """What needs `own` bytes and holds some meanwhile, and then any of the inner ways."""
    first = max(0, inner.last(own - held))
    index = np.arange(first, len(inner.need))
    need, spent = np.maximum(inner.need[first:] + held, own), inner.cost[first:] + cost
    return Ways(need, spent, np.full_like(need, how), index, np.zeros_like(need))


def both(inside: Ways, rest: Ways, relief: int, cost: int, how: int) -> Ways:
    """One after the other with the same bytes; the second has `relief` bytes beside them."""
    need = np.concatenate((inside.need, rest.need - relief))
    a = np.searchsorted(inside.need, need, side="right") - 1
    b = np.searchsorted(rest.need, need + relief, side="right") - 1
    possible = (a >= 0) & (b >= 0)
    need, a, b = need[possible], a[possible], b[possible]
    return Ways(need, inside.cost[a] + rest.cost[b] + cost, np.full_like(need, how), a, b)


def best(some: Sequence[Ways], limit: int, most: int) -> Ways:
    """Those of all that cost less than every one that needs less, up to a limit of bytes; the first in any case.

    At most so many and one: the first, and the cheapest of each stretch of bytes.
    """
    need, cost = (np.concatenate([getattr(one, name) for one in some]) for name in ("need", "cost"))
    order = np.argsort(need, kind="stable")  # of sorted pieces: much faster than by both
    need, cost = need[order], cost[order]
    falling = np.ones(len(cost), dtype=bool)
    falling[1:] = cost[1:] < np.minimum.accumulate(cost)[:-1]
    falling[1:] &= need[1:] <= limit
    order, need = order[falling], need[falling]
    falling = np.ones(len(need), dtype=bool)
    falling[:-1] = need[:-1] < need[1:]
    order, need = order[falling], need[falling]
    if len(need) > most:
        stretch = (need - need[0]) // ((need[-1] - need[0]) // most + 1)
        chosen = np.ones(len(need), dtype=bool)
        chosen[1:-1] = stretch[1:-1] != stretch[2:]
        order = order[chosen]
    return Ways(*(np.concatenate([getattr(one, name) for one in some])[order] for name in Ways.__slots__))
