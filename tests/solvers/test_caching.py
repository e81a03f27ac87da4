"""The caching allocator on paper: each of its rules by hand, then all of them on random steps."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from budgetopt.solvers import Choice, Kind, simulate
from budgetopt.solvers.caching import Allocator, Block, reserved

from .steps import Step, network, transformer

K, R = Choice.KEEP, Choice.RECOMPUTE
KIB, MIB = 1 << 10, 1 << 20


def taken(allocator: Allocator, *sizes: int) -> list[Block]:
    return [allocator.allocate(size) for size in sizes]


@pytest.mark.parametrize(("nbytes", "takes"), [(1, 512), (512, 512), (513, 1024), (MIB - 1, MIB)])
def test_sizes_are_rounded_to_512_bytes(nbytes: int, takes: int) -> None:
    allocator = Allocator()
    taken(allocator, nbytes)
    assert (allocator.allocated, allocator.reserved) == (takes, 2 * MIB)


@pytest.mark.parametrize(
    ("nbytes", "segment"),
    [
        (MIB, 2 * MIB),  # the largest small block
        (MIB + 1, 20 * MIB),  # the smallest large one
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),  # from here on a segment of its own
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_segments(nbytes: int, segment: int) -> None:
    allocator = Allocator()
    taken(allocator, nbytes)
    assert allocator.reserved == segment


def test_small_blocks_share_segments_of_two_mib() -> None:
    allocator = Allocator()
    taken(allocator, *[512 * KIB] * 4)
    assert allocator.reserved == 2 * MIB
    taken(allocator, 512)
    assert allocator.reserved == 4 * MIB


def test_the_pools_do_not_share() -> None:
    allocator = Allocator()
    allocator.give_back(allocator.allocate(5 * MIB))
    taken(allocator, 1)  # though 20 MiB of the large pool are free
    assert allocator.reserved == 22 * MIB


def test_a_block_of_the_small_pool_is_split_down_to_512_bytes() -> None:
    allocator = Allocator()
    taken(allocator, MIB, MIB - 512)
    assert allocator.allocated == 2 * MIB - 512
    taken(allocator, 1)  # the last 512 bytes
    assert (allocator.allocated, allocator.reserved) == (2 * MIB, 2 * MIB)


def test_a_rest_of_at_most_one_mib_is_not_split_off_a_large_block() -> None:
    allocator = Allocator()
    taken(allocator, 11 * MIB)  # of 12: one MiB is left, and stays with the block
    assert (allocator.allocated, allocator.reserved) == (12 * MIB, 12 * MIB)
    allocator = Allocator()
    taken(allocator, 11 * MIB - 512)  # more than one MiB is left, and is free
    assert (allocator.allocated, allocator.reserved) == (11 * MIB - 512, 12 * MIB)
    taken(allocator, MIB + 512)
    assert (allocator.allocated, allocator.reserved) == (12 * MIB, 12 * MIB)


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    allocator = Allocator()
    large, _, small, _ = taken(allocator, 40 * MIB, 10 * MIB, 14 * MIB, 10 * MIB)
    allocator.give_back(large)
    allocator.give_back(small)
    assert allocator.allocate(12 * MIB).address == small.address
    assert allocator.allocate(12 * MIB).address == large.address  # the rest of the small one, 2 MiB, does not do
    assert allocator.reserved == 74 * MIB


def test_of_equal_blocks_the_one_at_the_lowest_address_is_taken() -> None:
    allocator = Allocator()
    first, _, second = taken(allocator, 10 * MIB, 10 * MIB, 10 * MIB)
    allocator.give_back(second)
    allocator.give_back(first)
    assert allocator.allocate(10 * MIB).address == first.address


def test_free_neighbours_merge_in_a_segment_and_not_beyond() -> None:
    allocator = Allocator()
    a, b, c, d = taken(allocator, *[5 * MIB] * 4)  # one segment
    e = allocator.allocate(10 * MIB)  # another
    allocator.give_back(a)
    allocator.give_back(c)
    taken(allocator, 10 * MIB)  # 5 and 5, with b in between
    assert allocator.reserved == 40 * MIB
    allocator.give_back(b)  # 15 together
    assert allocator.allocate(15 * MIB).address == a.address
    allocator.give_back(d)
    allocator.give_back(e)
    taken(allocator, 11 * MIB)  # 5 and 10 at neighbouring addresses, but of two segments
    assert allocator.reserved == 52 * MIB


def test_segments_stay_when_all_is_free() -> None:
    allocator = Allocator()
    for block in taken(allocator, 5 * MIB, 30 * MIB, 1):
        allocator.give_back(block)
    assert (allocator.allocated, allocator.reserved) == (0, 52 * MIB)
    taken(allocator, 30 * MIB, 20 * MIB)
    assert (allocator.allocated, allocator.reserved) == (50 * MIB, 52 * MIB)


@pytest.mark.parametrize("seed", range(4))
def test_blocks_never_overlap_and_merge_into_whole_segments(seed: int) -> None:
    rng, allocator = Random(seed), Allocator()
    blocks: list[Block] = []
    segments: list[int] = []
    for _ in range(600):
        if blocks and rng.random() < 0.48:
            allocator.give_back(blocks.pop(rng.randrange(len(blocks))))
        else:
            before = allocator.reserved
            blocks.append(allocator.allocate(rng.choice((rng.randint(1, MIB), rng.randint(1, 30 * MIB)))))
            segments += [allocator.reserved - before] if allocator.reserved > before else []
        assert allocator.allocated == sum(block.size for block in blocks) <= allocator.reserved
    spans = sorted((block.address, block.address + block.size) for block in blocks)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    for block in blocks:
        allocator.give_back(block)
    assert allocator.allocated == 0
    for segment in segments:  # each can be had whole: the small ones in two blocks, as more are not small
        taken(allocator, *([MIB, MIB] if segment == 2 * MIB else [segment]))
    assert allocator.allocated == allocator.reserved == sum(segments)


def fragmented() -> Step:
    """6, 2 and 6 MiB; then the 2 alone, and 13 MiB beside them."""
    step = Step(resident=30 * MIB)
    first, middle, last = (step.backward(size * MIB) for size in (6, 2, 6))
    step.event(Kind.DIE, first)
    step.event(Kind.DIE, last)
    large = step.backward(13 * MIB)
    for storage in (middle, large):
        step.event(Kind.DIE, storage)
    return step


def test_fragments_of_a_step() -> None:
    problem = fragmented().problem()
    found = reserved(problem, [])
    assert simulate(problem, []).peak == (30 + 2 + 13) * MIB
    # First step: 6, 2 and 6 of a segment of 20. Then 6 and 12 of it are free, so the 13 get a segment of 14, of which
    # one MiB is too little to be split off. Second step: 6, 2 and 6 of the 14, and the 13 of the 20.
    assert found.peak == (30 + 20 + 14) * MIB
    assert found.allocated_peak == (30 + 2 + 14) * MIB
    assert found.levels == (50 * MIB,) * 5 + (64 * MIB,) * 3


def test_resident_blocks_leave_room_in_their_segments() -> None:
    problem = fragmented().problem()
    assert reserved(problem, [], resident=(30 * MIB,)) == reserved(problem, [])
    # Six of 5 MiB leave 10 of their second segment: the 6 and the 2 go there. The last 6 get a segment of 20, which is
    # free again when the 13 come.
    found = reserved(problem, [], resident=(5 * MIB,) * 6)
    assert (found.peak, found.allocated_peak) == ((20 + 20 + 20) * MIB, (30 + 2 + 13) * MIB)


def test_a_second_step_finds_what_the_first_has_left_and_may_need_more() -> None:
    step = Step()
    for size in (8, 14, 10):
        step.backward(size * MIB)
    found = reserved(step.problem(), [])
    # First step: 8 of 20, 14, and 10 of the 12 that are left. Second: 8 of the 14, 14 of the 20, 10 of their own.
    assert found.levels == (20 * MIB, 34 * MIB, 34 * MIB)
    assert found.peak == 44 * MIB


def test_a_cached_block_that_is_too_small_does_not_help() -> None:
    step = Step()
    for size in (12, 24, 36):
        storage = step.backward(size * MIB)
        step.event(Kind.DIE, storage)
    found = reserved(step.problem(), [])
    assert found.levels == tuple(total * MIB for total in (12, 12, 36, 36, 72, 72))
    assert found.allocated_peak == 36 * MIB


def test_what_is_left_at_the_end_goes_before_the_next_step() -> None:
    step = Step()
    step.backward(16 * MIB)
    assert reserved(step.problem(), []).peak == 16 * MIB


@pytest.mark.parametrize("seed", range(10))
def test_at_least_what_the_referee_counts_is_reserved(seed: int) -> None:
    problem = network(Random(seed), 3, 12, sizes=40 * MIB).problem()
    rng = Random(seed)
    for _ in range(5):
        choices = [rng.choice(tuple(Choice)) for _ in problem.values]
        found = reserved(problem, choices)
        assert simulate(problem, choices).peak <= found.allocated_peak <= found.peak
        assert list(found.levels) == sorted(found.levels) and found.levels[-1] <= found.peak


def test_dropping_reserves_less_than_keeping() -> None:
    problem = transformer(6, unit=8 * MIB).problem()
    kept, dropped = ([choice] * len(problem.values) for choice in (K, R))
    assert reserved(problem, dropped).peak < reserved(problem, kept).peak
    assert reserved(problem, kept).peak < 1.1 * simulate(problem, kept).peak
