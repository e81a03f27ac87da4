"""What our own work costs on this machine: recording an operator, running one again, fp16 there and back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from budgetopt import _codec, _device
from budgetopt._operators import Info
from budgetopt._record import Recorder
from budgetopt._script import Script
from budgetopt._values import Counters
from budgetopt.solvers.problem import Choice

_LENGTH: Final = 64
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
    """Measure a chain of tiny operators on the CPU, plain, recorded and replayed; some milliseconds."""
    x = torch.zeros(4, requires_grad=True)
    plain = _best(lambda: _chain(x))
    recorded, replayed = [], []
    for _ in range(_ROUNDS):
        recorder = Recorder(_Drop(), Counters())
        hooks = torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda handle: handle.unpack())
        with torch.enable_grad(), hooks, recorder:
            start = time.perf_counter_ns()
            y = _chain(x)
            recorded.append(time.perf_counter_ns() - start)
        recorder.ended()
        # The last operator's saved input is the first thing that backward asks for: all others run again.
        start = time.perf_counter_ns()
        assert y.grad_fn is not None
        _ = y.grad_fn._saved_self  # type: ignore[attr-defined]
        replayed.append(time.perf_counter_ns() - start)
    record = max(0, min(recorded) - plain) // _LENGTH
    return Costs(record, max(0, min(replayed) - plain) // (_LENGTH - 1))


def _chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(_LENGTH):
        x = x.sin()
    return x


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
