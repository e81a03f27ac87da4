"""How long operators take on a device that is not here: a roofline model.

Williams et al., "Roofline: an insightful visual performance model" (2009): an operator takes as long as the slower of
its arithmetic at the peak rate and its bytes at the peak bandwidth, and no less than a launch. Real kernels reach 50 to
90 % of either, so these times are too short; what plans depend on is what operators take beside each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils.flop_counter import flop_registry

from budgetopt import _device
from budgetopt._operators import Info, tensors

_aten: Any = torch.ops.aten
_HALVES: Final = (torch.float16, torch.bfloat16)
_SAME_WORK: Final[Mapping[Any, Any]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
    _aten.linear: _aten.mm,
}
"""The CPU's name of an operator, and the one whose arithmetic torch's table knows."""
_TRIED: Final = 1024
"""Rows of the matrices with which this machine's own rate is measured."""
_CODEC_PASSES: Final = 2
"""Kernels of fp16 there, and again of fp16 back: the largest value, and the scaled cast."""


@dataclass(frozen=True, slots=True)
class Device:
    """What a roofline knows of a device.

    Attributes:
        name: as :func:`budgetopt.profile` takes it. kind: torch's type of device. memory: bytes (0: not said).
        bandwidth: bytes per second. rate: multiply-and-adds count two, per second, of fp32 without TF32, as torch
            multiplies by default. half_rate: of fp16 and bf16. launch_ns: the least that an operator takes.
    """

    name: str
    kind: str
    memory: int
    bandwidth: float
    rate: float
    half_rate: float
    launch_ns: int = 5_000

    def time_ns(self, func: Any, info: Info, args: Any, kwargs: Any, out: Any) -> int:
        """Nanoseconds of one call; what only makes views takes none."""
        if info.skip:
            return 0
        rate = self.half_rate if _is_half(out) else self.rate
        seconds = max(_work(func, args, kwargs, out) / rate, _traffic(args, kwargs, out) / self.bandwidth)
        return max(self.launch_ns, math.ceil(seconds * 1e9))

    def codec_ns(self, nbytes: int) -> int:
        """Nanoseconds to store and load `nbytes` of fp32 in fp16."""
        moved = nbytes * 7 // 2  # read for the scale, read and written half as large; read so and written back
        return 2 * _CODEC_PASSES * self.launch_ns + math.ceil(moved / self.bandwidth * 1e9)


_GIB: Final = 1 << 30
_KNOWN: Final = (
    Device("a100", "cuda", 80 * _GIB, 2.039e12, 19.5e12, 312e12),
    Device("h100", "cuda", 80 * _GIB, 3.35e12, 66.9e12, 989e12),
    Device("h200", "cuda", 141 * 10**9, 4.8e12, 66.9e12, 989e12),
    Device("rtx4090", "cuda", 24 * _GIB, 1.008e12, 82.6e12, 165.2e12),
    Device("t4", "cuda", 16 * _GIB, 0.32e12, 8.1e12, 65e12),
)
"""Peak rates, dense, of the makers' data sheets: A100, H100 (80 GB) and H200 as SXM, RTX 4090 (sums in fp32), T4."""


@dataclass
class _Measured:
    """This machine's CPU, measured once per process and number of threads."""

    found: dict[int, Device] = field(default_factory=dict)

    def device(self) -> Device:
        threads = torch.get_num_threads()
        if threads not in self.found:
            self.found[threads] = _this_cpu()
        return self.found[threads]


_CPU: Final = _Measured()
NAMES: Final = ("cpu", *(device.name for device in _KNOWN))


def device(name: str) -> Device | None:
    """The device of that name, ``"cpu"`` measured here; None if there is none. Spaces, dashes and case don't matter."""
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    if plain == "cpu":
        return _CPU.device()
    return next((one for one in _KNOWN if one.name == plain), None)


def _this_cpu() -> Device:
    a, b = torch.ones(_TRIED, _TRIED), torch.ones(_TRIED, _TRIED)
    out = torch.empty(_TRIED, _TRIED)
    work = _best(lambda: torch.mm(a, b, out=out))
    copy = _best(lambda: out.copy_(a))
    one = torch.ones(1)
    launch = _best(lambda: one.add_(one))
    rate = 2 * _TRIED**3 / work
    return Device("cpu", "cpu", 0, 2 * a.nbytes / copy, rate, rate, launch_ns=max(1, round(launch * 1e9)))


def _best(call: Callable[[], object]) -> float:
    """Seconds, the fastest of some."""
    here = torch.device("cpu")
    call()
    return max(1, min(_device.timed(here, call) for _ in range(7))) / 1e9


def _is_half(out: Any) -> bool:
    first = next(tensors(out), None)
    return first is not None and first.dtype in _HALVES


def _work(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Floating point operations, by torch's own table; 0 for what it does not list, which moves bytes at most."""
    packet = getattr(func, "_overloadpacket", func)
    count = flop_registry.get(_SAME_WORK.get(packet, packet))
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))


def _traffic(args: Any, kwargs: Any, out: Any) -> int:
    """Bytes of all tensors that are read and written; of an expanded one, those that are there."""
    return sum(min(t.numel() * t.element_size(), _there(t)) for t in tensors([args, kwargs, out]))


def _there(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else 0
