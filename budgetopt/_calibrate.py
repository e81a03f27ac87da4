"""What our own work costs on this machine: recording an operator, running one again, fp16 there and back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F

from budgetopt import _codec, _device
from budgetopt._operators import Info
from budgetopt._record import Recorder
from budgetopt._script import Script
from budgetopt._values import Counters
from budgetopt.solvers.problem import Choice

_LAYERS: Final = 16
_OPERATORS: Final = 4 * _LAYERS
_ROUNDS: Final = 7
_CODEC_LEAST: Final = 1 << 12
_CODEC_MOST: Final = 1 << 20


class Costs(NamedTuple):
    """Nanoseconds per operator."""

    record_ns: int
    replay_ns: int


class _Drop:
    script: Script | None = None
    verify = False
    snapshot = False

    def unplanned(self, info: Info, tensor: torch.Tensor) -> int:
        """Everything is made again."""
        return int(Choice.RECOMPUTE)


def own_costs() -> Costs:
    """Measure tiny layers on the CPU, plain, recorded and replayed; some milliseconds.

    Layers as models have them: what operators that only make views cost, and what autograd saves, is in the figure of
    each recorded operator.
    """
    x, weight, bias = torch.zeros(8, 8), torch.zeros(8, 8, requires_grad=True), torch.zeros(8, requires_grad=True)
    plain = _best(lambda: _chain(x, weight, bias))
    recorded, replayed = [], []
    for _ in range(_ROUNDS):
        recorder = Recorder(_Drop(), Counters())
        hooks = torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda handle: handle.unpack())
        with torch.enable_grad(), hooks, recorder:
            start = time.perf_counter_ns()
            y = _chain(x, weight, bias)
            recorded.append(time.perf_counter_ns() - start)
        recorder.ended()
        # The last operator's saved input is the first thing that backward asks for: all others run again.
        start = time.perf_counter_ns()
        assert y.grad_fn is not None
        _ = y.grad_fn._saved_self  # type: ignore[attr-defined]
        replayed.append(time.perf_counter_ns() - start)
    return Costs(*(max(0, min(times) - plain) // _OPERATORS for times in (recorded, replayed)))


def _chain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Residual layers, and an operator that saves what they make."""
    for _ in range(_LAYERS):
        x = x + F.linear(F.gelu(F.layer_norm(x, (8,), bias, bias)), weight, bias)
    return x.sin()


def _best(call: Callable[[], object]) -> int:
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
    return min(times)


def codec_clock(device: torch.device, largest: int) -> Callable[[int], int]:
    """Nanoseconds to store and load `nbytes` of fp32, by one measurement.

    Args:
        largest: bytes of the largest storage of the step; half of it is tried, for that fits where the step does.
    """
    size = min(max(largest // 8 * 4, _CODEC_LEAST), _CODEC_MOST)
    storage = torch.zeros(size // 4, device=device).untyped_storage()

    def both() -> None:
        _codec.load(_codec.store(storage, torch.float32))

    both()
    ns = min(_device.timed(device, both) for _ in range(5))
    return lambda nbytes: max(1, ns * nbytes // size)
