"""Tell that a step died for want of memory, and see that nothing of it is held when the next one begins."""

from __future__ import annotations

import gc
from typing import Final

import torch

_SIGNS: Final = (
    "can't allocate memory",  # DefaultCPUAllocator
    "not enough memory",  # the same on Windows
    "bad_alloc",  # C++
    "out of memory",  # CUDA's runtime, where not torch's allocator asked
    "ALLOC_FAILED",  # cuBLAS, cuDNN
)
"""What errors say that have no type of their own."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that the device or the host had no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def let_go(device: torch.device) -> None:
    """Free what only circles hold and what the allocator caches; call it when the error itself is gone."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
