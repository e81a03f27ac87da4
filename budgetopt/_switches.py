"""Process-wide switches that kernels read as they run: values are made again under those of their forward.

``torch.backends.mkldnn.flags``, ``torch.backends.cudnn.flags``, deterministic algorithms, TF32: each may be set around
the forward alone. They are noted once per region call; what a model switches inside of it, verifying finds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from budgetopt._torch import required

_algorithms, _warn_only = required("_get_deterministic_algorithms"), required("_get_deterministic_algorithms_warn_only")
_set_algorithms = required("_set_deterministic_algorithms")


def _deterministic() -> tuple[bool, bool]:
    return _algorithms(), _warn_only()


def _set_deterministic(wanted: tuple[bool, bool]) -> None:
    _set_algorithms(wanted[0], warn_only=wanted[1])


_NAMES = ("mkldnn_enabled", "cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic")
_PRECISIONS = ("float32_matmul_precision", "cudnn_allow_tf32")
_READ: list[Callable[[], Any]] = [_deterministic, *(required(f"_get_{name}") for name in _NAMES)]
_READ_PRECISION: list[Callable[[], Any]] = [required(f"_get_{name}") for name in _PRECISIONS]
_SET: list[Callable[[Any], None]] = [_set_deterministic]
_SET += [required(f"_set_{name}") for name in (*_NAMES, *_PRECISIONS)]

Switches = tuple[Any, ...]


def current() -> Switches:
    """How they are set now; precisions of float32 are left out where a program sets them by both of torch's ways."""
    found = [read() for read in _READ]
    try:
        return (*found, *[read() for read in _READ_PRECISION])
    except RuntimeError:
        return tuple(found)


def switch(wanted: Switches) -> None:
    """Set those that are not set so."""
    for old, new, put in zip(current(), wanted, _SET, strict=False):
        if old != new:
            put(new)
