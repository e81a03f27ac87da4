"""Measure one training step: what it saves, what each operator costs, when memory is needed.

The step runs twice under a drop-all policy with a tape at the root: once with the memory meter on and
once with a clock. It drops and replays as it goes, because the user's plain step does not fit. Nothing
is left on the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from budgetopt import _apply, _fingerprint
from budgetopt._calibrate import codec_clock, own_costs
from budgetopt._errors import ProfileError
from budgetopt._fixed import Resident, device_of, require_plannable
from budgetopt._optimizer import Footprint, footprint
from budgetopt._passes import Pass, run_taped
from budgetopt._problem import keep_all
from budgetopt._regions import Survey, find_regions, layers, survey
from budgetopt._schema import OperatorRecord, Profile, RegionRecord
from budgetopt._second_size import measure_smaller
from budgetopt._state import random_states, untouched
from budgetopt._step import Step

CALL_NS = 12_000
"""Entering and leaving a recorded region, per call."""


def profile(
    model: torch.nn.Module,
    sample: Any,
    *,
    step: Callable[[Any, Any], torch.Tensor] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: Any = "adamw",
) -> Profile:
    """Measure one training step of `model` on `sample` and leave no trace.

    Args:
        model: a live model on one device. sample: what its forward takes (a tensor, a tuple or list of
            positional arguments, a mapping of named ones). step, loss: see :func:`budgetopt.fit`.
        optimizer: an instance, a name, or None; its state is reserved as fixed bytes, and its step
            is the last operator of the profiled one.

    Returns:
        operators with time (ns) and workspace (bytes), values, handles and events of the step.

    Raises:
        ProfileError: the model or its device can't be measured, or nothing is there to differentiate.
    """
    device_of(model)  # before anything is saved: random states can't be read while a CUDA graph is captured
    require_plannable(model)
    how = Step(sample, loss, step)
    with _without_plan(model), untouched(model, sample):
        resident = Resident(model, sample)
        reserve = footprint(model, optimizer)
        states = random_states()
        found = survey(model, how, resident.identities)
        paths = find_regions(model, found)

        def run(part: Any, *, metered: bool = True) -> Pass:
            return run_taped(model, Step(part, loss, step), resident, paths, states, metered=metered)

        memory = run(sample)
        other_sizes = measure_smaller(sample, memory, resident.fixed(reserve.state), run)
        clock = run(sample, metered=False)
        done = _assemble(model, how, resident, reserve, found, memory, clock)
        done = done.model_copy(update=dict(zip(("batch", "smaller", "one_size"), other_sizes, strict=True)))
        return done.model_copy(update={"peak_bytes": keep_all(done).peak})


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


def _assemble(
    model: torch.nn.Module,
    how: Step,
    resident: Resident,
    reserve: Footprint,
    found: Survey,
    memory: Pass,
    clock: Pass,
) -> Profile:
    assert memory.peak is not None
    operators = memory.tape.operators(memory.peak.spans)
    operators = _with_times(operators, clock.tape.operators({}))
    costs = own_costs()
    records = []
    calls = memory.calls
    for path, call, shape, numbered in zip(calls.paths, calls.numbers(), calls.shapes, calls.numbered, strict=True):
        record_ns = CALL_NS + costs.record_ns * len(numbered)
        records.append(RegionRecord(path=path, call=call, operators=tuple(numbered), record_ns=record_ns, shape=shape))
    blocked = {f"{o.module}: {o.name}": o.blocked for o in operators if o.blocked and not o.backward}
    done = Profile(
        environment=_fingerprint.environment(resident.device, resident.gradient > 0),
        fingerprint=_fingerprint.take(model, how.sample),
        fixed=resident.fixed(reserve.state),
        regions=tuple(records),
        operators=tuple(operators),
        storages=tuple(memory.tape.sizes),
        values=tuple(memory.tape.value_records(codec_clock(resident.device))),
        handles=tuple(memory.tape.handles),
        events=tuple(memory.tape.events),
        layers=tuple(layers(model, found, operators)),
        replay_ns=costs.replay_ns,
        step_ns=sum(o.time_ns for o in operators),
        loss_guessed=how.guessed,
        not_replayable=blocked,
        optimizer_workspace=reserve.workspace,
        optimizer_kind=reserve.kind,
    )
    for run in (memory, clock):
        run.tape.release()
    return done


def _with_times(measured: list[OperatorRecord], timed: list[OperatorRecord]) -> list[OperatorRecord]:
    """Times come from the second run, where no meter was on and caches were warm."""
    if [o.name for o in measured] != [o.name for o in timed]:
        raise ProfileError(
            "the model ran other operators in two steps on the same sample and random state: its control flow "
            "depends on something that budgetopt can't hold still, so no plan would fit it"
        )
    return [o.model_copy(update={"time_ns": t.time_ns}) for o, t in zip(measured, timed, strict=True)]
