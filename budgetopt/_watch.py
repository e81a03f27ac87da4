"""Look at the real peak of a step now and then while the model trains; warn where it is over the budget, or plan anew.

On the CPU a step is measured by the profiler, from one call of the model to the next: one step in :data:`EVERY`, the
others cost nothing. On CUDA the allocator's own high-water mark is read. Nothing is measured while
somebody else's profiler runs.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from budgetopt import _device, _torch
from budgetopt._apply import PlannedForward, Region, installed
from budgetopt._errors import BudgetOptError, BudgetOptWarning
from budgetopt._fixed import device_of
from budgetopt._operators import tensors
from budgetopt._optimizer import bytes_there
from budgetopt._plan import Plan
from budgetopt._units import show_bytes

EVERY = 50
"""Steps from one look to the next; the first look is at the second step, when the optimizer's state is there."""
ROUNDS = 4
"""Times that a model is planned anew, at most."""

Again = Callable[[torch.nn.Module, Any, int], None]
"""Fit a model again on a sample, with so many bytes of headroom."""


class Watch:
    """Of one fitted model.

    Args:
        optimizer: as `fit` was given it. again: how to plan anew, None for not at all.

    Attributes:
        peaks: bytes, of the steps that were measured.
    """

    def __init__(self, plan: Plan, optimizer: Any, again: Again | None) -> None:
        self.peaks: list[int] = []
        self._plan, self._again = plan, again
        named = optimizer is None or isinstance(optimizer, str)
        self._optimizer = (lambda: None) if named else weakref.ref(optimizer)
        self._reserved = plan.profile.fixed.optimizer if named else 0
        self._per_step = min(plan.calls.values(), default=1)
        self._calls = self._steps = -1
        self._looking: _Look | None = None
        self._thread = threading.get_ident()
        self._told = False
        self._over = self._size = 0  # bytes of the last step that was over the budget, and of its sample
        self.rounds = 0

    def around(self, planned: PlannedForward, model: torch.nn.Module, compiled: bool, args: Any, kwargs: Any) -> Any:
        """Call the model; a step begins with every call, or with the first of several."""
        if threading.get_ident() != self._thread:
            return planned.planned(compiled, args, kwargs)
        self._calls += 1
        if self._calls % self._per_step == 0 and self._begins(model, args, kwargs):
            return model.forward(*args, **kwargs)  # another plan is in place
        out = planned.planned(compiled, args, kwargs)
        if self._looking is not None:
            self._looking.until_gone(out)
        return out

    def pause(self) -> None:
        """Something else than a step begins."""
        if threading.get_ident() == self._thread:
            self._look_no_more()

    def _begins(self, model: torch.nn.Module, args: Any, kwargs: Any) -> bool:
        """Whether another plan is in place."""
        self._steps += 1
        self._look_no_more()
        if self._over and self._tell(model, args, kwargs):
            return True
        if self._steps % EVERY == 1:
            self._size = _bytes(args, kwargs)
            there = bytes_there(model, (args, kwargs), self._optimizer()) + self._reserved
            self._looking = _Look.begin(device_of(model), there, self._seen)
        return False

    def _look_no_more(self) -> None:
        if self._looking is not None:
            self._looking.end()
            self._looking = None

    def _seen(self, peak: int) -> None:
        self.peaks.append(peak)
        if peak > self._plan.budget_bytes:
            self._over = peak

    def _tell(self, model: torch.nn.Module, args: Any, kwargs: Any) -> bool:
        """Plan anew, if that was asked for, or warn once; whether another plan is in place."""
        if self._again is None or self.rounds >= ROUNDS or (args and kwargs):
            self._warn("" if self._told else _ADVICE)
            self._told, self._over = True, 0
            return False
        if _bytes(args, kwargs) < self._size:
            return False  # a batch as large as that of the step that was over will come again
        # Where it was larger than planned, a new profile says what there is to know.
        grew = self._size > self._plan.profile.fixed.sample
        headroom = self._plan.headroom_bytes + (0 if grew else self._over - self._plan.budget_bytes)
        try:
            self._again(model, kwargs or args, headroom)
        except BudgetOptError as error:
            self._again, self._told = None, True
            self._warn(f"It can't be planned anew: {error}")
            return False
        _take_over(model, self)
        self._warn("It was planned anew.")
        return True

    def _warn(self, then: str) -> None:
        plan = self._plan
        if then:
            warnings.warn(
                f"budgetopt: a step took {show_bytes(self._over)}, over the budget of {show_bytes(plan.budget_bytes)} "
                f"(predicted {show_bytes(plan.predicted.peak_bytes)}). {then}",
                BudgetOptWarning,
                stacklevel=7,
            )


def _bytes(args: Any, kwargs: Any) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors((args, kwargs)))


_ADVICE = "Set headroom=, give fit the largest batch, or let it plan anew with replan=True."


def _take_over(model: torch.nn.Module, old: Watch) -> None:
    """The new plan's watch knows how often there was a new one."""
    found = installed(model)
    watch = None if found is None or "" not in found.regions else found.regions[""].watch
    if isinstance(watch, Watch):
        watch.rounds, watch._steps, watch.peaks = old.rounds + 1, 0, old.peaks


def watched(regions: Sequence[Region], watch: Watch) -> list[Region]:
    """The regions, and the model itself among them, which the watch stands around."""
    found = list(regions)
    if not any(region.path == "" for region in found):
        found.insert(0, Region("", [None], drops=[False]))
    for region in found:
        if region.path == "":
            region.watch = watch
    return found


def anew(fit: Callable[..., Any], optimizer: Any, **options: Any) -> Again:
    """How to fit again. The optimizer is not kept alive for it."""
    named = optimizer is None or isinstance(optimizer, str)
    known = (lambda: optimizer) if named else weakref.ref(optimizer)

    def again(model: torch.nn.Module, sample: Any, headroom: int) -> None:
        fit(model, sample, optimizer=known(), headroom=headroom, watch=True, replan=True, **options)

    return again


class _Look:
    """One step that is measured."""

    def __init__(self, meter: _device.Watching, there: int, seen: Callable[[int], None]) -> None:
        self._meter, self._there, self._seen = meter, there, seen
        self._over = False

    @staticmethod
    def begin(device: torch.device, there: int, seen: Callable[[int], None]) -> _Look | None:
        """None where somebody else measures."""
        meter = _device.backend(device).watching(device, there)
        return None if meter is None else _Look(meter, there, seen)

    def until_gone(self, out: Any) -> None:
        """End with the graph of the output at the latest, lest what comes after the last step is measured for ever."""
        for tensor in tensors(out):
            if tensor.grad_fn is not None:
                mark = _Mark()
                weakref.finalize(mark, self._gone)
                _torch.attach(tensor, mark)

    def _gone(self) -> None:
        """Not inside of a backward pass, which puts back what it found when it began: a profiler that runs."""
        if not _torch.in_backward():
            self.end()

    def end(self) -> None:
        """Note the peak, once."""
        if self._over:
            return
        self._over = True
        peak = self._meter.end()
        if peak is not None:
            self._seen(peak)


class _Mark:
    """On a node of a graph: goes with it."""
