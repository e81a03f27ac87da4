"""Other batch sizes than the planned one, from a profile that was taken at two: no torch, nothing runs.

Bytes and times grow with the batch as ``a + c·n``, or as ``a + c·n²`` where a straight line through the two
sizes would start below zero (scores of every pair in the batch).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from budgetopt import solvers
from budgetopt._arguments import headroom_bytes
from budgetopt._errors import BudgetOptError
from budgetopt._problem import UNSEEN, to_problem
from budgetopt._units import parse_bytes
from budgetopt.solvers import memory
from budgetopt.solvers.problem import Choice, Segment

if TYPE_CHECKING:  # a profile tells its own largest batch
    from budgetopt._schema import Profile, Smaller

MOST = 1 << 20
"""Batches beyond this are not looked for."""

SECONDS = 4.0
"""For the smallest peak of one batch size."""


def at_batch(profile: Profile, batch: int) -> Profile:
    """The profile as it would be at another batch size, by the two at which it was taken.

    Raises:
        BudgetOptError: the profile knows one size only, or `batch` is less than 1.
    """
    small = _needed(profile)
    if batch < 1:
        raise BudgetOptError(f"batch={batch}: give at least 1")
    if batch == profile.batch:
        return profile
    grow = _growth(small.batch, profile.batch, batch)
    operators = tuple(
        o.model_copy(update={"workspace": grow(less, o.workspace), "time_ns": o.time_ns * batch // profile.batch})
        for o, less in zip(profile.operators, small.workspaces, strict=True)
    )
    storages = tuple(grow(less, more) for less, more in zip(small.storages, profile.storages, strict=True))
    ratio = batch / profile.batch
    values = tuple(
        v.model_copy(
            update={
                "half_bytes": _scaled_half(v.half_bytes, profile.storages[v.storage], storages[v.storage]),
                "codec_ns": round(v.codec_ns * ratio),
            }
        )
        for v in profile.values
    )
    fixed = profile.fixed.model_copy(update={"sample": grow(small.sample, profile.fixed.sample)})
    return profile.model_copy(
        update={
            "operators": operators,
            "storages": storages,
            "values": values,
            "fixed": fixed,
            "step_ns": round(profile.step_ns * ratio),
        }
    )


def _needed(profile: Profile) -> Smaller:
    if profile.smaller is None:
        raise BudgetOptError(
            "this profile was taken at one batch size only, so it can't tell of others: "
            f"{profile.one_size or 'the sample has no batch dimension of two or more'}"
        )
    return profile.smaller


def _growth(small: int, big: int, batch: int) -> Callable[[int, int], int]:
    """Carries bytes at the batch sizes `small` and `big` on to `batch`, rounded up."""

    def grow(less: int, more: int) -> int:
        low, high, wanted = small, big, batch
        if less * big < more * small:
            low, high, wanted = low * low, high * high, wanted * wanted
        return max(0, less - (less - more) * (wanted - low) // (high - low))

    return grow


def peak_at(profile: Profile, choices: Sequence[Choice], batch: int, segments: Sequence[Segment] = ()) -> int:
    """Predicted peak (bytes) of a choice at another batch size."""
    peak: int = memory.simulate(to_problem(at_batch(profile, batch), 0), choices, segments).peak
    return peak


def largest_planned(profile: Profile, limit: int, choices: Sequence[Choice], segments: Sequence[Segment] = ()) -> int:
    """The largest batch at which the predicted peak of a choice is within `limit` bytes, or 0."""
    return _largest(lambda batch: peak_at(profile, choices, batch, segments) <= limit)


def largest_within(
    profile: Profile, budget: int | str, *, allow: Iterable[str], exclude: Iterable[str], headroom: int | str
) -> int:
    """As :func:`largest`, for a budget as users give it."""
    limit = parse_bytes(budget, total=None, free=None)
    return largest(profile, limit - headroom_bytes(headroom, limit) - UNSEEN, allow, exclude)


def largest(profile: Profile, limit: int, allow: Iterable[str], exclude: Iterable[str]) -> int:
    """The largest batch at which some choice has a predicted peak within `limit` bytes, or 0."""
    allow, exclude = tuple(allow), tuple(exclude)

    def least(batch: int) -> memory.Simulation:
        problem = to_problem(at_batch(profile, batch), 0, allow=allow, exclude=exclude)
        return solvers.smallest(problem, time_limit=SECONDS)

    lowest = least(profile.batch)
    found = largest_planned(profile, limit, lowest.choices, lowest.segments)
    while found < MOST:
        lowest = least(found + 1)  # there, another choice may be the least
        if lowest.peak > limit:
            break
        found = max(found + 1, largest_planned(profile, limit, lowest.choices, lowest.segments))
    return found


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest number that fits, by doubling and halving; what fits is all numbers up to some point."""
    low, high = 0, 1
    while high <= MOST and fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _scaled_half(half: int, before: int, after: int) -> int:
    """fp16 bytes of a value whose storage has another size now: the same share of it, rounded up."""
    return -(-half * after // before) if before else 0
