"""Peak, time and generator state on each kind of device: one small table of functions.

CPU peaks come from the profiler's allocation events (exact; measured against resident growth), CUDA
peaks from the caching allocator's own counters. The CUDA half is written from torch's documentation.
"""

from __future__ import annotations

import ctypes
import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from budgetopt import _host, _torch
from budgetopt._errors import ProfileError

_SUM_PIECE = 1 << 22


@dataclass
class Peak:
    """Result of a measurement.

    Attributes:
        above: highest bytes allocated above the level at the start. left: the level at the end.
        ns: wall time of the block.
        spans: per mark, highest bytes above the level at its start. highest: the allocator's own mark so far.
        sizes: bytes of each block that was taken (more than 0) or given back, in order (CPU; empty elsewhere).
        reserved: highest bytes the caching allocator reserved (CUDA; 0 elsewhere).
    """

    above: int = 0
    left: int = 0
    ns: int = 0
    reserved: int = 0
    spans: dict[str, int] = field(default_factory=dict)
    highest: int = 0
    sizes: list[int] = field(default_factory=list)


class Watching(Protocol):
    """A measurement that began, and that may be lost on the way."""

    def end(self) -> int | None:
        """Bytes at most since it began, or None where somebody else measured."""


class _Backend(Protocol):
    def synchronise(self, device: torch.device) -> None: ...

    def meter(self, device: torch.device, spans: bool) -> Any: ...

    def mark(self, device: torch.device, peak: Peak, name: str) -> Any: ...

    def watching(self, device: torch.device, there: int) -> Watching | None: ...

    def capped(self, device: torch.device, limit: int | None) -> AbstractContextManager[list[BaseException]]: ...

    def checksum(self, storage: torch.UntypedStorage) -> int: ...

    def generator(self, device: torch.device) -> torch.Generator: ...

    def total(self, device: torch.device) -> int | None: ...

    def free(self, device: torch.device) -> int | None: ...

    def context(self, device: torch.device) -> int: ...

    def capturing(self, device: torch.device) -> bool: ...

    def fragmented(self, device: torch.device) -> int: ...


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """The profiler's C++ prints a line when it starts and when it stops."""
    saved = os.dup(2)
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(sink)


class _Cpu:
    """Allocations as the profiler sees them; other threads and frees of older blocks are not seen."""

    def synchronise(self, device: torch.device) -> None:
        """Nothing runs behind the caller's back."""

    @contextmanager
    def meter(self, device: torch.device, spans: bool) -> Iterator[Peak]:
        if _torch.profiler_running():
            raise ProfileError(
                "a profiler is already running and would lose what it has collected: "
                "call budgetopt outside torch.profiler"
            )
        peak = Peak()
        profiler = _torch.MemoryProfiler()
        start = 0
        try:
            with _quiet_stderr():
                profiler.start()
            start = time.perf_counter_ns()
            yield peak
        finally:
            peak.ns = time.perf_counter_ns() - start
            try:
                with _quiet_stderr():
                    if _torch.profiler_running():  # not where Ctrl-C came before the start
                        profiler.stop()
            except BaseException:  # Ctrl-C in there: a profiler left running would refuse every later call
                if _torch.profiler_running():
                    profiler.stop()
                raise
        _read_events(profiler.events(), peak, spans)

    def mark(self, device: torch.device, peak: Peak, name: str) -> Any:
        return _torch.mark(name)

    def watching(self, device: torch.device, there: int) -> Watching | None:
        """From here on, `there` bytes being there already; None where a profiler runs."""
        return None if _torch.profiler_running() else _WatchingCpu(there)

    def capped(self, device: torch.device, limit: int | None) -> AbstractContextManager[list[BaseException]]:
        """There is no limit to set; the meter tells all."""
        return nullcontext([])

    def checksum(self, storage: torch.UntypedStorage) -> int:
        size = storage.nbytes()
        return zlib.crc32((ctypes.c_char * size).from_address(storage.data_ptr())) if size else 0

    def generator(self, device: torch.device) -> torch.Generator:
        return torch.default_generator

    def total(self, device: torch.device) -> int | None:
        return _host.total()

    def free(self, device: torch.device) -> int | None:
        return _host.free()

    def context(self, device: torch.device) -> int:
        return 0

    def capturing(self, device: torch.device) -> bool:
        return False

    def fragmented(self, device: torch.device) -> int:
        """The CPU's allocator keeps no such blocks."""
        return 0


class _WatchingCpu:
    """The profiler's allocation events; somebody else's profiler may take its place."""

    def __init__(self, there: int) -> None:
        self._there = there
        self._profiler = _torch.MemoryProfiler()
        with _quiet_stderr():
            self._profiler.start()

    def end(self) -> int | None:
        if not _torch.profiler_running() or _torch.user_profiler_running():
            return None
        with _quiet_stderr():
            self._profiler.stop()
        peak = Peak()
        _read_events(self._profiler.events(), peak, spans=False)
        return self._there + peak.above


class _WatchingCuda:
    """The allocator's high-water mark, less what is not the step's. It is the user's: nobody sets it back."""

    def __init__(self, device: torch.device, there: int) -> None:
        self._device = device
        self._others = max(0, torch.cuda.memory_allocated(device) - there)

    def end(self) -> int | None:
        return torch.cuda.max_memory_allocated(self._device) - self._others


def _read_events(events: Any, peak: Peak, spans: bool) -> None:
    """Running sum of the allocation events; for every mark the highest level inside, above its start."""
    points: list[tuple[int, int, str, int]] = []
    for event in events:
        name = event.name()
        if name == "[memory]":
            if event.device_type() == _torch.CPU:
                points.append((event.start_ns(), 1, "", event.nbytes()))
        elif spans and name.startswith("@"):
            points.append((event.start_ns(), 0, name, 0))
            points.append((event.end_ns(), 2, name, 0))
    points.sort(key=lambda point: point[:2])
    level = 0
    opened: dict[str, list[int]] = {}
    for _, kind, name, size in points:
        if kind == 0:
            opened[name] = [level, level]
        elif kind == 2:
            base, top = opened.pop(name, [0, 0])
            peak.spans[name] = top - base
        else:
            level += size
            peak.sizes.append(size)
            peak.above = max(peak.above, level)
            for span in opened.values():
                span[1] = max(span[1], level)
    peak.left = level


class _Cuda:
    """The caching allocator's counters; needs no profiler."""

    def synchronise(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    @contextmanager
    def meter(self, device: torch.device, spans: bool) -> Iterator[Peak]:
        peak = Peak()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        base, start = torch.cuda.memory_allocated(device), time.perf_counter_ns()
        peak.highest = base
        try:
            yield peak
        finally:
            torch.cuda.synchronize(device)
            peak.ns = time.perf_counter_ns() - start
            peak.above = max(peak.highest, torch.cuda.max_memory_allocated(device)) - base
            peak.left = torch.cuda.memory_allocated(device) - base
            peak.reserved = torch.cuda.max_memory_reserved(device)

    @contextmanager
    def mark(self, device: torch.device, peak: Peak, name: str) -> Iterator[None]:
        peak.highest = max(peak.highest, torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
        base = torch.cuda.memory_allocated(device)
        yield
        peak.spans[name] = torch.cuda.max_memory_allocated(device) - base

    def watching(self, device: torch.device, there: int) -> Watching | None:
        return _WatchingCuda(device, there)

    def checksum(self, storage: torch.UntypedStorage) -> int:
        """Position-weighted sum of the bytes in pieces: any changed, moved or swapped byte changes it."""
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
        flat.set_(storage)
        total = torch.zeros((), dtype=torch.int64, device=storage.device)
        for start in range(0, flat.numel(), _SUM_PIECE):
            piece = flat[start : start + _SUM_PIECE].to(torch.int64)
            weights = torch.arange(1, piece.numel() + 1, device=storage.device).mul_(2654435761)
            total = total.mul_(31).add_((piece + 1).mul_(weights).sum())
        return int(total)

    @contextmanager
    def capped(self, device: torch.device, limit: int | None) -> Iterator[list[BaseException]]:
        """The allocator may reserve no more than `limit` bytes, so that fragmentation counts.

        Yields a list, empty unless the block died of that.
        """
        died: list[BaseException] = []
        if limit is None:
            yield died
            return
        before = torch.cuda.get_per_process_memory_fraction(device)
        torch.cuda.empty_cache()  # what other steps left must not count
        torch.cuda.set_per_process_memory_fraction(min(before, limit / (self.total(device) or limit)), device)
        try:
            yield died
        except torch.OutOfMemoryError as error:
            died.append(error)
        finally:
            torch.cuda.set_per_process_memory_fraction(before, device)

    def generator(self, device: torch.device) -> torch.Generator:
        index = device.index if device.index is not None else torch.cuda.current_device()
        generator: torch.Generator = torch.cuda.default_generators[index]
        return generator

    def total(self, device: torch.device) -> int | None:
        return int(torch.cuda.mem_get_info(device)[1])

    def free(self, device: torch.device) -> int | None:
        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + reusable

    def context(self, device: torch.device) -> int:
        """Bytes taken on the device by anything but this process's allocator."""
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(total - free) - torch.cuda.memory_reserved(device))

    def capturing(self, device: torch.device) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def fragmented(self, device: torch.device) -> int:
        """Bytes that the allocator reserved at most, beyond what was allocated at most; 0 where its segments grow."""
        settings = (os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
        if any("expandable_segments:true" in text.replace(" ", "").lower() for text in settings):
            return 0
        return torch.cuda.max_memory_reserved(device) - torch.cuda.max_memory_allocated(device)


_BACKENDS: dict[str, _Backend] = {"cpu": _Cpu(), "cuda": _Cuda()}


def supported(device: torch.device) -> bool:
    """Whether :func:`backend` knows this kind of device."""
    return device.type in _BACKENDS


def backend(device: torch.device) -> _Backend:
    """The functions for `device`.

    Raises:
        ProfileError: budgetopt has no way to measure on this kind of device.
    """
    found = _BACKENDS.get(device.type)
    if found is None:
        raise ProfileError(
            f"device {device.type!r} is not supported yet: budgetopt measures on {' and '.join(_BACKENDS)}; "
            f"here the model could move to {' or '.join(_present())}"
        )
    return found


def _present() -> list[str]:
    """Kinds of device that this machine has and that can be measured."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return [kind for kind in _BACKENDS if kind == "cpu" or (accelerator is not None and kind == accelerator.type)]


def checksum(storage: torch.UntypedStorage) -> int:
    """A number that differs when the bytes differ."""
    return backend(storage.device).checksum(storage)


def rounded(device: torch.device, nbytes: int) -> int:
    """What an allocation of `nbytes` takes: CUDA's caching allocator hands out multiples of 512 bytes."""
    return -(-nbytes // 512) * 512 if device.type == "cuda" else nbytes


def stream_of(tensor: torch.Tensor | None) -> Callable[[], int] | None:
    """A function that tells the current stream of the tensor's device, or None where there is but one."""
    if tensor is None or not tensor.is_cuda:
        return None
    device = tensor.device
    return lambda: int(torch.cuda.current_stream(device).cuda_stream)


def fill(storage: torch.UntypedStorage, byte: int) -> None:
    """Set every byte."""
    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(byte)


def generator(device: torch.device) -> torch.Generator:
    """The generator that random operators on `device` draw from by default."""
    return backend(device).generator(device)


def timed(device: torch.device, call: Callable[[], Any]) -> int:
    """Nanoseconds of one call, the device's queue emptied before and after."""
    kind = backend(device)
    kind.synchronise(device)
    start = time.perf_counter_ns()
    call()
    kind.synchronise(device)
    return time.perf_counter_ns() - start
