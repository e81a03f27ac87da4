"""Measure one training step: what it saves, what each operator costs, when memory is needed.

The step runs twice under a drop-all policy with a tape at the root: once with the memory meter on and
once with a clock. It drops and replays as it goes, because the user's plain step does not fit. Nothing
is left on the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from budgetopt import _apply, _device, _fingerprint
from budgetopt._calibrate import codec_clock, own_costs
from budgetopt._errors import ProfileError
from budgetopt._fixed import Resident, device_of, optimizer_bytes, require_plannable
from budgetopt._operators import Info
from budgetopt._problem import keep_all
from budgetopt._regions import Survey, find_regions, layers, module_hooks, survey
from budgetopt._schema import OperatorRecord, Profile, RegionRecord
from budgetopt._script import Script
from budgetopt._script import Step as ScriptStep
from budgetopt._state import fresh_gradients, random_states, restore_random, untouched
from budgetopt._step import Step
from budgetopt._tape import Tape
from budgetopt.solvers.problem import Choice

CALL_NS = 12_000
"""Entering and leaving a recorded region, per call."""


class _DropAll:
    """Drop everything that can be made again; integers stay, since a wrong index kills a CUDA context."""

    def __init__(self, script: Script | None) -> None:
        self.script = script
        self.verify = False
        self.snapshot = True

    def unplanned(self, info: Info, tensor: torch.Tensor) -> int:
        """Every floating value is made again."""
        exact = tensor.is_floating_point() or tensor.is_complex()
        return int(Choice.RECOMPUTE) if exact else int(Choice.KEEP)


class _Calls:
    """The region calls of one step, in order, and the operators that each numbered."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.paths: list[str] = []
        self.numbered: list[list[int]] = []


class _Observer:
    """One region's word to the tape."""

    def __init__(self, calls: _Calls, path: str) -> None:
        self.calls = calls
        self.path = path
        self.holding = calls.tape.holding
        self.packed = calls.tape.packed
        self.unpacked = calls.tape.unpacked
        self.died = calls.tape.died

    def entered(self) -> None:
        self.calls.paths.append(self.path)
        self.calls.numbered.append([])
        self.calls.tape.entered(len(self.calls.paths) - 1)

    def left(self) -> None:
        self.calls.tape.left()

    def recorded(self, why_not: str, rng: bool) -> None:
        self.calls.numbered[-1].append(len(self.calls.tape.drafts) - 1)
        self.calls.tape.recorded(why_not, rng)


class _Pass:
    """One run of the step with a tape."""

    def __init__(self, tape: Tape, calls: _Calls, peak: _device.Peak | None) -> None:
        self.tape = tape
        self.calls = calls
        self.peak = peak


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
        optimizer: an instance, a name, or None; its state is reserved as fixed bytes.

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
        reserve = optimizer_bytes(model, optimizer)
        states = random_states()
        found = survey(model, how, resident.identities)
        paths = find_regions(model, found)
        memory = _run(model, how, resident, paths, states, metered=True)
        clock = _run(model, how, resident, paths, states, metered=False)
        done = _assemble(model, how, resident, reserve, found, memory, clock)
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


def _run(
    model: torch.nn.Module, how: Step, resident: Resident, paths: list[str], states: Any, *, metered: bool
) -> _Pass:
    """One step under the drop-all policy; further tries keep what turned out not to be replayable."""
    scripts: dict[tuple[str, int], Script] = {}
    for last in (False, False, True):
        restore_random(states)
        fresh_gradients(resident.without)
        attempt = _attempt(model, how, resident, paths, scripts, metered=metered, last=last)
        if isinstance(attempt, _Pass):
            return attempt
        scripts = attempt
    raise AssertionError("the last attempt returns or raises")


def _attempt(
    model: torch.nn.Module,
    how: Step,
    resident: Resident,
    paths: list[str],
    scripts: dict[tuple[str, int], Script],
    *,
    metered: bool,
    last: bool,
) -> _Pass | dict[tuple[str, int], Script]:
    device = resident.device
    kind = _device.backend(device)
    measuring: Any = kind.meter(device, True) if metered else nullcontext()
    with measuring as peak:
        mark = (lambda name: kind.mark(device, peak, name)) if metered else None
        tape = Tape(device, resident.identities, mark)
        calls = _Calls(tape)
        _apply.install(model, None, [_region(path, calls, scripts) for path in paths])
        try:
            with _module_names(model, tape), tape:
                out, loss = how.forward(model)
                tape.forward_ended()
                loss.backward()  # type: ignore[no-untyped-call]
                tape.close()
            del out, loss
        except RuntimeError as error:
            if last or "modified by an inplace operation" not in str(error):
                raise
            tape.closed = True
            return _blocked_scripts(tape, calls)
        finally:
            tape.closed = True
            _apply.uninstall(model)
    return _Pass(tape, calls, peak)


def _region(path: str, calls: _Calls, scripts: dict[tuple[str, int], Script]) -> _apply.Region:
    mine = {call: script for (name, call), script in scripts.items() if name == path}
    count = max(mine, default=0) + 1
    region = _apply.Region(path, [mine.get(call) for call in range(count)], drops=[True] * count)
    region.policy = _DropAll
    region.observer = _Observer(calls, path)
    return region


def _blocked_scripts(tape: Tape, calls: _Calls) -> dict[tuple[str, int], Script]:
    """Scripts that keep what reads a large outside tensor that the step itself writes to."""
    operators = tape.operators({})
    scripts: dict[tuple[str, int], Script] = {}
    seen: dict[str, int] = {}
    for path, numbered in zip(calls.paths, calls.numbered, strict=True):
        call = seen.get(path, 0)
        seen[path] = call + 1
        if any(operators[i].blocked for i in numbered):
            steps = [ScriptStep({}, replayable=not operators[i].blocked) for i in numbered]
            scripts[path, call] = Script([operators[i].name for i in numbered], steps)
    return scripts


@contextmanager
def _module_names(model: torch.nn.Module, tape: Tape) -> Iterator[None]:
    """Tell the tape which module is running."""
    names = {module: path for path, module in model.named_modules()}
    stack: list[str] = [""]

    def entered(module: torch.nn.Module, args: Any) -> None:
        if module in names:
            stack.append(names[module])
            tape.module = stack[-1]

    def left(module: torch.nn.Module, args: Any, out: Any) -> None:
        if module in names and len(stack) > 1:
            stack.pop()
            tape.module = stack[-1]

    with module_hooks(entered, left):
        yield


def _assemble(
    model: torch.nn.Module,
    how: Step,
    resident: Resident,
    reserve: int,
    found: Survey,
    memory: _Pass,
    clock: _Pass,
) -> Profile:
    assert memory.peak is not None
    operators = memory.tape.operators(memory.peak.spans)
    operators = _with_times(operators, clock.tape.operators({}))
    costs = own_costs()
    records = []
    seen: dict[str, int] = {}
    for path, numbered in zip(memory.calls.paths, memory.calls.numbered, strict=True):
        call = seen.get(path, 0)
        seen[path] = call + 1
        record_ns = CALL_NS + costs.record_ns * len(numbered)
        records.append(RegionRecord(path=path, call=call, operators=tuple(numbered), record_ns=record_ns))
    blocked = {f"{o.module}: {o.name}": o.blocked for o in operators if o.blocked and not o.backward}
    done = Profile(
        environment=_fingerprint.environment(resident.device, resident.gradient > 0),
        fingerprint=_fingerprint.take(model, how.sample),
        fixed=resident.fixed(reserve),
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
