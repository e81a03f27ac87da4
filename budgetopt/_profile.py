"""Measure one training step: what it saves, what each operator costs, when memory is needed.

It must fit where the user's plain step does not, so it drops and replays as it goes; where even that does not
fit, smaller batches are measured and scaled. Nothing is left on the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from budgetopt import _apply
from budgetopt._errors import ProfileError
from budgetopt._fixed import device_of, require_plannable
from budgetopt._measured import Measuring
from budgetopt._modelled import modelled
from budgetopt._optimizer import footprint
from budgetopt._out_of_memory import is_out_of_memory, let_go
from budgetopt._problem import keep_all
from budgetopt._sample import batch_of
from budgetopt._schema import Profile
from budgetopt._state import untouched
from budgetopt._step import Step


def profile(
    model: torch.nn.Module,
    sample: Any,
    *,
    step: Callable[[Any, Any], torch.Tensor] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: Any = "adamw",
    device: str | None = None,
) -> Profile:
    """Measure one training step of `model` on `sample` and leave no trace.

    It takes about the memory of the smallest feasible budget, beside copies of the buffers and of gradients that are
    there already (those are on the host). Where it runs out of memory, the first half of the sample is measured, then a
    quarter, and so on, until two batch sizes fit; the profile is scaled from those (see its `scaled_from`).

    Args:
        model: a live model on one device. sample: what its forward takes (a tensor, a tuple or list of
            positional arguments, a mapping of named ones). step, loss: see :func:`budgetopt.fit`.
        optimizer: an instance, a name, or None; its state is reserved as fixed bytes, and its step
            is the last operator of the profiled one.
        device: model the step on this device instead of running it: ``"a100"``, ``"h100"``, ``"h200"``,
            ``"rtx4090"``, ``"t4"`` or ``"cpu"`` (this machine's). Nothing is computed, and model and sample may be on
            the meta device. Operators are the CPU's; their times are those of a roofline, which are too short, and
            the memory they need inside themselves is not known: such a plan is tried before it is trusted.

    Returns:
        operators with time (ns) and workspace (bytes), values, handles and events of the step.

    Raises:
        ProfileError: the model or its device can't be measured, nothing is there to differentiate, or no part of
            the sample fits into memory.
    """
    if device is not None:
        return modelled(model, Step(sample, loss, step), optimizer, device)
    here = device_of(model)  # before anything is saved: random states can't be read while a CUDA graph is captured
    require_plannable(model)
    how = Step(sample, loss, step)
    batch, died = batch_of(sample), ""
    for size in _sizes(batch):
        try:
            with _without_plan(model), untouched(model, sample):
                done = Measuring(model, how, batch, size, footprint(model, optimizer)).profile()
            return done.model_copy(update={"peak_bytes": keep_all(done).peak})
        except Exception as error:
            if not is_out_of_memory(error):
                if died:
                    raise _does_not_fit(died, f"the first {size} examples can't be measured: {error}") from error
                raise
            died = died or f"{type(error).__name__}: {error}".partition("\n")[0]
        let_go(here)  # here the error is gone, and with it the tensors that its traceback held
    raise _does_not_fit(died, f"of the batch of {batch}, no two sizes fit" if batch > 1 else _ONE)


_ONE = "the sample has no batch to cut: its tensors do not share a first dimension of two or more"


def _sizes(batch: int) -> Iterator[int]:
    """How many examples to measure: all; where that does not fit, half of them, as long as there is a smaller batch."""
    yield batch
    while (batch := batch // 2) > 1:
        yield batch


def _does_not_fit(died: str, why: str) -> ProfileError:
    return ProfileError(
        f"profiling ran out of memory ({died}), and {why}. Give a sample of a smaller batch, free what else is "
        "on the device, or use a larger one."
    )


@contextmanager
def _without_plan(model: torch.nn.Module) -> Iterator[None]:
    """A plan that is installed is taken off for the measurement and put back."""
    before = _apply.installed(model)
    if before is not None:
        _apply.uninstall(model)
    try:
        yield
    finally:
        if before is not None:
            _apply.install(model, before.plan, before.regions.values())
