"""Memory over a step as few points that still show its highest. No torch.

How far a step has come is told by the bytes that it has allocated so far: it is the same in a prediction and in a
measurement, which see the same large blocks and not the same small ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

SLICES: Final = 400
"""Points that the picture of a step has at most."""


def tops(sizes: Sequence[int], slices: int = SLICES) -> list[int]:
    """How many blocks were taken or given back at the highest moment of each slice of the step.

    Args:
        sizes: bytes of each block that is taken (more than 0) or given back (less), in order.

    Returns:
        one number for each of at most so many slices, in each of which as many bytes are allocated.
    """
    levels = list(accumulate(sizes, initial=0))
    taken = list(accumulate((max(0, size) for size in sizes), initial=0))
    count = max(1, min(slices, sum(size > 0 for size in sizes)))
    found: list[int] = []
    for at, level in enumerate(levels):
        here = min(count - 1, taken[at] * count // max(1, taken[-1]))
        if here >= len(found):  # a block larger than a slice fills the ones before
            found += [at - 1] * (here - len(found)) + [at]
        elif level > levels[found[-1]]:
            found[-1] = at
    return found


def highest(sizes: Sequence[int], slices: int = SLICES) -> tuple[int, ...]:
    """The highest level of each slice of the step, above that at its start; the highest of all is among them."""
    levels = list(accumulate(sizes, initial=0))
    return tuple(levels[at] for at in tops(sizes, slices))
