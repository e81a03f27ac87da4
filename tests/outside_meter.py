"""The memory of one training step on the CPU, measured from outside: no line is shared with budgetopt.

Two meters that know nothing of each other: the allocator's events as torch's profiler reports them (exact),
and the resident memory that the operating system counts for a fresh process.

As a script, on a builder that returns ``(model, sample)``::

    python tests/outside_meter.py tests.models:gpt2_small --rss
    python tests/outside_meter.py tests.models:gpt2_small --arguments '{"layers": 2}'
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity

LOW_THRESHOLD = 16 * 1024
"""Bytes from which malloc maps fresh pages, and gives them back at free: then resident memory follows."""


def peak_bytes(
    model: nn.Module,
    sample: Any,
    loss: Callable[[Any], Tensor] | None = None,
    *,
    step: Callable[[nn.Module, Any], Tensor] | None = None,
    hold_output: bool = True,
    warmup: int = 1,
) -> int:
    """Peak of forward + backward above what was resident before it, in bytes, as the allocator counts.

    Gradients are None before and after. ``warmup`` steps run first, unmeasured; like any step they move
    random states and batch norm's statistics.

    Args:
        hold_output: the output lives through the backward, as in ``out = model(x); out.loss.backward()``;
            otherwise it goes first, as in ``model(x).loss.backward()``.
        step: ``step(model, sample)`` gives the scalar loss, in place of the call and ``loss``; it holds what it holds.
    """
    return max(0, *running_bytes(model, sample, loss, step=step, hold_output=hold_output, warmup=warmup))


def running_bytes(
    model: nn.Module,
    sample: Any,
    loss: Callable[[Any], Tensor] | None = None,
    *,
    step: Callable[[nn.Module, Any], Tensor] | None = None,
    hold_output: bool = True,
    warmup: int = 1,
) -> list[int]:
    """Bytes above those resident at the start, after every allocation and free of one step, in time order."""
    for _ in range(warmup):
        _step(model, sample, loss, hold_output, step)
    gc.collect()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _step(model, sample, loss, hold_output, step)
    running, total = [0], 0
    for change in _memory_events(profiler):
        total += change
        running.append(total)
    return running


def resident_bytes(model: nn.Module, sample: Any) -> int:
    """Bytes of the distinct storages of parameters, buffers and sample."""
    tensors = [*model.parameters(), *model.buffers(), *_tensors(sample)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def rss_peak_growth(builder: str, arguments: Mapping[str, Any] | None = None, *, warmup: int = 2) -> int:
    """Growth of resident memory at the peak of one step, in bytes, in a fresh process with a quiet allocator.

    Args:
        builder: ``"module:function"``, called with ``arguments`` (JSON values), returns ``(model, sample)``.
            A builder may as well plan the model first.
        warmup: steps before the measured one, so that threads and caches are there already.
    """
    command = [sys.executable, __file__, builder, "--rss-child", "--warmup", str(warmup)]
    done = subprocess.run(
        [*command, "--arguments", json.dumps(dict(arguments or {}))],
        env=quiet_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"measuring {builder} in a fresh process failed:\n{done.stderr}")
    return int(done.stdout.split()[-1])


def quiet_environment() -> dict[str, str]:
    """For a fresh process whose resident memory follows what is allocated in it."""
    return os.environ | {
        "MALLOC_MMAP_THRESHOLD_": str(LOW_THRESHOLD),
        "MALLOC_TRIM_THRESHOLD_": "0",
        "MALLOC_TOP_PAD_": "0",
        "MALLOC_ARENA_MAX": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }


def allocated_peak(run: Callable[[], object]) -> int:
    """Peak of whatever ``run`` does above what was there before, in bytes, as the allocator counts."""
    gc.collect()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    return max(0, *accumulate(_memory_events(profiler), initial=0))


def resident_peak(run: Callable[[], object]) -> int:
    """The same as the operating system counts; honest in a :func:`quiet_environment` alone."""
    gc.collect()
    start = _status_bytes("VmRSS")
    if _reset_high_water():
        run()
        return _status_bytes("VmHWM") - start
    return _sampled_peak(run) - start


def _memory_events(profiler: torch.profiler.profile) -> list[int]:
    results: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]  # torch's own types lack nbytes
    events = [event for event in results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())  # stable: equal times stay in the order of recording
    return [event.nbytes() for event in events if event.device_type() == torch.profiler.DeviceType.CPU]


def _step(
    model: nn.Module,
    sample: Any,
    loss: Callable[[Any], Tensor] | None = None,
    hold_output: bool = True,
    step: Callable[[nn.Module, Any], Tensor] | None = None,
) -> None:
    _clear(model)
    output = None if step is not None else _call(model, sample)
    value = step(model, sample) if step is not None else (loss or _default_loss)(output)
    if not hold_output:
        del output
    value.backward()  # type: ignore[no-untyped-call]
    del value
    _clear(model)


def _clear(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _call(model: nn.Module, sample: Any) -> Any:
    if isinstance(sample, Mapping):
        return model(**sample)
    return model(*sample) if isinstance(sample, (tuple, list)) else model(sample)


def _default_loss(output: Any) -> Tensor:
    """The output's loss, or the mean of the one tensor that came out."""
    loss = output.mean() if isinstance(output, Tensor) else output["loss"]
    assert isinstance(loss, Tensor), "give a loss: the output has none"
    return loss


def _tensors(part: Any) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, Mapping):
        for item in part.values():
            yield from _tensors(item)
    elif isinstance(part, (tuple, list)):
        for item in part:
            yield from _tensors(item)


def _rss_growth_here(model: nn.Module, sample: Any, warmup: int) -> int:
    """In this process: the operating system's own high-water mark, or a sampling thread where it has none."""
    for _ in range(warmup):
        _step(model, sample)
    return resident_peak(lambda: _step(model, sample))


def _reset_high_water() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return _status_bytes("VmHWM") < _status_bytes("VmRSS") * 1.01


def _sampled_peak(run: Callable[[], object]) -> int:
    done = threading.Event()
    peak = _status_bytes("VmRSS")

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.0005):
            peak = max(peak, _status_bytes("VmRSS"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run()
    finally:
        done.set()
        watcher.join()
    return peak


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}: this meter needs Linux")


def main() -> None:
    """Print resident bytes and the peaks above them."""
    parser = argparse.ArgumentParser(description="Peak memory of one training step on the CPU.")
    parser.add_argument("builder", help="module:function that returns (model, sample)")
    parser.add_argument("--arguments", type=json.loads, default={}, help="keyword arguments of the builder, as JSON")
    parser.add_argument("--rss", action="store_true", help="also measure resident memory in a fresh process")
    parser.add_argument("--rss-child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--warmup", type=int, default=2)
    options = parser.parse_args()
    module, function = options.builder.split(":")
    model, sample = getattr(importlib.import_module(module), function)(**options.arguments)
    if options.rss_child:
        print(_rss_growth_here(model, sample, options.warmup))
        return
    print(f"resident     {resident_bytes(model, sample):>15,} bytes")
    print(f"peak above   {peak_bytes(model, sample, warmup=options.warmup):>15,} bytes, by the allocator's events")
    if options.rss:
        growth = rss_peak_growth(options.builder, options.arguments, warmup=options.warmup)
        print(f"peak above   {growth:>15,} bytes, by resident memory in a fresh process")


if __name__ == "__main__":
    main()
