"""Profiling fits where the plain step does not: it takes hardly more than the smallest feasible budget."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import budgetopt
from budgetopt import Profile, _device, solvers
from budgetopt._problem import UNSEEN, to_problem
from budgetopt._sample import first
from budgetopt.solvers import Choice, Problem, Simulation, memory
from tests.deep_models import deep_residual
from tests.models import conv_stack, dropout_stack, gpt2, gpt2_small, resnet, resnet_small
from tests.outside_meter import allocated_peak, quiet_environment, resident_bytes, resident_peak
from tests.zoo import ZOO, bert
from tests.zoo_models import squared_loss

ZOO_NAMES = ("bert", "llama", "mixtral eager", "mamba", "lstm", "gan", "two towers", "functions", "gpt2 adapted")
SMALL = {
    **{name: lambda entry=ZOO[name]: entry.build(**{**entry.small, "batch": 8}) for name in ZOO_NAMES},
    "gpt2": gpt2_small,
    "resnet": resnet_small,
    "dropouts": dropout_stack,
    "one region": conv_stack,
}
SUMMED = 1.12
"""Where the peak is a sum of two gradients: watched from Python, it can't be made in place."""
BY_HAND = {"mixtral eager": pytest.mark.slow}
MOST = {"mixtral eager": SUMMED, "mamba": SUMMED}


def smallest_budget(profile: Profile) -> int:
    """That of exact choices, in bytes."""
    return memory.minimum(to_problem(profile, 0, allow=("keep", "recompute")))[0] + UNSEEN


class Readings:
    """The profiler's own meter, and its readings once more for a run in which another meter needs its place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.real = _device._Cpu.meter
        self.seen: list[_device.Peak] = []
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(_device._Cpu, "meter", self._noted())

    def replay(self) -> None:
        """From now on no meter runs; the profile is told what it was told before."""
        left = iter(self.seen)

        @contextmanager
        def again(backend: Any, device: torch.device, spans: bool) -> Iterator[_device.Peak]:
            yield next(left)

        self.monkeypatch.setattr(_device._Cpu, "meter", again)

    def _noted(self) -> Any:
        @contextmanager
        def noted(backend: Any, device: torch.device, spans: bool) -> Iterator[_device.Peak]:
            with self.real(backend, device, spans) as peak:
                yield peak
            self.seen.append(peak)

        return noted


@pytest.mark.parametrize("name", [pytest.param(name, marks=BY_HAND.get(name, ())) for name in SMALL])
def test_it_takes_hardly_more_than_the_smallest_budget(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it: every pass, the smaller batches, what is measured of our own work, the fingerprint."""
    model, sample = SMALL[name]()
    how = ZOO[name].how if name in ZOO else {}
    readings = Readings(monkeypatch)
    profile = budgetopt.profile(model, sample, optimizer=None, **how)
    assert len(readings.seen) == 3
    readings.replay()
    peak = allocated_peak(lambda: budgetopt.profile(model, sample, optimizer=None, **how))
    assert profile.peak_bytes > 1.1 * smallest_budget(profile)  # or there would be nothing to show
    assert resident_bytes(model, sample) + peak <= MOST.get(name, 1.1) * smallest_budget(profile)
    assert profile.smaller is not None


def test_deep_nets_are_profiled_below_the_floor_of_single_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What layers hand to each other is dropped, too; what is written down does not hang on how the step ran."""
    model, sample = deep_residual(60, 32, batch=32, length=32)
    readings = Readings(monkeypatch)
    profile = budgetopt.profile(model, sample, loss=squared_loss, optimizer=None)
    peak = resident_bytes(model, sample) + max(seen.above for seen in readings.seen)
    assert peak < 0.6 * smallest_budget(profile)
    monkeypatch.setattr(solvers, "leanest", _dropping_all)
    other = budgetopt.profile(model, sample, loss=squared_loss, optimizer=None)
    for part in ("storages", "values", "handles", "events", "fixed"):
        assert _sizes(getattr(profile, part)) == _sizes(getattr(other, part)), part


def _dropping_all(problem: Problem) -> Simulation:
    return memory.simulate(problem, [Choice.RECOMPUTE] * len(problem.values))


def _sizes(found: Any) -> Any:
    """Times of the codec are measured anew."""
    return [one.model_dump(exclude={"codec_ns"}) if hasattr(one, "codec_ns") else one for one in found]


LARGE: dict[str, Any] = {
    "gpt2": lambda: gpt2(6, 384, 2000, 8, 192),
    "resnet": lambda: resnet(
        (3, 4, 6, 3), (128, 256, 512, 1024), stem=64, layer_type="bottleneck", batch=32, px=144, classes=100
    ),
    "bert": lambda: bert(384, 6, 2000, 16, 128),
}


POOLED = 1.13
"""Indices of the pooling are kept, which makes 1.07 of it; the rest is what convolutions cache for each batch size."""


def print_peak(name: str) -> None:
    """What a child process runs."""
    model, sample = LARGE[name]()
    budgetopt.profile(model, first(sample, 4), optimizer=None)  # loads what is loaded late, makes kernels
    found: list[Profile] = []
    peak = resident_peak(lambda: found.append(budgetopt.profile(model, sample, optimizer=None)))
    resident = resident_bytes(model, sample)
    print(json.dumps([resident + peak, smallest_budget(found[0]), found[0].peak_bytes]))


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_resident_memory_of_a_fresh_process_agrees(name: str) -> None:
    command = f"from tests.test_profile_fits import print_peak; print_peak({name!r})"
    done = subprocess.run([sys.executable, "-c", command], env=quiet_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak, smallest, plain = json.loads(done.stdout.splitlines()[-1])
    print(f"\n{name}: plain {plain:,}, smallest budget {smallest:,}, profiled in {peak:,} ({peak / smallest:.3f})")
    assert plain > 1.5 * smallest
    assert peak <= (POOLED if name == "resnet" else 1.1) * smallest
