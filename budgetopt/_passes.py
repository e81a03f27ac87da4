"""Run a training step with a tape at the root: what the profiler measures.

It drops and replays as it goes, because the user's plain step does not fit: everything, or what scripts say.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from budgetopt import _apply, _device
from budgetopt._engine import inside_nodes
from budgetopt._fixed import Resident
from budgetopt._numbering import Numbering
from budgetopt._operators import Info
from budgetopt._regions import module_hooks
from budgetopt._script import Script
from budgetopt._script import Step as ScriptStep
from budgetopt._state import fresh_gradients, restore_random
from budgetopt._step import Step
from budgetopt._tape import Price, Tape
from budgetopt.solvers.problem import Choice

Scripts = dict[tuple[str, int], Script]
"""The course of every call of a region, by the region's path and the call's number."""


def may_drop(dtype: torch.dtype) -> bool:
    """What may be an index stays, since a wrong one kills a CUDA context; a wrong mask or byte does not."""
    return dtype not in (torch.int16, torch.int32, torch.int64)


class _DropAll:
    """Drop everything that can be made again and that no script speaks of.

    Without a script nobody knows yet which small outside tensors the step writes to: all are copied.
    """

    def __init__(self, script: Script | None) -> None:
        self.script = script
        self.verify = False
        self.snapshot = script is None

    def unplanned(self, info: Info, tensor: torch.Tensor) -> int:
        """Every value but an index is made again."""
        return int(Choice.RECOMPUTE) if may_drop(tensor.dtype) else int(Choice.KEEP)


class Calls:
    """The region calls of one step, in order, and the operators that each numbered."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.paths: list[str] = []
        self.shapes: list[tuple[int, ...]] = []
        self.numbered: list[list[int]] = []

    def numbers(self) -> list[int]:
        """Per region call, the number of earlier calls of the same region."""
        numbering = Numbering()
        return [numbering.next(path) for path in self.paths]


class _Observer:
    """One region's word to the tape."""

    def __init__(self, calls: Calls, path: str) -> None:
        self.calls = calls
        self.path = path
        self.holding = calls.tape.holding
        self.crossing = calls.tape.crossing
        self.packed = calls.tape.packed
        self.unpacked = calls.tape.unpacked
        self.died = calls.tape.died

    def entered(self, shape: tuple[int, ...]) -> None:
        self.calls.paths.append(self.path)
        self.calls.shapes.append(shape)
        self.calls.numbered.append([])
        self.calls.tape.entered(len(self.calls.paths) - 1)

    def left(self) -> None:
        self.calls.tape.left()

    def recorded(self, why_not: str, rng: bool) -> None:
        self.calls.numbered[-1].append(len(self.calls.tape.drafts) - 1)
        self.calls.tape.recorded(why_not, rng)


class Pass:
    """One run of the step with a tape."""

    def __init__(self, tape: Tape, calls: Calls, peak: _device.Peak | None) -> None:
        self.tape = tape
        self.calls = calls
        self.peak = peak


def run_taped(
    model: torch.nn.Module,
    how: Step,
    resident: Resident,
    paths: list[str],
    states: Any,
    scripts: Scripts,
    *,
    metered: bool,
    price: Price | None = None,
) -> Pass:
    """One step that drops all it can, or what `scripts` say; further tries keep what turned out not to be replayable.

    Its gradients are gone afterwards, also where it raises. `price` says what operators take, in place of a clock.
    """
    for last in (False, False, True):
        restore_random(states)
        fresh_gradients(resident.without)
        try:
            attempt = _attempt(model, how, resident, paths, scripts, metered=metered, price=price, last=last)
        finally:
            fresh_gradients(resident.without)
        if isinstance(attempt, Pass):
            return attempt
        scripts = attempt
    raise AssertionError("the last attempt returns or raises")


def _attempt(
    model: torch.nn.Module,
    how: Step,
    resident: Resident,
    paths: list[str],
    scripts: Scripts,
    *,
    metered: bool,
    price: Price | None,
    last: bool,
) -> Pass | Scripts:
    device = resident.device
    kind = _device.backend(device)
    measuring: Any = kind.meter(device, True) if metered else nullcontext()
    with measuring as peak:
        mark = (lambda name: kind.mark(device, peak, name)) if metered else None
        tape = Tape(resident.account, resident.identities, mark, price)
        calls = Calls(tape)
        _apply.install(model, None, [_region(path, calls, scripts) for path in paths])
        try:
            with _module_names(model, tape):
                with tape:
                    out, loss = how.forward(model)
                    tape.forward_ended()
                    gradient = torch.ones_like(loss)
                with inside_nodes(loss, tape):
                    loss.backward(gradient)  # type: ignore[no-untyped-call]
                tape.close()
            del out, loss, gradient
        except RuntimeError as error:
            if last or "modified by an inplace operation" not in str(error):
                raise
            tape.closed = True
            return _blocked_scripts(tape, calls)
        finally:
            tape.closed = True
            _apply.uninstall(model)
    return Pass(tape, calls, peak)


def _region(path: str, calls: Calls, scripts: Scripts) -> _apply.Region:
    mine = {call: script for (name, call), script in scripts.items() if name == path}
    count = max(mine, default=0) + 1
    region = _apply.Region(path, [mine.get(call) for call in range(count)], drops=[True] * count)
    region.policy = _DropAll
    region.observer = _Observer(calls, path)
    return region


def _blocked_scripts(tape: Tape, calls: Calls) -> Scripts:
    """Scripts that keep what reads a large outside tensor that the step itself writes to."""
    operators = tape.operators({})
    keep = [{s: int(Choice.KEEP) for s, v in d.slots if not may_drop(tape.dtypes[v])} for d in tape.drafts]
    scripts: Scripts = {}
    for path, call, numbered in zip(calls.paths, calls.numbers(), calls.numbered, strict=True):
        if any(operators[i].blocked for i in numbered):
            steps = [ScriptStep(keep[i], replayable=not operators[i].blocked, snapshot=True) for i in numbered]
            scripts[path, call] = Script(
                [operators[i].name for i in numbered], [operators[i].ranks for i in numbered], steps
            )
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

    with module_hooks(model, entered, left):
        yield
