"""Leave no trace: everything a step may change on the model and around it, saved and put back."""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from budgetopt._apply import INSTALLED
from budgetopt._operators import parts
from budgetopt._sample import tensors_in

_CONTAINERS = (list, dict, set, OrderedDict)  # a module's hooks are in ordered ones
_APART = frozenset({"_parameters", "_buffers", "_modules", *INSTALLED})
"""Restored by other means, or a plan's own, which stays when it is installed in the meantime."""


@contextmanager
def untouched(model: torch.nn.Module, sample: Any = None) -> Iterator[None]:
    """Whatever happens inside, gradients (the sample's too), buffers, attributes of modules, random states and
    grad mode are afterwards as they were."""
    buffers = [
        (module, name, buffer, buffer.detach().clone() if buffer is not None else None)
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    gradients = [(p, p.grad, _on_host(p.grad)) for p in leaves(model, sample)]

    def restore() -> None:
        with torch.no_grad():
            for module, name, buffer, data in buffers:
                if buffer is not None and data is not None and not _same(buffer, data):
                    buffer.copy_(data)
                module._buffers[name] = buffer
            for parameter, gradient, data in gradients:
                if gradient is not None and data is not None:
                    gradient.copy_(data)
                parameter.grad = gradient

    with restoring(model):
        try:
            yield
        finally:
            _to_the_end(restore)


@contextmanager
def restoring(model: torch.nn.Module) -> Iterator[None]:
    """Attributes of modules, random states and grad mode are afterwards as they were."""
    attributes = [(module, _copy_attributes(module)) for module in model.modules()]
    counted = [(tensor, tensor.detach().clone()) for _, kept in attributes for tensor in _tensors(kept)]
    states = random_states(model)
    grad_mode = torch.is_grad_enabled()

    def restore() -> None:
        restore_random(states)
        with torch.no_grad():
            for tensor, data in counted:
                if not _same(tensor, data):
                    tensor.copy_(data)
        for module, kept in attributes:
            _restore_attributes(module, kept)
        torch.set_grad_enabled(grad_mode)

    try:
        yield
    finally:
        _to_the_end(restore)


def _to_the_end(restore: Callable[[], None]) -> None:
    """Whatever comes in between, Ctrl-C for one."""
    try:
        restore()
    except BaseException:
        restore()
        raise


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two buffers are known to hold the same; of a sparse one all parts are compared."""
    held, copied = parts(one), parts(other)
    if held and len(held) == len(copied):
        return all(map(torch.equal, held, copied))
    try:
        return torch.equal(one, other)  # quantised, or a copy that has no parts in inference mode
    except (NotImplementedError, RuntimeError):
        return False


def _on_host(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """A copy where it takes none of the device's memory, unless that is the host's."""
    return None if gradient is None else gradient.detach().to("cpu", copy=True)


def leaves(model: torch.nn.Module, sample: Any) -> list[torch.Tensor]:
    """The tensors whose ``grad`` a backward pass fills: parameters, and what of the sample requires grad."""
    wanted = [t for t in tensors_in(sample) if t.is_leaf and t.requires_grad]
    return [*model.parameters(), *wanted]


def fresh_gradients(without: list[torch.Tensor]) -> None:
    """Around each internal step: leaves that were found `without` a gradient have none; others' values don't matter."""
    for leaf in without:
        leaf.grad = None


def _copy_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """The module's attributes; containers are copied one level deep, since forwards append to them."""
    return {
        name: value.copy() if type(value) in _CONTAINERS else value
        for name, value in module.__dict__.items()
        if name not in _APART
    }


def _tensors(attributes: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Those that are no buffers and that a step may write to: ``self.total += loss.detach()``."""
    for value in attributes.values():
        items = value.values() if isinstance(value, dict) else value if type(value) in _CONTAINERS else (value,)
        yield from (item for item in items if isinstance(item, torch.Tensor) and not item.is_inference())


def _restore_attributes(module: torch.nn.Module, kept: dict[str, Any]) -> None:
    now = module.__dict__
    for name in [name for name in now if name not in kept and name not in _APART]:
        del now[name]
    for name, value in kept.items():
        current = now.get(name)
        if type(value) in _CONTAINERS and isinstance(current, type(value)):
            _refill(current, value)
        else:
            now[name] = value


def _refill(container: Any, kept: Any) -> None:
    """Put the items back without replacing the container: others may hold it. Not compared: items may be tensors."""
    container.clear()
    if isinstance(container, list):
        container.extend(kept)
    else:
        container.update(kept)


def _streams(attributes: dict[str, Any]) -> Iterator[Any]:
    """The generators of random numbers that a module owns: torch's, Python's and numpy's."""
    kinds: tuple[Any, ...] = (torch.Generator, random.Random)
    if "numpy" in sys.modules:
        kinds += (sys.modules["numpy"].random.Generator, sys.modules["numpy"].random.RandomState)
    return (value for value in attributes.values() if isinstance(value, kinds))


def _stream_state(owned: Any) -> Any:
    if isinstance(owned, torch.Generator):
        return owned.get_state()
    if isinstance(owned, random.Random):
        return owned.getstate()
    return copy.deepcopy(owned.bit_generator.state) if hasattr(owned, "bit_generator") else owned.get_state()


def _set_stream(owned: Any, state: Any) -> None:
    if isinstance(owned, random.Random):
        owned.setstate(state)
    elif hasattr(owned, "bit_generator"):
        owned.bit_generator.state = state
    else:
        owned.set_state(state)


def random_states(model: torch.nn.Module | None = None) -> dict[str, Any]:
    """Of the global streams and of those that a model's modules own."""
    states: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    modules = () if model is None else model.modules()
    streams = (owned for module in modules for owned in _streams(vars(module)))
    states["owned"] = [(owned, _stream_state(owned)) for owned in streams]
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_random(states: dict[str, Any]) -> None:
    """Put every stream back to where it was."""
    random.setstate(states["python"])
    torch.set_rng_state(states["cpu"])
    for owned, state in states["owned"]:
        _set_stream(owned, state)
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])
