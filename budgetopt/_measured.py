"""Measure one training step as it runs here and now: find its regions, run it, put the profile together.

First at two smaller batches, the first of them dropping everything; then at its own, twice, by the plan of least
memory that the two tell of: once with the memory meter on and once with a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from budgetopt import _fingerprint
from budgetopt._calibrate import Costs, codec_clock, own_costs
from budgetopt._errors import ProfileError
from budgetopt._fixed import Resident
from budgetopt._leanest import least_memory
from budgetopt._optimizer import Footprint
from budgetopt._passes import Pass, Scripts, run_taped
from budgetopt._recorded import operators_of, recorded
from budgetopt._regions import Survey, find_regions, layers, survey
from budgetopt._roofline import Device
from budgetopt._sample import first
from budgetopt._scaled import scaled
from budgetopt._schema import Environment, OperatorRecord, Profile
from budgetopt._second_size import compared, pass_at, sizes_below
from budgetopt._state import random_states
from budgetopt._step import Step


@dataclass
class Passes:
    """What ran: the step with a meter and with a clock, and the smaller one, or why there is none."""

    memory: Pass
    clock: Pass
    small: Pass | None
    one_size: str


class Measuring:
    """One measurement of a model's step on a sample, or on the first examples of it.

    Attributes:
        batch: of the sample; 0 where its tensors share no first dimension. size: examples that are run.
        target: what to model instead of running on the device that is here.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        how: Step,
        batch: int,
        size: int,
        reserve: Footprint,
        target: Device | None = None,
    ) -> None:
        self.target = target
        self.model = model
        self.batch = batch
        self.size = size
        self.small, self.middle = sizes_below(size)
        self.whole = how
        self.how = how if size == batch else Step(first(how.sample, size), how.loss, how.step)
        self.resident = Resident(model, how.sample, None if target is None else torch.device(target.kind))
        self.reserve = reserve
        self.fixed = self.resident.fixed(reserve.state)
        self.states = random_states(model)
        self.paths: list[str] = []

    def profile(self) -> Profile:
        """The profile for the whole sample.

        Raises:
            ProfileError: see :func:`budgetopt.profile`. RuntimeError, MemoryError: it ran out of memory.
        """
        found = survey(self.model, self.how, self.resident.identities)
        self.paths = find_regions(self.model, found)
        passes = self._run()
        done = self._assembled(found, passes)
        if self.size != self.batch:
            done = self._scaled(done, passes)
        for run in (passes.memory, passes.clock, passes.small):
            if run is not None:
                run.tape.release()
        return done

    def _run(self) -> Passes:
        small, why = pass_at(self.how.sample, self.size, self.small, self._pass)
        scripts = {} if small is None else self._leanest(small)
        memory = self._pass(self.how.sample, scripts)
        return Passes(memory, self._pass(self.how.sample, scripts, metered=False), small, why)

    def _leanest(self, small: Pass) -> Scripts:
        """How to run the whole batch, from a pass at the small one and another between the two."""
        if not self.middle:
            return least_memory(small, self.resident, self.small, self.size)
        scripts = least_memory(small, self.resident, self.small, self.middle)
        run = partial(self._pass, scripts=scripts)
        middle, _ = pass_at(self.how.sample, self.size, self.middle, run)
        smaller, _ = (None, "") if middle is None else compared(middle, small, self.small, self._share(self.small))
        if middle is None or smaller is None:
            return least_memory(small, self.resident, self.small, self.size)
        scripts = least_memory(middle, self.resident, self.middle, self.size, smaller)
        middle.tape.release()
        return scripts

    def _share(self, examples: int) -> int:
        """Bytes of so many examples of the sample."""
        return -(-self.fixed.sample * examples // self.batch)

    def _pass(self, sample: Any, scripts: Scripts | None = None, *, metered: bool = True) -> Pass:
        how = Step(sample, self.how.loss, self.how.step)
        return run_taped(
            self.model,
            how,
            self.resident,
            self.paths,
            self.states,
            scripts or {},
            metered=metered,
            price=None if self.target is None else self.target.time_ns,
        )

    def _assembled(self, found: Survey, passes: Passes) -> Profile:
        memory, small, one_size = passes.memory, None, passes.one_size
        if passes.small is not None:
            small, one_size = compared(memory, passes.small, self.small, self._share(self.small))
        operators = _with_times(operators_of(memory), operators_of(passes.clock))
        done = recorded(
            memory,
            operators,
            environment=self._environment(),
            fingerprint=_fingerprint.take(self.model, self.whole.sample),
            fixed=self.fixed,
            costs=self._own_costs(),
            codec_ns=self._codec_clock(max(memory.tape.sizes, default=0)),
        )
        more = {"batch": self.size, "smaller": small, "one_size": one_size, "loss_guessed": self.how.guessed}
        more |= {"optimizer_workspace": self.reserve.workspace, "optimizer_kind": self.reserve.kind}
        return done.model_copy(update={**more, "layers": tuple(layers(self.model, found, operators))})

    def _environment(self) -> Environment:
        return _fingerprint.environment(self.resident.device, self.resident.gradient > 0)

    def _own_costs(self) -> Costs:
        return own_costs()

    def _codec_clock(self, largest: int) -> Callable[[int], int]:
        return codec_clock(self.resident.device, largest)

    def _scaled(self, done: Profile, passes: Passes) -> Profile:
        if done.smaller is None or passes.small is None:
            raise ProfileError(done.one_size)
        return scaled(done, passes.small.calls.shapes, self.batch, self.fixed.sample)


def _with_times(measured: list[OperatorRecord], timed: list[OperatorRecord]) -> list[OperatorRecord]:
    """Times come from the second run, where no meter was on and caches were warm."""
    if [o.name for o in measured] != [o.name for o in timed]:
        raise ProfileError(
            "the model ran other operators in two steps on the same sample and random state: its control flow "
            "depends on something that budgetopt can't hold still, so no plan would fit it"
        )
    return [o.model_copy(update={"time_ns": t.time_ns}) for o, t in zip(measured, timed, strict=True)]
