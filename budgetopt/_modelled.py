"""Model one training step on a device that is not here: nothing is computed, and no weights are in memory.

The step runs on torch's tensors without bytes (FakeTensorMode), through the same regions, recorders and tape as a
measured one: storages, handles and events are those of the CPU's operators. What such a run can't tell is the memory
that operators need inside themselves, and times: those come from a roofline (:mod:`budgetopt._roofline`). What
recording and replaying cost the host is measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from budgetopt import _operators, _torch
from budgetopt._calibrate import Costs, own_costs
from budgetopt._errors import BudgetOptError
from budgetopt._fixed import require_module
from budgetopt._measured import Measuring, Passes
from budgetopt._optimizer import footprint
from budgetopt._passes import Pass, Scripts
from budgetopt._problem import keep_all
from budgetopt._regions import Survey
from budgetopt._roofline import NAMES, Device, device
from budgetopt._sample import batch_of, changed
from budgetopt._schema import Environment, Profile
from budgetopt._second_size import pass_at
from budgetopt._state import restoring
from budgetopt._step import Step


def modelled(model: torch.nn.Module, how: Step, optimizer: Any, name: str) -> Profile:
    """The profile of one step of `model` as it would be on the device called `name`.

    Args:
        model: on the CPU or on the meta device; it is as it was afterwards.

    Raises:
        BudgetOptError: there is no device of that name, or the model is no module.
    """
    target = device(name) if isinstance(name, str) else None
    if target is None:
        raise BudgetOptError(f"device={name!r} is not one of {', '.join(NAMES)}")
    require_module(model)
    costs = own_costs()
    with restoring(model), _torch.modelling(), _without_bytes(model):
        bare = Step(changed(how.sample, _torch.without_bytes), how.loss, how.step)
        reserve = footprint(model, optimizer)
        with _torch.MODELLED.mode:
            done = _Modelling(model, bare, reserve, target, costs).profile()
    return done.model_copy(update={"peak_bytes": keep_all(done).peak, "modelled": target.name})


class _Modelling(Measuring):
    """One pass over the whole sample and one over a smaller one, on tensors without bytes."""

    def __init__(self, model: torch.nn.Module, how: Step, reserve: Any, target: Device, costs: Costs) -> None:
        batch = batch_of(how.sample)
        super().__init__(model, how, batch, batch, reserve, target)
        self.device = target
        self.costs = costs

    def _run(self) -> Passes:
        whole = self._pass(self.how.sample)
        return Passes(whole, whole, *pass_at(self.how.sample, self.size, self.small, self._pass))

    def _pass(self, sample: Any, scripts: Scripts | None = None, *, metered: bool = False) -> Pass:
        return super()._pass(sample, scripts, metered=False)  # no allocator is asked for anything

    def _assembled(self, found: Survey, passes: Passes) -> Profile:
        done = super()._assembled(found, passes)
        return done if self.device.kind == "cpu" else self._beside(done)

    def _beside(self, done: Profile) -> Profile:
        """Our own work is the host's, and takes time only where that is longer than what the device does meanwhile."""
        regions, left, count = [], 0, 0
        for region in done.regions:
            own = [done.operators[i].time_ns - self.device.launch_ns for i in region.operators]
            regions.append(region.model_copy(update={"record_ns": max(0, region.record_ns - sum(own))}))
            left, count = left + sum(own), count + len(own)
        replay_ns = max(0, done.replay_ns - left // max(1, count))
        return done.model_copy(update={"regions": tuple(regions), "replay_ns": replay_ns})

    def _environment(self) -> Environment:
        return super()._environment().model_copy(update={"device": f"{self.device.name}, modelled"})

    def _own_costs(self) -> Costs:
        return self.costs

    def _codec_clock(self, largest: int) -> Callable[[int], int]:
        return self.device.codec_ns


@contextmanager
def _without_bytes(model: torch.nn.Module) -> Iterator[None]:
    """Parameters, buffers and gradients are replaced by ones without bytes, and put back."""
    kept = [(held, dict(held)) for module in model.modules() for held in (module._parameters, module._buffers)]
    made: dict[int, torch.Tensor] = {}
    _operators.PLAIN.add(_torch.FakeTensor)
    try:
        for held, before in kept:
            held.update({key: None if t is None else _bare(t, made) for key, t in before.items()})  # type: ignore[misc]
        yield
    finally:
        _operators.PLAIN.discard(_torch.FakeTensor)
        for held, before in kept:
            held.clear()
            held.update(before)  # type: ignore[arg-type]


def _bare(tensor: torch.Tensor, made: dict[int, torch.Tensor]) -> torch.Tensor:
    """One for each, however often it is used."""
    if id(tensor) not in made:
        made[id(tensor)] = _torch.without_bytes(tensor)
        if tensor.is_leaf and tensor.grad is not None:
            made[id(tensor)].grad = _torch.without_bytes(tensor.grad)
    return made[id(tensor)]
