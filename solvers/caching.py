"""CUDA's caching allocator on paper: what a step *reserves*, beside what it allocates.

The rules are those of torch's ``c10/cuda/CUDACachingAllocator.cpp`` with its default settings, for one stream:

* Sizes are rounded up to multiples of 512 bytes. Up to 1 MiB a block is from the small pool, else from the large one.
* The smallest free block of the pool that is large enough is taken, of equals the one at the lowest address.
* Where none is, a segment is reserved: 2 MiB for the small pool; 20 MiB for a block of less than 10 MiB; else what the
  block takes, rounded up to 2 MiB.
* What is left of a free block is split off if it is at least 512 bytes (small pool) or more than 1 MiB (large pool);
  otherwise it belongs to the block, and counts as allocated.
* A block that goes back is merged with free neighbours in its segment.
* Segments go back to the device only where it has no more memory, so here never: under a cap the allocator may still
  get by with less.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .problem import Choice, Problem, Segment
from .trace import Action, trace

UNIT = 512
SMALL = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
OWN_SEGMENT = 10 << 20
SEGMENT_UNIT = 2 << 20
STEPS = 2
"""The first step finds an empty cache, later ones what the one before has left."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """Bytes of a step, resident ones included, as the allocator counts them.

    Attributes:
        peak: most that is reserved, over all simulated steps. allocated_peak: most that is in blocks that are in use.
        levels: what is reserved after each event of the first step; it never falls.
    """

    peak: int
    allocated_peak: int
    levels: tuple[int, ...]


class Block:
    """A stretch of a segment, in use or free, with its neighbours."""

    __slots__ = ("address", "after", "before", "free", "size", "small")

    def __init__(self, address: int, size: int, small: bool) -> None:
        self.address, self.size, self.small = address, size, small
        self.free = False
        self.before: Block | None = None
        self.after: Block | None = None


class Allocator:
    """Hands out blocks.

    Attributes:
        reserved: bytes of all segments. allocated: bytes of the blocks in use.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self.allocated = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._at: dict[int, Block] = {}
        self._top = 0

    def allocate(self, nbytes: int) -> Block:
        """A block of at least ``nbytes`` (more than 0)."""
        size = _up(nbytes, UNIT)
        small = size <= SMALL
        block = self._best(size, small) or self._segment(size, small)
        rest = block.size - size
        if rest >= UNIT if small else rest > SMALL:
            self._split(block, size)
        block.free = False
        self.allocated += block.size
        return block

    def give_back(self, block: Block) -> None:
        """A block is no longer in use."""
        self.allocated -= block.size
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._take_out(other)
                block = _merged(*sorted((block, other), key=_address))
        self._put_in(block)

    def _best(self, size: int, small: bool) -> Block | None:
        free = self._free[small]
        place = bisect_left(free, (size, -1))
        return None if place == len(free) else self._take_out(self._at[free[place][1]])

    def _segment(self, size: int, small: bool) -> Block:
        if small:
            length = SMALL_SEGMENT
        else:
            length = LARGE_SEGMENT if size < OWN_SEGMENT else _up(size, SEGMENT_UNIT)
        block = Block(self._top, length, small)
        self._top += length
        self.reserved += length
        return block

    def _split(self, block: Block, size: int) -> None:
        """The front is what was asked for, the rest is free."""
        rest = Block(block.address + size, block.size - size, block.small)
        rest.before, rest.after = block, block.after
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.size = rest, size
        self._put_in(rest)

    def _put_in(self, block: Block) -> None:
        block.free = True
        self._at[block.address] = block
        insort(self._free[block.small], (block.size, block.address))

    def _take_out(self, block: Block) -> Block:
        free = self._free[block.small]
        del free[bisect_left(free, (block.size, block.address))]
        return self._at.pop(block.address)


def _merged(left: Block, right: Block) -> Block:
    left.size += right.size
    left.after = right.after
    if left.after is not None:
        left.after.before = left
    return left


def _address(block: Block) -> int:
    return block.address


def _up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def reserved(
    problem: Problem,
    choices: Sequence[Choice],
    resident: Iterable[int] | None = None,
    pieces: Mapping[int, Sequence[int]] | None = None,
    segments: Sequence[Segment] = (),
) -> Reserved:
    """What the allocator reserves for steps under ``choices``, one after the other, on an empty device.

    Args:
        resident: bytes of each block that is there before the step; by default one of ``problem.resident``.
        pieces: the blocks that an operator's workspace consists of, by operator; one block where nothing is said.
    """
    allocator = Allocator()
    for size in (problem.resident,) if resident is None else resident:
        if size:
            allocator.allocate(size)
    actions = trace(problem, choices, pieces, segments)
    steps = [_run(allocator, actions, len(problem.events)) for _ in range(STEPS)]
    highest = max(allocated for allocated, _ in steps)
    return Reserved(peak=allocator.reserved, allocated_peak=highest, levels=steps[0][1])


def _run(allocator: Allocator, actions: Iterable[Action], events: int) -> tuple[int, tuple[int, ...]]:
    """One step; what is left of it at the end goes before the next begins. Most allocated, and reserved by event."""
    blocks: dict[int, Block] = {}
    start, highest = allocator.reserved, allocator.allocated
    grown = [0] * events
    for event, name, size in actions:
        if size < 0:
            allocator.give_back(blocks.pop(name))
            continue
        before = allocator.reserved
        blocks[name] = allocator.allocate(size)
        grown[event] += allocator.reserved - before
        highest = max(highest, allocator.allocated)
    for block in blocks.values():
        allocator.give_back(block)
    levels = []
    for more in grown:
        start += more
        levels.append(start)
    return highest, tuple(levels)
