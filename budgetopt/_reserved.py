"""What CUDA's caching allocator reserves for a plan, predicted from the recorded step. No torch.

Not yet measured on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import cycle
from math import prod

from budgetopt import solvers
from budgetopt._schema import Profile
from budgetopt.solvers.problem import Choice, Problem, Segment


def reserved_bytes(
    profile: Profile, problem: Problem, choices: Sequence[Choice], segments: Sequence[Segment] = ()
) -> int:
    """Most bytes that the allocator reserves in steps under `choices`; 0 where the device has no such allocator."""
    if profile.environment.device != "cuda":
        return 0
    everything, trained = _parameters(profile)
    fixed, workspace = profile.fixed, profile.optimizer_workspace
    resident = [
        *_in_blocks(fixed.parameter, everything),
        fixed.buffer,
        fixed.sample,
        *_in_blocks(fixed.gradient, trained),
        *_in_blocks(fixed.optimizer, trained),
    ]
    pieces = {len(profile.operators): tuple(_in_blocks(workspace, sorted(trained, reverse=True)))} if workspace else {}
    return int(solvers.reserved(problem, choices, resident, pieces, segments).peak)


def _parameters(profile: Profile) -> tuple[list[int], list[int]]:
    """Bytes of each parameter, of all and of those that are trained."""
    trained = set(profile.fingerprint["trainable"])
    sizes = {name: prod(shape) * _width(dtype) for name, shape, dtype in profile.fingerprint["parameters"]}
    return list(sizes.values()), [size for name, size in sizes.items() if name in trained]


def _width(dtype: str) -> int:
    """Bytes of an element: the first number in ``torch.float32``, ``torch.float8_e4m3fn`` … counts bits."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1


def _in_blocks(total: int, sizes: Sequence[int]) -> Iterator[int]:
    """`total` bytes as blocks of `sizes`, over and over; the last is cut to what is left."""
    sizes = [size for size in sizes if size] or [total]
    for size in cycle(sizes):
        if total <= 0:
            return
        yield min(size, total)
        total -= size
