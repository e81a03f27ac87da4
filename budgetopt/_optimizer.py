"""What the optimizer takes: state that is there during the whole step, and what its own step needs on top.

A class does not tell either, and both depend on its flags (amsgrad, foreach, fused, momentum …), so a new instance
of it steps *stand-ins*: parameters of the same number, order, types and groups, all scaled down alike. They are stepped
at two sizes, the second twice the first, to tell what grows with the parameters from what does not. The user's
optimizer is only read.
"""

from __future__ import annotations

import gc
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

import torch
from torch.optim import Optimizer

from budgetopt import _device
from budgetopt._errors import ProfileError
from budgetopt._fixed import Resident, device_of
from budgetopt._sample import tensors_in
from budgetopt._state import random_states, restore_random

_CLASSES: Final[Mapping[str, tuple[type[Optimizer], Mapping[str, Any]]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "adam": (torch.optim.Adam, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "adamax": (torch.optim.Adamax, {}),
    "sgd": (torch.optim.SGD, {}),
    "sgd+momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "adagrad": (torch.optim.Adagrad, {}),
}
_COPIES: Final = {"lion": 1}
"""Copies of every trainable parameter in the state of optimizers that torch does not have."""
NAMES: Final = tuple(sorted({*_CLASSES, *_COPIES}))

_STAND_INS: Final = 1 << 20
"""Elements of all stand-ins together, at the first size."""
_LATE: Final = 1000
"""A step's number in the middle of training: some optimizers do more after the first few."""

Groups = list[dict[str, Any]]


class Footprint(NamedTuple):
    """Bytes on the model's device.

    Attributes:
        state: there from the first step on. workspace: on top of it while the optimizer steps.
        kind: equal for optimizers with equal footprints, as far as can be told without running them.
    """

    state: int
    workspace: int
    kind: str


class _Trial(NamedTuple):
    """What stepping stand-ins took: bytes of state, the most on top of it, and of the stand-ins themselves."""

    state: int
    workspace: int
    size: int


def footprint(model: torch.nn.Module, optimizer: Any, known: Footprint | None = None) -> Footprint:
    """State and workspace of an optimizer.

    An optimizer that can't be tried (its class has another constructor or wants a closure, or it does not take bytes
    in proportion to its parameters) is taken to need one copy of all trainable parameters for its step.

    Args:
        optimizer: None (nothing), one of :data:`NAMES`, or an instance: its state is measured or, before its first
            step, derived. known: of an earlier call; the answer where the kind is still the same.

    Raises:
        ProfileError: unknown name, or an instance whose state can't be derived.
    """
    if optimizer is None:
        return Footprint(0, 0, "")
    optimizer = _inside(optimizer)
    groups, make = _described(model, optimizer)
    kind = _kind(optimizer, groups)
    device = device_of(model)
    held = _held(optimizer, device) if isinstance(optimizer, Optimizer) else 0
    if known is not None and known.kind == kind:
        return known._replace(state=held or known.state)
    parameters = list(chain.from_iterable(group["params"] for group in groups))
    if not parameters:
        return Footprint(0, 0, kind)
    tried = None if make is None else _tried(groups, make, device)
    workspace = _size(parameters, device) if tried is None else tried.workspace
    return Footprint(held or _derived(optimizer, parameters, tried, device), workspace, kind)


def state_bytes(model: torch.nn.Module, optimizer: Any) -> int:
    """Bytes of state alone; nothing is run where they are there already."""
    held = _held(optimizer, device_of(model)) if isinstance(optimizer, Optimizer) else 0
    return held or footprint(model, optimizer).state


def bytes_there(model: torch.nn.Module, sample: Any, optimizer: Any) -> int:
    """Bytes of a step that are taken before it begins: what is free does not count them, a budget does."""
    state = _held(optimizer, device_of(model)) if isinstance(optimizer, Optimizer) else 0
    return Resident(model, sample).fixed(state).total


def _inside(optimizer: Any) -> Any:
    """The optimizer that accelerate's and Lightning's wrappers hold, whose class is one that can be made again."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _held(optimizer: Optimizer, device: torch.device) -> int:
    held = [t for state in optimizer.state.values() for t in tensors_in(state) if t.device == device]
    return sum(_device.rounded(device, t.untyped_storage().nbytes()) for t in held)


def _derived(optimizer: Any, parameters: Sequence[torch.Tensor], tried: _Trial | None, device: torch.device) -> int:
    if tried is not None:
        return tried.state
    name = optimizer.lower() if isinstance(optimizer, str) else type(optimizer).__name__.lower()
    if name not in _COPIES:
        raise ProfileError(
            f"budgetopt does not know how much state the optimizer {name!r} holds: run one step of it first and "
            f"pass the instance, or name the nearest of {list(NAMES)}, or pass None and use headroom="
        )
    return _COPIES[name] * _size(parameters, device)


def _size(parameters: Iterable[torch.Tensor], device: torch.device) -> int:
    """Bytes of a copy of each parameter that is on `device`."""
    return sum(_device.rounded(device, p.numel() * p.element_size()) for p in parameters if p.device == device)


# -- what there is to step ---------------------------------------------------------------------------


def _described(model: torch.nn.Module, optimizer: Any) -> tuple[Groups, Callable[[Groups], Optimizer] | None]:
    """Groups of trainable parameters with their settings, and how to make an optimizer for such groups."""
    if isinstance(optimizer, str):
        groups: Groups = [{"params": [p for p in model.parameters() if p.requires_grad]}]
        if optimizer.lower() not in _CLASSES:
            return groups, None
        kind, settings = _CLASSES[optimizer.lower()]
        return groups, lambda parts: kind(parts, **settings)
    if not isinstance(optimizer, Optimizer):
        raise ProfileError(f"optimizer={optimizer!r} is neither an optimizer, nor one of {list(NAMES)}, nor None")
    groups = [
        {key: _copied(value) for key, value in group.items() if key not in ("params", "param_names")}
        | {"params": [p for p in group["params"] if p.requires_grad]}
        for group in optimizer.param_groups
    ]
    return groups, lambda parts: _again(optimizer, parts)


def _copied(value: Any) -> Any:
    """A learning rate may be a tensor."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _again(optimizer: Optimizer, groups: Groups) -> Optimizer:
    """A new optimizer of the same class for other parameters. Never a copy: it might hold on to the user's."""
    takes = inspect.signature(type(optimizer)).parameters
    defaults = {name: _copied(value) for name, value in optimizer.defaults.items() if name in takes}
    return type(optimizer)(groups, **defaults)


def _kind(optimizer: Any, groups: Groups) -> str:
    """Class, settings and parameters; of numbers only whether they are zero, since schedules change them."""
    name = optimizer.lower() if isinstance(optimizer, str) else type(optimizer).__qualname__
    parts = []
    for group in groups:
        size = sum(p.numel() * p.element_size() for p in group["params"])
        settings = sorted((key, _setting(value)) for key, value in group.items() if key != "params")
        parts.append(f"{len(group['params'])} parameters of {size} bytes" + "".join(f", {k}={v}" for k, v in settings))
    return f"{name}: " + "; ".join(parts)


def _setting(value: Any) -> str:
    if value is None or isinstance(value, (bool, torch.Tensor)):
        return str(value) if not isinstance(value, torch.Tensor) else "tensor"
    return "set" if value else "zero"


# -- stand-ins ---------------------------------------------------------------------------------------


def _tried(groups: Groups, make: Callable[[Groups], Optimizer], device: torch.device) -> _Trial | None:
    """State and workspace of the real parameters; None if stand-ins can't be stepped or don't tell."""
    parameters = list(chain.from_iterable(group["params"] for group in groups))
    scale = max(2, -(-sum(p.numel() for p in parameters) // _STAND_INS))
    states = random_states()
    collects = gc.isenabled()
    gc.disable()  # garbage of earlier measurements, freed while the meter is on, would count
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one, two = (_stepped(groups, make, device, scale, twice) for twice in (False, True))
    except ProfileError:
        raise
    except Exception:  # whatever a class does that is made or stepped in another way than torch's own
        return None
    finally:
        restore_random(states)
        if collects:
            gc.enable()
    # Most that is there per parameter whatever its size: some numbers, or what the allocator rounds up.
    slack = 8 * _device.rounded(device, 8) * (len(parameters) + 64)
    state, workspace = two.state - one.state, two.workspace - one.workspace
    constants = one.state - state, one.workspace - workspace
    if min(state, workspace) < 0 or not all(0 <= constant <= slack for constant in constants) or one.size == two.size:
        return None
    size = _size(parameters, device)
    return _Trial(
        state=constants[0] + -(-state * size // (two.size - one.size)),
        workspace=constants[1] + workspace * scale,
        size=size,
    )


def _stepped(
    groups: Groups, make: Callable[[Groups], Optimizer], device: torch.device, scale: int, twice: bool
) -> _Trial:
    """Three steps of stand-ins on the device's meter: the first makes the state, the last is one late in training."""
    parts = [{**group, "params": [_stand_in(p, scale, twice) for p in group["params"]]} for group in groups]
    size = _size(chain.from_iterable(group["params"] for group in parts), device)
    with _device.backend(device).meter(device, False) as peak:
        optimizer = make(parts)
        # Not optimizer.step: hooks for all optimizers, which torch wraps around it, are none of our business.
        step: Any = type(optimizer).step
        step = step.__wrapped__ if getattr(step, "hooked", False) else step
        for late in (False, False, True):
            if late:
                _make_late(optimizer)
            step(optimizer)
    optimizer.state.clear()  # now: torch's first step leaves a cycle, and later meters would see the state go
    return _Trial(state=peak.left, workspace=peak.above - peak.left, size=size)


def _make_late(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].fill_(_LATE)
        elif "step" in state:
            state["step"] = _LATE


def _stand_in(parameter: torch.Tensor, scale: int, twice: bool) -> torch.nn.Parameter:
    """A parameter of zeros with zeros as its gradient, of at least 1 / `scale` of the elements, or twice as many.

    With two dimensions or more, the first size is a column and the second a block: an optimizer that works on rows,
    columns or products of matrices, and not element by element, then shows.
    """
    count = -(-parameter.numel() // scale)
    unit = 1 << max(0, count.bit_length() - 10)  # ten digits are exact enough, and leave a divisor
    count = -(-count // unit) * unit
    rows = min(unit, 64)
    shape = [2 * rows, count // rows] if twice else [count, 1]
    if parameter.dim() < 2:
        shape = [2 * count if twice else count]
    shape += [1] * (parameter.dim() - len(shape))
    made = torch.nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device=parameter.device))
    made.grad = torch.zeros_like(made)
    return made
