"""Install a plan on a live model, undo it exactly, look at it.

A planned region is a module whose instance gets a ``forward`` of ours; its class, its name, its
parameters and its hooks stay what they were. Everything that is known about a model lives in a side
table that does not keep the model alive.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch

from budgetopt import _device, _torch
from budgetopt._handles import unpack
from budgetopt._notices import Notices
from budgetopt._numbering import Numbering
from budgetopt._operators import Info
from budgetopt._plan import WORDS, Plan, RegionPlan
from budgetopt._record import Recorder
from budgetopt._script import Observer, Policy, Script, Step
from budgetopt._segments import join
from budgetopt._values import Call, Counters
from budgetopt.solvers.problem import Choice


class PlanPolicy:
    """A plan's word on one call of a region."""

    __slots__ = ("script", "snapshot", "verify")

    def __init__(self, script: Script | None) -> None:
        self.script = script
        self.verify = False
        self.snapshot = False

    def unplanned(self, info: Info, tensor: torch.Tensor) -> int:
        """Memory first: what no plan speaks of is made again, if a plain operator makes it."""
        return int(Choice.RECOMPUTE) if info.name.startswith("aten.") else int(Choice.KEEP)


class Around(Protocol):
    """Who stands around the calls of a module."""

    def around(self, planned: PlannedForward, model: torch.nn.Module, compiled: bool, args: Any, kwargs: Any) -> Any:
        """Call it, where gradients are wanted."""

    def pause(self) -> None:
        """It is called without gradients."""


class Region:
    """A planned module: the scripts of its calls in a step, and what came of them.

    Attributes:
        shapes: of the first tensor argument, as planned, per call. notices: where to say that a call differs.
        watch: who stands around the calls and looks at what they take.
    """

    def __init__(
        self,
        path: str,
        scripts: list[Script | None],
        *,
        drops: list[bool],
        shapes: Sequence[tuple[int, ...]] = (),
        notices: Notices | None = None,
    ) -> None:
        self.path = path
        self.scripts = scripts
        self.drops = drops
        self.shapes = shapes
        self.sizes = [prod(shape) for shape in shapes]
        self.notices = notices
        self.counters = Counters()
        self.unpack = functools.partial(unpack, path)
        self.verify = False
        self.observer: Observer | None = None
        self.policy: Callable[[Script | None], Policy] = PlanPolicy
        self.next_call = 0
        self.gone: set[int] = set()
        self.watched: list[tuple[int, Call]] = []
        self.watch: Around | None = None

    def recorder(self, first: torch.Tensor | None, arguments: Any) -> Recorder | None:
        """A recorder for the coming call, or None where its plan keeps everything.

        Args:
            first: the first tensor argument of the call, to see whether it is larger than planned.
            arguments: all of them.
        """
        number = self.next_call
        call = number % len(self.scripts)
        self.next_call += 1
        if not self.drops[call]:
            return None
        if self.notices is not None and first is not None and first.numel() > self.sizes[call]:
            self.notices.larger(self.shapes[call], first.shape)
        script = self.scripts[call]
        policy: Policy = self.policy(script)
        policy.verify = self.verify
        segments = join(script.segments, arguments) if script is not None and script.segments else None
        recorder = Recorder(policy, self.counters, self.observer, _device.stream_of(first), segments)
        if len(self.scripts) > 1:
            recorder.call.abandoned = functools.partial(self._abandoned, number)
        if self.verify:
            self.watched.append((call, recorder.call))
        return recorder

    def bypassed(self) -> None:
        """A call ran without a recorder because torch forbids hooks there: count it and say so."""
        self.counters.bypassed += 1
        if self.notices is not None:
            self.notices.bypasses(self.path)

    def compiled(self) -> None:
        """A call came from compiled code."""
        if self.notices is not None:
            self.notices.compiled(self.path)

    def _abandoned(self, number: int) -> None:
        """A call went without a backward pass, as after an error: its number is given again."""
        self.gone.add(number)
        while self.next_call - 1 in self.gone:
            self.next_call -= 1
            self.gone.remove(self.next_call)

    def ended(self, recorder: Recorder, *, whole: bool) -> None:
        """Settle and count a call that is over."""
        recorder.ended()
        self.counters.calls += 1
        self.counters.broken += recorder.broken
        planned = recorder.script
        if whole and planned is not None and not (recorder.matched and recorder.position == len(planned.names)):
            self.counters.differing += 1
            if self.notices is not None:
                self.notices.differs(self.path)

    def __getstate__(self) -> dict[str, Any]:
        """Nobody watches a copy: a watch is of one model in one process."""
        return {**self.__dict__, "watch": None}

    def copied(self) -> Region:
        """The same plan for a copy of the module, with counters of its own."""
        return Region(self.path, self.scripts, drops=self.drops, shapes=self.shapes, notices=self.notices)


class PlannedForward:
    """The ``forward`` of a planned module: records where gradients are wanted, else calls straight through.

    It refers to its module weakly and rebinds itself in copies, so that copies use their own weights.
    """

    def __init__(self, module: torch.nn.Module, region: Region, before: Callable[..., Any] | None) -> None:
        self._module = weakref.ref(module)
        self._before = before
        self.region = region
        forward = self._original()
        self.__signature__ = inspect.signature(forward)
        self.__name__ = "forward"
        self.__doc__ = forward.__doc__

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward that a user would see without a plan."""
        return self._original()

    def _original(self) -> Callable[..., Any]:
        if self._before is not None:
            return self._before
        module = self._module()
        if module is None:
            raise ReferenceError("the module of this planned forward is gone")
        bound: Callable[..., Any] = type(module).forward.__get__(module)
        return bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, recorded where gradients are wanted, and watched if somebody does."""
        if not torch.is_grad_enabled() or torch.compiler.is_exporting():
            if self.region.watch is not None:
                self.region.watch.pause()
            return self._original()(*args, **kwargs)
        # While dynamo traces this, the flag is the constant True; the call then breaks its graph.
        return self._recorded(torch.compiler.is_dynamo_compiling(), args, kwargs)

    @_torch.eager
    def _recorded(self, compiled: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watch, module = self.region.watch, self._module()
        if watch is None or module is None:
            return self.planned(compiled, args, kwargs)
        return watch.around(self, module, compiled, args, kwargs)

    def planned(self, compiled: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's forward, recorded."""
        forward = self._original()
        if _torch.tracing():
            return forward(*args, **kwargs)
        if compiled:
            self.region.compiled()
        if _torch.functorch_active() or not _torch.hooks_enabled():
            self.region.bypassed()
            return forward(*args, **kwargs)
        first = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), None)
        recorder = self.region.recorder(first, (args, kwargs))
        if recorder is None:
            return forward(*args, **kwargs)
        observer = recorder.observer
        if observer is not None:
            observer.entered(() if first is None else tuple(first.shape))
        whole = False
        pack, before = _bound_pack(recorder), _torch.modes()
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, self.region.unpack), recorder:
                out = forward(*args, **kwargs)
            whole = True
            return out
        finally:
            # Ctrl-C at the door of a with statement leaves open what it entered.
            _torch.back_to(before)
            _torch.take_off(pack)
            self.region.ended(recorder, whole=whole)
            if observer is not None:
                observer.left()

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedForward:
        module = self._module()
        return _rebuild(memo.get(id(module), module), self.region, copy.deepcopy(self._before, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._module(), self.region, self._before)


def _rebuild(module: Any, region: Region, before: Callable[..., Any] | None) -> PlannedForward:
    return PlannedForward(module, region.copied(), before)


class Replicate:
    """The ``_replicate_for_data_parallel`` of a planned module: replicas run planned, on their own weights."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self) -> Any:
        """A replica of the module whose forward is bound to the replica."""
        module: Any = self._module()
        replica = type(module)._replicate_for_data_parallel(module)
        planned = module.__dict__["forward"]
        replica.__dict__.pop(REPLICATE, None)
        replica.__dict__["forward"] = _rebuild(replica, planned.region, planned._before)
        return replica

    def __deepcopy__(self, memo: dict[int, Any]) -> Replicate:
        module: Any = self._module()
        return Replicate(memo.get(id(module), module))

    def __reduce__(self) -> tuple[Any, ...]:
        return Replicate, (self._module(),)


REPLICATE = "_replicate_for_data_parallel"
INSTALLED = ("forward", REPLICATE)
"""Attributes that a plan sets on the instances of planned modules."""


def _bound_pack(recorder: Recorder) -> Callable[[torch.Tensor], Any]:
    """The pack hook, without a strong link: autograd's graph holds the hook until backward."""
    myself = weakref.ref(recorder)

    def pack(tensor: torch.Tensor) -> Any:
        alive = myself()
        return tensor if alive is None else alive.pack(tensor)

    return pack


@dataclass
class Installed:
    """What is installed on a model: the plan that says so, and its regions by path."""

    plan: Any
    regions: dict[str, Region]


_MODELS: weakref.WeakKeyDictionary[torch.nn.Module, Installed] = weakref.WeakKeyDictionary()


def installed(model: torch.nn.Module) -> Installed | None:
    """What :func:`install` left on `model`, or None."""
    return _MODELS.get(model)


def install(model: torch.nn.Module, plan: Any, regions: Iterable[Region]) -> Installed:
    """Patch the modules of `regions` and remember `plan`; an earlier plan is replaced, never layered."""
    uninstall(model)
    found = Installed(plan, {region.path: region for region in regions})
    modules = dict(model.named_modules())
    for path, region in found.regions.items():
        module = modules[path]
        module.__dict__["forward"] = PlannedForward(module, region, module.__dict__.get("forward"))
        module.__dict__[REPLICATE] = Replicate(module)
    _MODELS[model] = found
    return found


def uninstall(model: torch.nn.Module) -> bool:
    """Undo :func:`install` exactly; whether there was anything to undo."""
    found = _MODELS.pop(model, None) is not None
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, PlannedForward):
            found = True
            del module.__dict__["forward"]
            module.__dict__.pop(REPLICATE, None)
            if forward._before is not None:
                module.__dict__["forward"] = forward._before
    return found


def regions_of(plan: Plan, *, quiet: bool = False) -> list[Region]:
    """A plan as the executor wants it: per module, a script for each of its calls in a step.

    `quiet`: for a trial, in which calls that differ are nothing to warn of.
    """
    by_path: dict[str, dict[int, RegionPlan]] = {}
    for planned in plan.regions:
        by_path.setdefault(planned.path, {})[planned.call] = planned
    regions = []
    notices = None if quiet else Notices(plan)
    for path, calls in by_path.items():
        count = plan.calls.get(path, max(calls) + 1)
        scripts = [script_of(calls[call]) if call in calls else None for call in range(count)]
        shapes = [calls[call].shape if call in calls else () for call in range(count)]
        drops = [script is not None for script in scripts]
        regions.append(Region(path, scripts, drops=drops, shapes=shapes, notices=notices))
    return regions


def script_of(planned: RegionPlan) -> Script:
    """The course of one call of a region, and what its plan says of each operator."""
    choices: dict[tuple[str, int], dict[int, int]] = {}
    holds: dict[tuple[str, int], list[int]] = {}
    between: dict[tuple[str, int], list[int]] = {}
    lates: dict[tuple[str, int], dict[int, int]] = {}
    for decision in planned.decisions:
        key = (decision.operator, decision.nth)
        choices.setdefault(key, {})[decision.slot] = int(WORDS[decision.choice])
        if decision.choice == "hold":
            holds.setdefault(key, []).append(decision.slot)
        if decision.between:
            between.setdefault(key, []).append(decision.slot)
        if decision.choice == "late":
            choices[key][decision.slot] = int(Choice.RECOMPUTE)
            lates.setdefault(key, {})[decision.slot] = decision.segment
    record, blocked, snapshot = set(planned.record), set(planned.blocked), set(planned.snapshot)
    steps = []
    numbering = Numbering()
    for i, name in enumerate(planned.operators):
        key = (name, numbering.next(name))
        steps.append(
            Step(
                choices.get(key, {}),
                hold=tuple(holds.get(key, ())),
                between=tuple(between.get(key, ())),
                late=lates.get(key),
                record=i in record,
                replayable=i not in blocked,
                snapshot=i in snapshot,
            )
        )
    return Script(list(planned.operators), list(planned.ranks), steps, planned.segments)
