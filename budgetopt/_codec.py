"""Store one storage in fp16 and load it back.

A power-of-two scale puts the largest finite magnitude just below 2**15, so that nothing overflows and
small magnitudes do not underflow needlessly; scaling by a power of two is exact, so the only error is
the rounding to 11 bits. Infinities and NaN stay what they are. Nothing waits for the device: the scale
is a tensor. The work is done in pieces, so that it needs little memory on top of the fp16 copy.
"""

from __future__ import annotations

from typing import Final

import torch

from budgetopt.solvers.memory import CODEC_WORKSPACE

WIDE: Final = (torch.float32, torch.float64)
"""Types that fp16 makes smaller."""

_TOP: Final = 15
_LIMIT: Final = {torch.float32: 120, torch.float64: 1015}
"""The scale's exponent at most: the scale and its inverse are normal numbers of the source's type."""

_TEMPORARIES: Final = 4
"""Temporary pieces of the source's size alive at once, at most."""


class Stored:
    """A storage in fp16.

    Attributes:
        half: flat fp16 copy. inverse: scale to multiply with after loading. dtype, nbytes: of the source.
    """

    __slots__ = ("dtype", "half", "inverse", "nbytes")

    def __init__(self, half: torch.Tensor, inverse: torch.Tensor, dtype: torch.dtype, nbytes: int) -> None:
        self.half = half
        self.inverse = inverse
        self.dtype = dtype
        self.nbytes = nbytes


def _pieces(flat: torch.Tensor) -> list[slice]:
    step = CODEC_WORKSPACE // (_TEMPORARIES * flat.element_size())
    return [slice(start, start + step) for start in range(0, flat.numel(), step)]


def store(storage: torch.UntypedStorage, dtype: torch.dtype) -> Stored:
    """The whole of `storage`, read as `dtype` (one of :data:`WIDE`), in fp16."""
    flat = torch.empty(0, dtype=dtype, device=storage.device).set_(storage)
    pieces = _pieces(flat)
    largest = torch.zeros((), dtype=dtype, device=storage.device)
    for piece in pieces:
        finite = torch.nan_to_num(flat[piece], nan=0.0, posinf=0.0, neginf=0.0)
        largest = torch.maximum(largest, finite.abs_().amax())
        del finite
    exponent = (_TOP - torch.frexp(largest).exponent).clamp_(-_LIMIT[dtype], _LIMIT[dtype])
    exponent = torch.where(largest > 0, exponent, torch.zeros_like(exponent))
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    half = torch.empty(flat.numel(), dtype=torch.float16, device=storage.device)
    for piece in pieces:
        half[piece] = flat[piece] * scale
    return Stored(half, torch.ldexp(torch.ones_like(largest), -exponent), dtype, storage.nbytes())


def load(stored: Stored) -> torch.UntypedStorage:
    """A new storage with what :func:`store` was given, rounded to fp16."""
    flat = torch.empty(stored.half.numel(), dtype=stored.dtype, device=stored.half.device)
    for piece in _pieces(flat):
        flat[piece] = stored.half[piece]
        flat[piece] *= stored.inverse
    return flat.untyped_storage()
